"""One sequence of tokens on its way from a rollout to a gradient.

A trajectory builds a `Sample` from recorded tokens, scoring completes it with the advantage and the group, the trainer
trains on it and the records store it. A sample is checked when it is created, so a wrong length or a NaN names its
field before any work starts.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keel.errors import BatchError

TOKEN_FIELDS = ("sampler_logprobs", "advantage", "version", "teacher_logprobs", "role")
"""Optional fields with a value for each token."""
INTEGER_FIELDS = ("token_ids", "version", "role")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One sequence: the tokens of a prompt and of the policy's completions, turn after turn."""

    token_ids: ArrayLike
    """[n] token ids exactly as sampled."""
    trainable: ArrayLike
    """[n] whether the policy sampled the token and may train on it; never the first token, which nothing predicts."""
    advantage: ArrayLike | None = None
    """One number, or [n]; None until the sample is scored."""
    sampler_logprobs: ArrayLike | None = None
    """[n] log-probs recorded by the sampler; values at tokens that are not trainable are never read."""
    version: ArrayLike | None = None
    """The policy version that sampled the tokens: one number, or [n]."""
    teacher_logprobs: ArrayLike | None = None
    """[n] log-probs under a teacher."""
    role: ArrayLike | None = None
    """One number, or [n], for objectives that choose by role."""
    group: int | None = None
    """The group of samples of the same task."""
    temperature: float = 1.0
    """The sampling temperature; the policy's log-probs are computed at the same one."""
    split_reason: str = ""
    """Why a trajectory started this sample: "start", or why it could not extend an earlier one."""
    name: str = ""
    """Name used in errors and reports."""

    def __post_init__(self) -> None:
        ids = self._as_array("token_ids")
        trainable = np.asarray(self.trainable)
        object.__setattr__(self, "token_ids", ids)
        if ids.ndim != 1 or not len(ids):
            self._raise_invalid("token_ids", f"has shape {list(ids.shape)}; it must be a list of at least one token")
        if ids.min() < 0:
            self._raise_invalid("token_ids", f"holds {ids.min()}; ids are never negative")
        if trainable.dtype != np.bool_ or trainable.shape != ids.shape:
            self._raise_invalid(
                "trainable", f"is {trainable.dtype} of shape {list(trainable.shape)}; it must be {len(ids)} booleans"
            )
        if trainable[0]:
            self._raise_invalid("trainable", "marks the first token, which no earlier token predicts")
        object.__setattr__(self, "trainable", trainable)
        for name in TOKEN_FIELDS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._per_token(name, len(ids)))
        if self.advantage is not None:
            self._check_scored(trainable)

    def _check_scored(self, trainable: NDArray[np.bool_]) -> None:
        # not checked before scoring: an evaluation may sample greedily, at temperature 0
        if not np.isfinite(np.asarray(self.advantage)[trainable]).all():
            self._raise_invalid("advantage", "is not finite on a trainable token")
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            self._raise_invalid("temperature", f"= {self.temperature} must be above 0")

    def _as_array(self, name: str) -> NDArray[Any]:
        value = np.asarray(getattr(self, name))
        if name not in INTEGER_FIELDS:
            return value.astype(np.float64)
        if value.size and not np.issubdtype(value.dtype, np.integer):
            self._raise_invalid(name, f"has dtype {value.dtype}; it must be integers")
        return value.astype(np.int64)

    def _per_token(self, name: str, size: int) -> NDArray[Any]:
        value = self._as_array(name)
        if value.ndim == 0 and name not in ("sampler_logprobs", "teacher_logprobs"):
            return np.broadcast_to(value, (size,))
        if value.shape != (size,):
            self._raise_invalid(name, f"has shape {list(value.shape)}; the sample has {size} tokens")
        return value

    def _raise_invalid(self, field: str, problem: str) -> None:
        raise BatchError(f"sample{f' {self.name}' if self.name else ''}: {field} {problem}")

    def __len__(self) -> int:
        return len(np.asarray(self.token_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return all(
            np.array_equal(mine, theirs, equal_nan=mine.dtype == np.float64)
            if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray)
            else mine is theirs or (type(mine) is type(theirs) and mine == theirs)
            for mine, theirs in pairs
        )

    def __hash__(self) -> int:
        return hash(np.asarray(self.token_ids).tobytes())

    @cached_property
    def inputs(self) -> NDArray[np.int64]:
        """The tokens that the model must read: all before the last trainable one."""
        positions = np.flatnonzero(self.trainable)
        return np.asarray(self.token_ids)[: int(positions[-1]) if len(positions) else 0]

    @property
    def trainable_count(self) -> int:
        """Number of trainable tokens."""
        return int(np.count_nonzero(self.trainable))

    @property
    def trainable_versions(self) -> NDArray[np.int64]:
        """Policy version of each trainable token; empty if no version was recorded."""
        if self.version is None:
            return np.zeros(0, np.int64)
        versions: NDArray[np.int64] = np.asarray(self.version)[np.asarray(self.trainable)]
        return versions

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version of the trainable tokens; None without any."""
        versions = self.trainable_versions
        return int(versions.min()) if len(versions) else None

    def as_lists(self) -> dict[str, Any]:
        """Return the fields that are set as plain Python values; `Sample(**...)` restores an equal sample."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in values
            if value is not None
        }
