"""Select the active tokens of a batch: trainable, with one of the objective's roles, and with a valid sampler log-prob.

They are selected, never masked by multiplication, so that other entries (NaN, infinities, prompts) cannot affect the
arithmetic in the forward or the backward pass. Everything here is without gradient and in float32 or float64.
"""

from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.errors import BatchError
from keel.objectives import Composition
from keel.signal.cpu_ops import count_true
from keel.signal.segments import Segments
from keel.signal.token_batch import FLOAT_FIELDS, TokenBatch

if TYPE_CHECKING:
    from keel.signal.gates import GateResult

MAX_LOG_RATIO = 40.0
"""Ratios saturate at e^40, whose square still fits float32. A kept ratio is therefore finite, and 0 * r is 0."""

MAX_LOGPROB = 1e-3
"""The largest log-prob that is taken for 0 plus rounding; a probability above 1 means logits or a wrong sign."""

LOGPROB_FIELDS = {
    "policy": "logprobs",
    "sampler": "sampler_logprobs",
    "proximal": "proximal_logprobs",
    "reference": "reference_logprobs",
    "teacher": "teacher_logprobs",
}


def keep_bitmask(dropped: Bool[Tensor, "n"], dtype: torch.dtype) -> Int[Tensor, "n"]:
    """Return integers as wide as `dtype` with no bits where `dropped` is true and all bits elsewhere.

    For `apply_bitmask_`.
    """
    # subtracting in bytes and then sign-extending reads a quarter of the memory
    return dropped.view(torch.int8).sub(1).to(torch.int64 if dtype == torch.float64 else torch.int32)


