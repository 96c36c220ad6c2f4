"""What a reward worker process does: load and call reward functions.

Reads one JSON request per line and writes one JSON reply per line. A request loads a function under a number, or calls
a loaded one with keyword arguments. Standard input and output of the process are not the connection, so what a function
prints or reads cannot corrupt the protocol. The process imports neither torch nor the rest of Keel, and ends with its
parent.
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
                reply: dict[str, Any] = {"value": None}
            else:
                reply = {"value": check_value(functions[request["call"]](**request["arguments"]))}
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
    """Return a function of keyword arguments that passes those which `function` takes, and awaits a coroutine.

    A function with a parameter `completions` takes lists, as in TRL; it is called with lists of one element.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_lists = "completions" in parameters

    def call(**arguments: Any) -> Any:
        if takes_lists:
            arguments["completions"], arguments["prompts"] = arguments.pop("completion"), arguments.pop("prompt")
        passed = {name: value for name, value in arguments.items() if takes_all or name in parameters}
        if takes_lists:
            passed = {name: [value] for name, value in passed.items()}
        value = function(**passed)
        if inspect.isawaitable(value):
            value = asyncio.run(_resolve(value))
        if takes_lists:
            (value,) = value
        return value

    return call


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def check_value(value: Any) -> float | dict[str, Any] | None:
    """Return a reward as JSON: a finite number, or None to abstain."""
    if value is None:
        return None
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, bool | int | float):
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}; it must be a finite number, or None to abstain")
        return float(value)
    raise TypeError(f"the reward is a {type(value).__name__}; it must be a number, or None to abstain")


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
