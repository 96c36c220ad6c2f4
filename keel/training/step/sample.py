"""What the trainer is given: token sequences with what was recorded when they were sampled.

A sample is checked when it is made, so that a wrong length or a NaN names its field before any work starts. `Tokens` is
a step's trainable tokens laid flat, sample after sample: the order of every per-token tensor in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from keel.errors import BatchError
from keel.signal import TokenBatch
from keel.training.step.prefix_tree import IntArray

_PER_TOKEN = ("sampler_logprobs", "advantage", "version", "teacher_logprobs", "role")
_INTEGERS = ("token_ids", "version", "role")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One sequence: the tokens of a prompt and of what the policy wrote, turn after turn."""

    token_ids: ArrayLike
    """[n] exactly as sampled."""
    trainable: ArrayLike
    """[n] which tokens the policy wrote and may train; never the first, before which there is nothing."""
    advantage: ArrayLike
    """One number, or [n]."""
    sampler_logprobs: ArrayLike | None = None
    """[n] as the sampler recorded them; what lies at tokens that do not train is never read."""
    version: ArrayLike | None = None
    """The policy version that sampled the tokens: one number, or [n]."""
    teacher_logprobs: ArrayLike | None = None
    """[n] under a teacher."""
    role: ArrayLike | None = None
    """One number, or [n], for objectives that choose by role."""
    group: int | None = None
    """Which group of samples of the same task."""
    temperature: float = 1.0
    """At which the sampler sampled; the policy's log-probs are taken at the same one."""
    name: str = ""
    """What errors and accounts call it."""

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
            self._raise_invalid("trainable", "marks the first token, before which there is nothing to predict it from")
        object.__setattr__(self, "trainable", trainable)
        for name in _PER_TOKEN:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._per_token(name, len(ids)))
        if not np.isfinite(np.asarray(self.advantage)[trainable]).all():
            self._raise_invalid("advantage", "is not finite on a trainable token")
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            self._raise_invalid("temperature", f"= {self.temperature} must be above 0")

    def _as_array(self, name: str) -> NDArray[Any]:
        value = np.asarray(getattr(self, name))
        if name not in _INTEGERS:
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

    @cached_property
    def inputs(self) -> IntArray:
        """The tokens that the model must read: all before the last one that trains."""
        places = np.flatnonzero(self.trainable)
        return np.asarray(self.token_ids)[: int(places[-1]) if len(places) else 0]


class TrainableTokens:
    """The trainable tokens of some samples, sample after sample."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        places = [np.flatnonzero(sample.trainable) for sample in self.samples]
        counts = [len(place) for place in places]
        self.offsets: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.sample: IntArray = np.repeat(np.arange(len(places)), counts)
        """[N] which sample."""
        self.position: IntArray = np.concatenate([np.zeros(0, np.int64), *places])
        """[N] where in the sample."""

    def __len__(self) -> int:
        return len(self.position)

    def slice_of(self, index: int) -> slice:
        """Where the tokens of a sample stand."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def gather_field(self, field: str) -> NDArray[Any] | None:
        """A per-token field of all samples, or None when no sample has it."""
        values = [getattr(sample, field) for sample in self.samples]
        if not values:
            return np.zeros(0, np.int64 if field in _INTEGERS else np.float64)
        lacking = [index for index, value in enumerate(values) if value is None]
        if len(lacking) == len(values):
            return None
        if lacking:
            name = self.samples[lacking[0]].name or f"number {lacking[0]}"
            raise BatchError(f"sample {name} has no {field}, and others do")
        pairs = zip(values, self.samples, strict=True)
        return np.concatenate([np.asarray(value)[np.asarray(sample.trainable)] for value, sample in pairs])

    @cached_property
    def targets(self) -> Tensor:
        ids = self.gather_field("token_ids")
        assert ids is not None
        return torch.from_numpy(ids)

    @cached_property
    def temperature(self) -> Tensor:
        heat = np.array([sample.temperature for sample in self.samples], np.float64)
        return torch.from_numpy(heat[self.sample])

    def to_batch(self, logprobs: Tensor, trainer_version: int | None = None, **extra: Tensor | None) -> TokenBatch:
        """These tokens as an objective reads them, with log-probs of the policy. Sequence ids are sample numbers."""
        found = {name: self.gather_field(name) for name in _PER_TOKEN}
        groups = [sample.group for sample in self.samples]
        if any(group is not None for group in groups):
            # samples without a group are groups of their own, below every id that was given
            given = min(group for group in groups if group is not None)
            own = [given - 1 - index if group is None else group for index, group in enumerate(groups)]
            found["group"] = np.array(own, np.int64)[self.sample]
        device = logprobs.device
        fields = {name: torch.from_numpy(np.array(value)) for name, value in found.items() if value is not None}
        for name, value in fields.items():
            fields[name] = value.to(device, logprobs.dtype if value.is_floating_point() else value.dtype)
        advantages = fields.pop("advantage", logprobs.new_zeros(len(self)))
        return TokenBatch(
            **({"sampler_logprobs": None} | fields | extra),
            logprobs=logprobs,
            advantages=advantages,
            trainable=torch.ones(len(self), dtype=torch.bool, device=device),
            sequence=torch.from_numpy(self.sample).to(device),
            token_ids=self.targets.to(device),
            trainer_version=trainer_version,
        )
