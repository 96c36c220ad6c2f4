"""The process that holds the program of a completion and lets the test process use it.

The program sees the arguments of its functions and nothing else: neither the test source nor expected values nor the
verdict are in this process. Runs inside the sandbox and imports only the standard library.
"""

import sys
import types
from typing import Any

from keel.rollout.environments.rewards.remote_objects import Connection, ProgramExited


class Program:
    """The program's module, as the test process uses it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._module = types.ModuleType("solution")

    def load(self) -> None:
        """Execute the program; `if __name__ == "__main__"` blocks do not run."""
        sys.modules["solution"] = self._module
        exec(compile(self._source, "program.py", "exec"), self._module.__dict__)

    def names(self) -> list[str]:
        """Return the names that the program defines."""
        return [name for name in self._module.__dict__ if not name.startswith("__")]

    def get(self, name: str) -> Any:
        """Return the object of a name."""
        return getattr(self._module, name)


def serve_program(program: str, descriptor: int) -> None:
    """Serve requests of the test process until it closes the connection."""
    connection = Connection(descriptor, hide_internals=False)
    connection.export(Program(program))
    while True:
        try:
            connection.serve(connection.receive())
        except ProgramExited:
            return
