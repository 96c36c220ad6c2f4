"""The process that runs the tests of a task against a program in another process.

The verdict is written to a pipe that only this process holds, with the nonce it was given. Without it the program has
failed, whatever the exit codes are. Runs inside the sandbox and imports only the standard library.
"""

import ast
import builtins
import functools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from keel.rollout.environments.rewards.remote_objects import Connection, RemoteObject

TEST_MODULE = "keel_tests"
RECORD = "__keel_record__"


class _SolutionModule(types.ModuleType):
    """`from solution import f` in a test."""

    def __init__(self, program: RemoteObject) -> None:
        super().__init__("solution")
        self.__dict__["__getattr__"] = program.get


def _used_names(code: types.CodeType) -> set[str]:
    nested = [_used_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*nested)


def program_names(used: set[str], defined: set[str], required: set[str]) -> set[str]:
    """Return the names that tests take from the program.

    A program that defines `len` or `all` must not change what the tests compute with, so names of builtins are taken
    only if the tests are about them: they use no other name of the program, or the entry point names them.
    """
    available = used & defined
    own = {name for name in available if not hasattr(builtins, name)}
    return (own or available) | (required & defined)


class _RecordAsserts(ast.NodeTransformer):
    """Replace each assert statement by one that records its result and lets the next one run."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        number = self.count
        self.count += 1
        passed, failed = (ast.parse(f"{RECORD}({number}, {value})").body for value in (True, False))
        handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), name=None, body=list(failed))
        return ast.Try(body=[node, *passed], handlers=[handler], orelse=[], finalbody=[])


class TestRun:
    """One execution of a test source against a program."""

    __test__ = False  # not a test class of pytest

    def __init__(self, tests: str, entry_point: str | None, partial: bool, connection: Connection) -> None:
        tree = ast.parse(tests)
        self._entry_point, self._partial, self._connection = entry_point, partial, connection
        self._program = RemoteObject(connection, 0)
        self._results: dict[int, bool] = {}
        self._asserts = 0
        self._uses_unittest = "TestCase" in tests
        if partial and not _has_test_functions(tree):
            recorder = _RecordAsserts()
            tree = ast.fix_missing_locations(recorder.visit(tree))
            self._asserts = recorder.count
        self._code = compile(tree, "tests.py", "exec")

    def run(self) -> tuple[int, int, str]:
        """Return how many checks passed, of how many, and the first error."""
        try:
            namespace = self._execute()
        except BaseException as error:  # noqa: BLE001  the exception is the verdict
            # an exception outside an assert ends the tests: those that did not run count as failed
            return sum(self._results.values()), max(1, self._asserts), _describe(error)
        cases = [*self._results.values()]
        error_text = "" if all(cases) else "an assert failed"
        for case in _collect_cases(namespace, self._uses_unittest):
            try:
                case()
                cases.append(True)
            except BaseException as error:  # noqa: BLE001
                cases.append(False)
                error_text = error_text or _describe(error)
        if self._connection.closed:  # a test may have caught the exception
            cases.append(False)
        if not self._partial or not cases:
            return int(all(cases)), 1, error_text
        return sum(cases), len(cases), error_text

    def _execute(self) -> dict[str, Any]:
        self._program.load()
        entry = compile(self._entry_point, "entry_point", "eval") if self._entry_point else None
        required = set(entry.co_names) if entry else set()
        names = program_names(_used_names(self._code) | required, set(self._program.names()), required)
        namespace: dict[str, Any] = {"__name__": TEST_MODULE, RECORD: self._record}
        namespace |= {name: self._program.get(name) for name in sorted(names)}
        sys.modules["solution"] = _SolutionModule(self._program)
        exec(self._code, namespace)
        check = namespace.get("check")
        if entry is not None and type(check) is types.FunctionType:  # of the tests, not of the program
            check(eval(entry, namespace))
        return namespace

    def _record(self, number: int, passed: bool) -> None:
        self._results[number] = self._results.get(number, True) and passed


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _has_test_functions(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.FunctionDef) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases))
        for node in tree.body
    )


def _collect_cases(namespace: dict[str, Any], uses_unittest: bool) -> list[Callable[[], None]]:
    """Return the `test*` functions and the unittest methods that a test source defines."""
    cases: list[Callable[[], None]] = []
    for name, value in namespace.items():
        if type(value) is types.FunctionType and name.startswith("test") and value.__module__ == TEST_MODULE:
            cases.append(value)
        elif uses_unittest and isinstance(value, type) and value.__module__ == TEST_MODULE:
            cases += _unittest_cases(value)
    return cases


def _unittest_cases(kind: type) -> list[Callable[[], None]]:
    import unittest  # takes longer to import than everything else here

    def run(case: Any) -> None:
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)
        if not result.wasSuccessful() or result.testsRun != 1:
            problems = [text for _, text in result.failures + result.errors]
            raise AssertionError(problems[0] if problems else "the test did not run")

    if not issubclass(kind, unittest.TestCase):
        return []
    return [functools.partial(run, case) for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind)]


def run_tests(
    tests: str, entry_point: str | None, partial: bool, descriptor: int, verdict_descriptor: int, nonce: str
) -> None:
    """Run tests against the program at the other end of the connection and write the verdict."""
    connection = Connection(descriptor, hide_internals=True)
    passed, total, error = TestRun(tests, entry_point, partial, connection).run()
    verdict = {"nonce": nonce, "passed": passed, "total": total, "error": error}
    os.write(verdict_descriptor, json.dumps(verdict).encode())
