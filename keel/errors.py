"""The exceptions that Keel raises for users.

Each message names the setting or object, its value and what to do about it. All of them are `ValueError`s, so callers
that do not know Keel's own types can catch them.
"""

from collections.abc import Sequence


class KeelError(ValueError):
    """Base class of all errors that Keel raises."""


class ConfigError(KeelError):
    """A setting is unknown, out of range, or would have no effect."""


class MissingDependencyError(KeelError):
    """An optional package that is not installed; the message names the extra of keel-rl that installs it."""


class BatchError(KeelError):
    """A token batch has a wrong shape, type, device or value."""


class StorageError(KeelError):
    """The disk is full or a file of the run is damaged. No rollout caused it, so a retry does not help."""


class InvalidSignalError(KeelError):
    """Too many log-probs of a step are invalid to train on it."""


class ModelError(KeelError):
    """A model, adapter or checkpoint cannot be used."""


class StepSkippedError(KeelError):
    """An optimizer step was not taken, for the reason in the message. The weights are unchanged."""

    def __init__(self, message: str, samples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.samples = list(samples)
        """Indexes of the samples to drop before the step is tried again."""


class RankError(KeelError):
    """A trainer rank was lost, hangs or failed alone. The other ranks cannot continue without it."""


class FatalEnvironmentError(KeelError):
    """An error of an environment that stops the run instead of failing one rollout."""
