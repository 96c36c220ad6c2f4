"""The tokens of a step, or of one micro-batch of it, as flat packed tensors.

There is one tensor per field, all of the same length. Ids are valid for the whole step: the same `sequence` id in two
micro-batches is the same sequence. A batch is validated when it is created; values at untrainable tokens are never
read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.errors import BatchError

FLOAT_FIELDS = (
    "logprobs",
    "sampler_logprobs",
    "advantages",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "entropy",
)
ID_FIELDS = ("sequence", "group", "version", "token_ids", "role")


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """The tokens of a step with their log-probs, advantages and ids."""

    logprobs: Float[Tensor, "T"]
    """l: log-probs under the policy being trained; carry the gradient."""
    sampler_logprobs: Float[Tensor, "T"] | None
    """b: log-probs recorded by the sampler; None only for objectives that do not read them (cross_entropy)."""
    advantages: Float[Tensor, "T"]
    """A: never carries a gradient."""
    trainable: Bool[Tensor, "T"]
    """Whether the policy sampled the token and it is trained."""
    sequence: Int[Tensor, "T"]
    """Id of the sequence that the token belongs to."""
    group: Int[Tensor, "T"] | None = None
    """Id of the group, that is, the rollouts of the same task."""
    version: Int[Tensor, "T"] | None = None
    """The policy version that sampled the token."""
    proximal_logprobs: Float[Tensor, "T"] | None = None
    """o: log-probs under the policy at the start of the step."""
    reference_logprobs: Float[Tensor, "T"] | None = None
    """f: log-probs under a frozen reference."""
    teacher_logprobs: Float[Tensor, "T"] | None = None
    """h: log-probs under a teacher."""
    token_ids: Int[Tensor, "T"] | None = None
    """Token ids, for the list of the most dropped tokens."""
    role: Int[Tensor, "T"] | None = None
    """Role id of the token's author, for objectives that select tokens by role."""
    entropy: Float[Tensor, "T"] | None = None
    """Entropy of the policy's distribution at the token. Used only for metrics."""
    trainer_version: int | None = None
    """The version being trained, from which staleness is measured. Defaults to the newest version in the step."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "advantages", "trainable", "sequence"):
            if getattr(self, name) is None:
                raise BatchError(f"batch.{name} is missing")
        for name, value in self.tensors().items():
            self._check_tensor(name, value)
        if self.trainable.dtype != torch.bool:
            object.__setattr__(self, "trainable", _as_mask(self.trainable))
        if self.trainer_version is not None and self.version is None:
            raise BatchError(f"batch.trainer_version = {self.trainer_version} needs batch.version")

    def _check_tensor(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise BatchError(f"batch.{name} is a {type(value).__name__}; it must be a torch tensor")
        if value.shape != self.logprobs.shape or value.dim() != 1:
            raise BatchError(
                f"batch.{name} has shape {list(value.shape)}; every field must be one-dimensional and as long as"
                f" batch.logprobs, {list(self.logprobs.shape)}"
            )
        if value.device != self.logprobs.device:
            raise BatchError(f"batch.{name} is on {value.device} and batch.logprobs on {self.logprobs.device}")
        if value.is_meta:
            raise BatchError(f"batch.{name} is on the meta device, which holds no values; create it on another device")
        if name in FLOAT_FIELDS and not value.dtype.is_floating_point:
            raise BatchError(f"batch.{name} has dtype {value.dtype}; it must be floating point")
        if name in ID_FIELDS and (value.dtype == torch.bool or value.is_floating_point() or value.is_complex()):
            raise BatchError(f"batch.{name} has dtype {value.dtype}; ids must be integers")

    def __len__(self) -> int:
        return len(self.logprobs)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and name != "trainer_version"}

    def replace(self, **changes: Any) -> "TokenBatch":
        """Return a copy with some fields changed."""
        return TokenBatch(
            **({"sampler_logprobs": None, "trainer_version": self.trainer_version} | self.tensors() | changes)
        )

    def take(self, index: Tensor) -> "TokenBatch":
        """Return the tokens at these positions, in this order. Gradients flow through."""
        return self.replace(**{name: value[index] for name, value in self.tensors().items()})

    @staticmethod
    def cat(batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """Concatenate batches. They must have the same fields."""
        first = batches[0]
        for batch in batches:
            if batch.tensors().keys() != first.tensors().keys():
                different = sorted(batch.tensors().keys() ^ first.tensors().keys())
                raise BatchError(f"batches must have the same fields; only some have {', '.join(different)}")
        concatenated = {name: torch.cat([batch.tensors()[name] for batch in batches]) for name in first.tensors()}
        return first.replace(**concatenated)


def _as_mask(value: Tensor) -> Bool[Tensor, "T"]:
    if value.is_floating_point() or value.is_complex():
        raise BatchError(f"batch.trainable has dtype {value.dtype}; it must be bool")
    invalid = value[(value != 0) & (value != 1)]
    if len(invalid):
        raise BatchError(f"batch.trainable contains {invalid[0].item()}; it must be bool, or 0 and 1")
    return value.bool()
