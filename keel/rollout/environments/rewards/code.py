"""The `code` reward: run the program of a completion against the tests of its task, in a sandbox.

`code(...)` returns `reward(completion, **columns)`. A program is correct only if its tests say so: the verdict is
computed in a process that the program cannot reach (`verdict_process.py`), and expected outputs never enter a sandbox
together with the program. Errors in the tests of the dataset raise ValueError; errors of the program score 0. Imports
only the standard library and modules of this package that do the same.
"""

import ast
import contextlib
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

from keel.rollout.environments.rewards import sandbox
from keel.rollout.environments.rewards.sandbox import SandboxError, SandboxLimits

log = logging.getLogger("keel.sandbox")

Kind = Literal["auto", "assertions", "stdin"]
FENCE = re.compile(r"^[ \t]*```[ \t]*([^\n`]*)\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
MAX_CHARACTERS = 200_000
"""Longest completion that is run; a longer one scores 0."""
VERDICT_BYTES = 4096
MODULES = ("value_codec", "remote_objects")


@dataclass(frozen=True)
class CodeResult:
    """What running a program against its tests showed."""

    passed: int
    total: int
    error: str = ""
    """The first error, for logs."""

    def score(self, partial: bool) -> float:
        """Return 1 if everything passed, else 0, or with `partial` the fraction that passed."""
        return self.passed / self.total if partial else float(self.passed == self.total)


def extract_program(completion: str) -> str:
    """Return the last fenced block marked as Python, else the last block without a language, else the whole text."""
    blocks = [(match[1].strip().lower(), match[2]) for match in FENCE.finditer(completion)]
    for languages in (("python", "py", "python3"), ("",)):
        matching = [body for language, body in blocks if language in languages]
        if matching:
            return matching[-1]
    return completion


def run_assertions(
    program: str, tests: str, limits: SandboxLimits, *, entry_point: str | None = None, partial: bool = False
) -> CodeResult:
    """Run a test source against a program, each in its own sandbox; they share one connection."""
    nonce = secrets.token_hex(16)
    deadline = time.monotonic() + limits.timeout
    with contextlib.ExitStack() as stack:
        program_end, test_end = (stack.enter_context(end) for end in socket.socketpair())
        reader, writer = (stack.enter_context(os.fdopen(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True))
        arguments = {"program": program, "descriptor": program_end.fileno()}
        stack.enter_context(_start("program_process:serve_program", arguments, limits, [program_end.fileno()]))
        descriptors = {"descriptor": test_end.fileno(), "verdict_descriptor": writer.fileno()}
        settings = {"tests": tests, "entry_point": entry_point, "partial": partial, "nonce": nonce}
        stack.enter_context(
            _start("verdict_process:run_tests", settings | descriptors, limits, list(descriptors.values()))
        )
        # each process holds the only copy of its end, so that the end of one is seen by the other and by the reader
        for end in (program_end, test_end, writer):
            end.close()
        report, problem = sandbox.read_until(reader.fileno(), deadline, VERDICT_BYTES)
    return _read_verdict(report, problem, nonce)


def _start(
    entry: str, arguments: dict[str, Any], limits: SandboxLimits, descriptors: list[int]
) -> AbstractContextManager[Any]:
    modules = [*MODULES, entry.partition(":")[0]]
    return sandbox.start(entry, arguments, limits, modules=modules, pass_fds=descriptors)


def _read_verdict(report: bytes, problem: str, nonce: str) -> CodeResult:
    if problem:
        return CodeResult(0, 1, problem)
    try:
        verdict = json.loads(report)
        valid = secrets.compare_digest(str(verdict["nonce"]), nonce)
        result = CodeResult(int(verdict["passed"]), int(verdict["total"]), str(verdict["error"]))
    except (ValueError, KeyError, TypeError):
        return CodeResult(0, 1, "the tests ended without a verdict")
    return result if valid and 0 <= result.passed <= result.total else CodeResult(0, 1, "invalid verdict")


def _normalize_output(text: str) -> list[str]:
    """Return the lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run_stdin(
    program: str,
    pairs: Sequence[tuple[str, str]],
    limits: SandboxLimits,
    *,
    partial: bool = False,
    total_timeout: float = math.inf,
) -> CodeResult:
    """Run a program once per (input, expected output) pair and compare its output here, outside the sandbox.

    The first failure ends the run, or with `partial` the first timeout: later pairs count as failed. All runs together
    may take `total_timeout` seconds.
    """
    passed, first_error, deadline = 0, "", time.monotonic() + total_timeout
    for number, (given, expected) in enumerate(pairs):
        seconds = min(limits.timeout, deadline - time.monotonic())
        if seconds <= 0:
            first_error = first_error or f"pair {number}: timeout of all pairs together"
            break
        result = sandbox.run_script(program, replace(limits, timeout=seconds), stdin=given.encode())
        output = result.output.decode(errors="replace")
        error: str = result.problem
        if not error and result.exit_code != 0:
            error = f"exit code {result.exit_code}"
        if not error and _normalize_output(output) != _normalize_output(expected):
            error = "wrong output"
        if not error:
            passed += 1
            continue
        first_error = first_error or f"pair {number}: {error}"
        if not partial or result.problem == "timeout":
            break
    return CodeResult(passed, len(pairs), first_error)


def _parse_json(value: Any) -> Any:
    """Return the list or mapping that a string holds as JSON, else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def parse_pairs(tests: Any, column: str) -> list[tuple[str, str]]:
    """Return (input, output) pairs of `[{"input", "output"}, ...]`, `{"inputs", "outputs"}` or their JSON text."""
    tests = _parse_json(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= set(tests):
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f'column "{column}" has {len(tests["inputs"])} inputs and {len(tests["outputs"])} outputs')
        tests = [{"input": i, "output": o} for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f'column "{column}" must be a list of {{"input", "output"}} pairs, got {str(tests)[:80]!r}')
    pairs = []
    for pair in tests:
        if not isinstance(pair, Mapping) or not {"input", "output"} <= set(pair):
            raise ValueError(f'column "{column}" must hold {{"input", "output"}} pairs, got {str(pair)[:80]!r}')
        pairs.append((_to_text(pair["input"]), _to_text(pair["output"])))
    return pairs


def _to_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def parse_assertions(tests: Any, column: str, entry_point: Any) -> str:
    """Return the test source; raise ValueError if it cannot test anything."""
    tests = _parse_json(tests)
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        tests = "\n".join(map(str, tests))
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError(f'column "{column}" must be Python source with assertions, got {str(tests)[:80]!r}')
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f'column "{column}" is not valid Python: {error}') from error
    defines_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if defines_check and not entry_point and not any(isinstance(f, ast.Name) and f.id == "check" for f in calls):
        raise ValueError(
            f'column "{column}" defines check(candidate) but there is no column "entry_point" to pass to it'
        )
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name.startswith(("check", "test")) for node in tree.body):
        raise ValueError(f'column "{column}" has an async test function; only plain functions are supported')
    missing = sorted(_imported_modules(tree) - sys.stdlib_module_names - {"solution"})
    if missing:
        raise ValueError(
            f'column "{column}" imports {", ".join(missing)}: the sandbox has only the standard library, and the '
            'program as module "solution"'
        )
    return tests


