"""What a reward worker process does: load and call reward functions.

Reads one JSON request per line and writes one JSON reply per line. A request loads a function under a number, or calls
a loaded one for one or more completions, each with its keyword arguments. Standard input and output of the process are
not the connection, so what a function prints or reads cannot corrupt the protocol. The process imports neither torch
nor the rest of Keel, and ends with its parent.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

MAX_TRACEBACK = 4000
"""Characters of a traceback that are sent back."""

Reward = Callable[..., Any]


def serve(requests: TextIO, replies: TextIO, functions: dict[int, Reward]) -> None:
    """Answer requests until the connection closes; `functions` are loaded already."""
    for line in requests:
        request = json.loads(line)
        try:
            if "load" in request:
                functions[request["load"]] = load_function(request)
                reply: dict[str, Any] = {"values": []}
            else:
                reply = {"values": [check_value(value) for value in functions[request["call"]](request["items"])]}
        except BaseException as error:  # noqa: BLE001  any exception of user code is a result, SystemExit included
            reply = describe_error(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def load_function(request: dict[str, Any]) -> Reward:
    """Return the function that a request names by `module:attribute`."""
    for folder in reversed(request.get("path", ())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module, _, attribute = request["name"].partition(":")
    function: Any = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    if "options" in request:  # a factory
        function = function(**request["options"])
    if not callable(function):
        raise TypeError(f"{request['name']} is a {type(function).__name__}, not a function")
    return adapt(function)


def adapt(function: Reward) -> Reward:
    """Return a function of a list of completions, each with its keyword arguments, that returns their rewards.

    `function` receives the arguments that it takes, and a coroutine is awaited. A function of lists (`takes_lists`) is
    called once with a list for each argument, any other function once for each completion.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def call(**arguments: Any) -> Any:
        value = function(**{name: value for name, value in arguments.items() if takes_all or name in parameters})
        return asyncio.run(_resolve(value)) if inspect.isawaitable(value) else value

    def call_with_lists(items: list[dict[str, Any]]) -> list[Any]:
        lists = {name: [item[name] for item in items] for name in items[0]}
        lists["completions"], lists["prompts"] = lists.pop("completion"), lists.pop("prompt")
        values = list(call(**lists))
        if len(values) != len(items):
            raise ValueError(f"{len(values)} rewards were returned for {len(items)} completions")
        return values

    return call_with_lists if takes_lists(function) else lambda items: [call(**item) for item in items]


def takes_lists(function: Reward) -> bool:
    """Return whether a function takes lists, as in TRL: whether it has a parameter `completions`."""
    return "completions" in inspect.signature(function).parameters


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def check_value(value: Any) -> tuple[float | None, dict[str, float]]:
    """Return a reward as JSON: a finite number, or None to abstain; and the metrics that were returned with it.

    A reward with metrics is `{"reward": 0.5, "metrics": {"length": 7}}`.
    """
    if not isinstance(value, dict):
        return _check_number("the reward", value), {}
    if set(value) - {"reward", "metrics"} or "reward" not in value:
        raise TypeError(f'the reward is a dict with {", ".join(map(repr, value))}; it may have "reward" and "metrics"')
    metrics = {
        str(name): _check_number(f"metric {name!r}", number) for name, number in value.get("metrics", {}).items()
    }
    return _check_number("the reward", value["reward"]), {k: v for k, v in metrics.items() if v is not None}


def _check_number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, bool | int | float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be a finite number, or None to abstain")
        return float(value)
    raise TypeError(f"{name} is a {type(value).__name__}; it must be a number, or None to abstain")


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON: one line with its place, and the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.basename(frame.filename) != os.path.basename(__file__)]
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    message = " ".join(str(error).split())[:300]
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return {"error": f"{type(error).__name__}: {message}{place}", "traceback": text}


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that no worker outlives a run."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
