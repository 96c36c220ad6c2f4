"""What a training loop tells whoever watches it: a terminal, a log, a test.

An observer is told and is never asked: nothing that it does may change the run, and a run without one is the same run.
`Silent` and `Several` are here; what people look at is in `keel/cli/display/progress.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keel.run.evaluate import EvaluationResult


class RunCallback(Protocol):
    """Called from the thread of the loop. Every method returns at once."""

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        """The run begins. `first`: the step that it goes on from, 0 for a new one; `steps`: the one it ends with."""

    def waiting(self, status: str) -> None:
        """What is being done just now ("sampling: 3 groups ready, 5 more needed", "training"). Called often."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is trained and written down. The names of the numbers are those of `steps.numbers` in the ledger."""

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        """One environment was evaluated after that step; 0: before the first."""

    def notice(self, text: str) -> None:
        """A line for people, as "Ctrl-C: finishing step 12"."""

    def ended(self, summary: str) -> None:
        """The last call, whatever way the run ended."""


class NullCallback:
    """Watches without a word."""

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        pass

    def waiting(self, status: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def ended(self, summary: str) -> None:
        pass


class CallbackList:
    """Tells each of its observers, in their order."""

    def __init__(self, *callbacks: RunCallback) -> None:
        self.callbacks = callbacks

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        for one in self.callbacks:
            one.started(name, folder, steps, start_step)

    def waiting(self, status: str) -> None:
        for one in self.callbacks:
            one.waiting(status)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for one in self.callbacks:
            one.step(step, metrics)

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        for one in self.callbacks:
            one.evaluated(step, evaluation)

    def notice(self, text: str) -> None:
        for one in self.callbacks:
            one.notice(text)

    def ended(self, summary: str) -> None:
        for one in self.callbacks:
            one.ended(summary)