def _imported_modules(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    return modules


def detect_kind(tests: Any) -> Literal["assertions", "stdin"]:
    """Return "stdin" for input/output pairs and "assertions" for Python source or a list of assertions."""
    tests = _parse_json(tests)
    first = tests[0] if isinstance(tests, Sequence) and not isinstance(tests, str) and tests else tests
    return "stdin" if isinstance(first, Mapping) else "assertions"


def code(
    *,
    tests_column: str = "tests",
    kind: Kind = "auto",
    language: str = "python",
    timeout: float = 10.0,
    total_timeout: float = 60.0,
    memory_mb: int = 512,
    max_output: int = 65536,
    require_isolation: bool = False,
    partial: bool = False,
) -> Callable[..., float]:
    """1 when the program of the completion passes the tests of its task; with `partial` the fraction that passes.

    Tests are a string or list of assertions, HumanEval's `check(candidate)` with a column `entry_point`, unittest
    classes, `test*` functions, or pairs of standard input and output. `timeout` is seconds per run of the program, and
    each pair is a run; all runs of a completion may take `total_timeout`, or `timeout` if that is more.
    `require_isolation = True` raises SandboxError where bubblewrap does not work.
    """
    if kind not in ("auto", "assertions", "stdin"):
        raise ValueError(f'kind = "{kind}" must be "auto", "assertions" or "stdin"')
    if language != "python":
        raise ValueError(f'language = "{language}" must be "python"')
    if os.name != "posix":
        raise SandboxError("the code reward needs Linux or macOS: Windows has no resource limits for processes")
    limits = SandboxLimits(timeout=timeout, memory_mb=memory_mb, max_output=max_output)
    if not (math.isfinite(total_timeout) and total_timeout > 0):
        raise ValueError(f"total_timeout = {total_timeout!r} must be a number greater than 0")
    total_timeout = max(total_timeout, timeout)
    if require_isolation:
        sandbox.check_isolation()

    def reward(completion: str, **columns: Any) -> float:
        if columns.get(tests_column) is None:
            raise ValueError(f'tests_column = "{tests_column}" is not a column of the task; columns: {sorted(columns)}')
        tests, entry_point = columns[tests_column], columns.get("entry_point")
        use_pairs = (detect_kind(tests) if kind == "auto" else kind) == "stdin"
        # tests are checked first: an error of the dataset must not depend on the completion
        pairs = parse_pairs(tests, tests_column) if use_pairs else []
        source = "" if use_pairs else parse_assertions(tests, tests_column, entry_point)
        if len(completion) > MAX_CHARACTERS:
            return 0.0
        program = extract_program(completion)
        if use_pairs:
            result = run_stdin(program, pairs, limits, partial=partial, total_timeout=total_timeout)
        else:
            result = run_assertions(program, source, limits, entry_point=entry_point, partial=partial)
        log.debug("code reward: %d of %d passed %s", result.passed, result.total, result.error)
        return result.score(partial)

    # what kills the worker must come later, or a slow program would fail its rollout instead of scoring 0
    reward.time_limit = total_timeout  # type: ignore[attr-defined]
    return reward
