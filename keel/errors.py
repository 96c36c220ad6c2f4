"""The errors a user of Keel can meet.

Each message names the thing, its value and what to do about it. All of them are `ValueError`s, so that a caller who
catches nothing in particular still gets the message.
"""

from collections.abc import Sequence


class KeelError(ValueError):
    """Anything Keel refuses."""


class ConfigError(KeelError):
    """A setting that is unknown, out of range, or that could not act."""


class MissingDependencyError(KeelError):
    """An optional package that is not installed; the message names the extra of keel-rl that installs it."""


class BatchError(KeelError):
    """A token batch with a wrong shape, type, device or value."""


class StorageError(KeelError):
    """A disk that is full, or a file of the run that is damaged: no rollout is to blame, and no retry helps."""


class SignalRefused(KeelError):
    """A step whose data is too damaged to train on."""


class ModelError(KeelError):
    """A model, adapter or checkpoint that cannot be used."""


class StepRefused(KeelError):
    """An optimizer step that was not taken, and why. The weights are as they were before it."""

    def __init__(self, message: str, samples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.samples = list(samples)
        """The numbers of the samples to leave out before trying again."""


class RankError(KeelError):
    """A rank of the trainer that was lost, hangs, or failed alone. The others cannot go on without it."""
