"""Callbacks of a training run, for example a terminal display, a log or a test.

Callbacks only observe: nothing they do changes the run, and a run without callbacks is the same run. `NullCallback` and
`CallbackList` are here; the terminal display is in `keel/run/monitor/progress.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keel.run.evaluation.evaluate import EvaluationResult


class RunCallback(Protocol):
    """Called from the thread of the loop. Every method must return immediately."""

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        """The run starts. `start_step` is the step it resumes from, 0 for a new run; `steps` is its last step."""

    def waiting(self, status: str) -> None:
        """The current activity, such as "sampling: 3 groups ready, 5 more needed" or "training". Called often."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is trained and recorded. Metric names are those of `steps.metrics` in the ledger."""

    def rollouts_failed(self, count: int, last_error: str) -> None:
        """Rollouts have failed: `count` since the run was started or resumed, retried or not; and the last error."""

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        """One environment was evaluated after that step; 0: before the first step."""

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """Supervised fine-tuning measured the loss of held-out conversations after that step."""

    def notice(self, text: str) -> None:
        """A message for the user, such as "finishing step 12"."""

    def ended(self, summary: str) -> None:
        """The last call, however the run ended."""


class NullCallback:
    """A callback that does nothing."""

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        pass

    def waiting(self, status: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def rollouts_failed(self, count: int, last_error: str) -> None:
        pass

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        pass

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def ended(self, summary: str) -> None:
        pass


class CallbackList:
    """Calls each of its callbacks, in order."""

    def __init__(self, *callbacks: RunCallback) -> None:
        self.callbacks = callbacks

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        for callback in self.callbacks:
            callback.started(name, folder, steps, start_step)

    def waiting(self, status: str) -> None:
        for callback in self.callbacks:
            callback.waiting(status)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.step(step, metrics)

    def rollouts_failed(self, count: int, last_error: str) -> None:
        for callback in self.callbacks:
            callback.rollouts_failed(count, last_error)

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        for callback in self.callbacks:
            callback.evaluated(step, evaluation)

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.loss_evaluated(step, name, metrics)

    def notice(self, text: str) -> None:
        for callback in self.callbacks:
            callback.notice(text)

    def ended(self, summary: str) -> None:
        for callback in self.callbacks:
            callback.ended(summary)