def apply_bitmask_(values: Float[Tensor, "n"], bitmask: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Set values to zero, in place, where the bitmask has no bits. Also clears NaN, which a product would not.

    Equivalent to masked_fill_, which takes a branch for each token and is eight times slower.
    """
    values.view(bitmask.dtype).bitwise_and_(bitmask)
    return values


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio, saturating at e^40, far above the ratio of any real pair of policies."""
    # computing the maximum is much cheaper than the copy that clamp makes
    if len(log_ratio) and float(log_ratio.max()) <= MAX_LOG_RATIO:
        return log_ratio.exp()
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp_()


class ActiveTokens:
    """The active tokens of one batch, with their log-probs and log-ratios."""

    def __init__(self, batch: TokenBatch, composition: Composition) -> None:
        self.batch = batch
        self.composition = composition
        self.dtype = torch.float32
        for name, value in batch.tensors().items():
            if name in FLOAT_FIELDS and value.dtype == torch.float64:
                self.dtype = torch.float64
        trainable = batch.trainable
        if composition.roles is not None:
            if batch.role is None:
                raise BatchError(f"objective.roles = {composition.roles} needs batch.role")
            roles = torch.tensor(composition.roles, device=batch.role.device)
            trainable = trainable & torch.isin(batch.role, roles)
        self.num_trainable = count_true(trainable)
        all_trainable = self.num_trainable == len(batch)
        self.trainable_index: Int[Tensor, "trainable"] | None = (
            None if all_trainable else trainable.nonzero().squeeze(1)
        )
        """Positions of the trainable tokens with one of the objective's roles; None if these are all tokens."""
        self.index: Int[Tensor, "n"] | None = self.trainable_index
        """Positions of the active tokens; None if these are all tokens."""
        self.newest_version = (
            int(self.take(batch.version).max()) if batch.version is not None and self.num_trainable else None
        )
        self.cached_decision: tuple[Float[Tensor, "n"], GateResult] | None = None
        """Advantage and gate result, set once the totals of the step are known."""
        self._logprobs: dict[str, Float[Tensor, "n"]] = {}
        self._log_ratios: dict[str, Float[Tensor, "n"]] = {}
        if composition.reads("sampler"):
            self._drop_invalid_logprobs()
        else:
            self._check_finite("logprobs", self.logprob("policy"))
        self._check_policy_logprobs()
        self.advantages: Float[Tensor, "n"] = self._select(batch.advantages)
        if composition.policy.surrogate != "cross_entropy":
            self._check_finite("advantages", self.advantages)

    def __len__(self) -> int:
        return self.num_trainable - self.num_invalid_logprobs

    @property
    def num_invalid_logprobs(self) -> int:
        """The number of trainable tokens whose sampler log-prob is NaN or infinite."""
        return self.num_trainable - (len(self.batch) if self.index is None else len(self.index))

    def _drop_invalid_logprobs(self) -> None:
        """Exclude the tokens with an invalid sampler log-prob. The policy log-probs of the others must be finite."""
        if self.batch.sampler_logprobs is None:
            raise BatchError("batch.sampler_logprobs is missing, and this objective reads it")
        sampler = self._select(self.batch.sampler_logprobs)
        self._logprobs["sampler"] = sampler
        # a finite difference has finite operands and is needed later, so one pass checks both
        if bool(self.log_ratio("policy/sampler").sum().isfinite()):
            return
        self._log_ratios.clear()
        if not _all_finite(sampler):
            valid = sampler.isfinite().nonzero().squeeze(1)
            self.index = valid if self.index is None else self.index[valid]
            self._logprobs = {"sampler": sampler.index_select(0, valid)}
        self._check_finite("logprobs", self.logprob("policy"))

    def _select(self, field: Tensor) -> Tensor:
        return self.take(field.detach()).to(self.dtype)

    def _check_finite(self, name: str, values: Float[Tensor, "n"]) -> None:
        if _all_finite(values):
            return
        first = int((~values.isfinite()).nonzero()[0])
        position = first if self.index is None else int(self.index[first])
        raise BatchError(f"batch.{name}[{position}] = {values[first].item()}: a trainable token needs a finite value")

    def _check_policy_logprobs(self) -> None:
        """Refuse policy log-probs of a probability above 1."""
        values = self.logprob("policy")
        if not len(values) or float(values.max()) <= MAX_LOGPROB:
            return
        first = int(values.argmax())
        position = first if self.index is None else int(self.index[first])
        raise BatchError(
            f"batch.logprobs[{position}] = {values[first].item():g}: a log-prob is at most 0; check that it is the log"
            " of a probability, and its sign"
        )

    @property
    def loaded_sources(self) -> set[str]:
        """The sources whose log-probs have been read."""
        return set(self._logprobs)

    def logprob(self, source: str) -> Float[Tensor, "n"]:
        """Return the log-probs of a source: policy, sampler, proximal, reference or teacher."""
        if source not in self._logprobs:
            field = LOGPROB_FIELDS[source]
            value = getattr(self.batch, field)
            if value is None:
                raise BatchError(f"batch.{field} is missing, and this objective reads it")
            self._logprobs[source] = self._select(value)
            if source not in ("policy", "sampler"):
                self._check_finite(field, self._logprobs[source])
        return self._logprobs[source]

    def interpolate_proximal(self, trainer_version: int | None) -> None:
        """Set o to a point between b and l that is closer to l for staler tokens (arXiv 2512.06547)."""
        if self.batch.version is None:
            raise BatchError('objective.proximal = "interpolated" needs batch.version')
        if trainer_version is None:
            trainer_version = 0  # a step without trainable tokens has no newest version, and no token uses this one
        fraction = 1 - 1 / self.staleness(trainer_version).clamp(min=1).to(self.dtype)
        self._logprobs["proximal"] = torch.lerp(self.logprob("sampler"), self.logprob("policy"), fraction)

    def log_ratio(self, pair: str) -> Float[Tensor, "n"]:
        """Return the log-ratio of two policies: "policy/sampler" is d = l - b. Callers must not modify it."""
        if pair not in self._log_ratios:
            over, under = pair.split("/")
            self._log_ratios[pair] = self.logprob(over) - self.logprob(under)
        return self._log_ratios[pair]

    def staleness(self, trainer_version: int) -> Int[Tensor, "n"]:
        """Return the trainer version minus the version that sampled each token."""
        return trainer_version - self.take(cast(Tensor, self.batch.version))

    def take(self, field: Tensor, positions: Int[Tensor, "m"] | None = None) -> Tensor:
        """Return a field of the batch at the active tokens, or at `positions` among them."""
        if self.index is not None:
            positions = self.index if positions is None else self.index.index_select(0, positions)
        return field if positions is None else field.index_select(0, positions)

    @cached_property
    def segments(self) -> Segments:
        """The active tokens grouped by sequence."""
        return Segments(self.take(self.batch.sequence))

    @cached_property
    def trainable_segments(self) -> Segments:
        """All trainable tokens grouped by sequence, including those with an invalid sampler log-prob."""
        if self.num_invalid_logprobs == 0:
            return self.segments
        sequence = self.batch.sequence
        return Segments(sequence if self.trainable_index is None else sequence[self.trainable_index])


def _all_finite(values: Tensor) -> bool:
    # a finite sum has finite terms; only an infinite sum needs the second pass
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
