"""The trainable tokens of a training step, flattened sample after sample.

This is the order of every per-token tensor in a step.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.common.sample import INTEGER_FIELDS, TOKEN_FIELDS, Sample
from keel.errors import BatchError
from keel.signal import TokenBatch
from keel.training.step.prefix_tree import IntArray


class TrainableTokens:
    """The trainable tokens of a list of samples, in order."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        positions = [np.flatnonzero(sample.trainable) for sample in self.samples]
        counts = [len(in_sample) for in_sample in positions]
        self.offsets: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.sample: IntArray = np.repeat(np.arange(len(positions)), counts)
        """[N] index of the sample."""
        self.position: IntArray = np.concatenate([np.zeros(0, np.int64), *positions])
        """[N] position in the sample."""

    def __len__(self) -> int:
        return len(self.position)

    def slice_of(self, index: int) -> slice:
        """Return the slice of a sample's tokens."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def gather_field(self, field: str) -> NDArray[Any] | None:
        """Return a per-token field at all trainable tokens, or None if no sample has it."""
        values = [getattr(sample, field) for sample in self.samples]
        if not values:
            return np.zeros(0, np.int64 if field in INTEGER_FIELDS else np.float64)
        lacking = [index for index, value in enumerate(values) if value is None]
        if len(lacking) == len(values):
            return None
        if lacking:
            name = self.samples[lacking[0]].name or f"number {lacking[0]}"
            raise BatchError(f"sample {name} has no {field}, but others do")
        pairs = zip(values, self.samples, strict=True)
        return np.concatenate([np.asarray(value)[np.asarray(sample.trainable)] for value, sample in pairs])

    @cached_property
    def targets(self) -> Tensor:
        ids = self.gather_field("token_ids")
        assert ids is not None
        return torch.from_numpy(ids)

    @cached_property
    def temperature(self) -> Tensor:
        temperatures = np.array([sample.temperature for sample in self.samples], np.float64)
        return torch.from_numpy(temperatures[self.sample])

    def to_batch(self, logprobs: Tensor, trainer_version: int | None = None, **extra: Tensor | None) -> TokenBatch:
        """Return the batch of an objective with the policy's log-probs; sequence ids are sample indices."""
        columns = {name: self.gather_field(name) for name in TOKEN_FIELDS}
        groups = [sample.group for sample in self.samples]
        if any(group is not None for group in groups):
            # a sample without a group becomes a separate group, with an id below all given ids
            lowest = min(group for group in groups if group is not None)
            own = [lowest - 1 - index if group is None else group for index, group in enumerate(groups)]
            columns["group"] = np.array(own, np.int64)[self.sample]
        device = logprobs.device
        fields = {name: torch.from_numpy(np.array(value)) for name, value in columns.items() if value is not None}
        for name, value in fields.items():
            fields[name] = value.to(device, logprobs.dtype if value.is_floating_point() else value.dtype)
        if "advantage" not in fields:
            raise BatchError(f"sample {self.samples[0].name or 'number 0'} has no advantage; score it before training")
        advantages = fields.pop("advantage")
        return TokenBatch(
            **({"sampler_logprobs": None} | fields | extra),
            logprobs=logprobs,
            advantages=advantages,
            trainable=torch.ones(len(self), dtype=torch.bool, device=device),
            sequence=torch.from_numpy(self.sample).to(device),
            token_ids=self.targets.to(device),
            trainer_version=trainer_version,
        )
