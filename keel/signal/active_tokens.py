"""The tokens of a batch that an objective may look at: trainable, of its roles, with a usable sampler log-prob.

They are selected, never masked by multiplication, so that junk elsewhere (NaN, infinities, prompts) cannot reach the
arithmetic in the forward or the backward. Everything here is without gradient and in float32 or better.
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
"""Ratios saturate at e^40, whose square still fits float32, so that a kept ratio is always finite and 0 * r is 0."""

LOGPROB_FIELDS = {
    "policy": "logprobs",
    "sampler": "sampler_logprobs",
    "proximal": "proximal_logprobs",
    "reference": "reference_logprobs",
    "teacher": "teacher_logprobs",
}


def keep_bitmask(dropped: Bool[Tensor, "n"], dtype: torch.dtype) -> Int[Tensor, "n"]:
    """No bit where the mask is true and every bit elsewhere; as wide as `dtype`, for `apply_bits_`."""
    # less one as bytes, then widened with the sign: a pass over a quarter of the memory
    return dropped.view(torch.int8).sub(1).to(torch.int64 if dtype == torch.float64 else torch.int32)


def apply_bitmask_(values: Float[Tensor, "n"], bitmask: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Zero, in place, where there are no bits, whatever stood there: a NaN is cleared, which a product would not do.

    The same as masked_fill_, which takes a branch for each token and is eight times slower.
    """
    values.view(bitmask.dtype).bitwise_and_(bitmask)
    return values


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, saturating far outside anything a real pair of policies can show."""
    # to look for the largest costs a fraction of a copy
    if len(log_ratio) and float(log_ratio.max()) <= MAX_LOG_RATIO:
        return log_ratio.exp()
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp_()


class ActiveTokens:
    """What one batch contributes to a step."""

    def __init__(self, batch: TokenBatch, composition: Composition) -> None:
        self.batch = batch
        self.composition = composition
        self.dtype = torch.float32
        for name, value in batch.tensors().items():
            if name in FLOAT_FIELDS and value.dtype == torch.float64:
                self.dtype = torch.float64
        members = batch.trainable
        if composition.roles is not None:
            if batch.role is None:
                raise BatchError(f"objective.roles = {composition.roles} needs batch.role")
            roles = torch.tensor(composition.roles, device=batch.role.device)
            members = members & torch.isin(batch.role, roles)
        self.num_trainable = count_true(members)
        everyone = self.num_trainable == len(batch)
        self.trainable_index: Int[Tensor, "trainable"] | None = None if everyone else members.nonzero().squeeze(1)
        self.index: Int[Tensor, "n"] | None = self.trainable_index
        self.newest_version = (
            int(self.take(batch.version).max()) if batch.version is not None and self.num_trainable else None
        )
        self.cached_decision: tuple[Float[Tensor, "n"], GateResult] | None = None
        """Advantage and decision, once the step's totals are known."""
        self._logprobs: dict[str, Float[Tensor, "n"]] = {}
        self._log_ratios: dict[str, Float[Tensor, "n"]] = {}
        if composition.reads("sampler"):
            self._drop_invalid_logprobs()
        else:
            self._check_finite("logprobs", self.logprob("policy"))
        self.advantages: Float[Tensor, "n"] = self._select(batch.advantages)
        if composition.policy.surrogate != "cross_entropy":
            self._check_finite("advantages", self.advantages)

    def __len__(self) -> int:
        return self.num_trainable - self.num_invalid_logprobs

    @property
    def num_invalid_logprobs(self) -> int:
        """Trainable tokens without a usable sampler log-prob."""
        return self.num_trainable - (len(self.batch) if self.index is None else len(self.index))

    def _drop_invalid_logprobs(self) -> None:
        """Leave out the tokens without a usable sampler log-prob; the others must have one of the policy."""
        if self.batch.sampler_logprobs is None:
            raise BatchError("batch.sampler_logprobs is missing, and this objective reads it")
        sampler = self._select(self.batch.sampler_logprobs)
        self._logprobs["sampler"] = sampler
        # a finite difference has finite sides, and will be needed: one look in place of two
        if bool(self.log_ratio("policy/sampler").sum().isfinite()):
            return
        self._log_ratios.clear()
        if not _all_finite(sampler):
            usable = sampler.isfinite().nonzero().squeeze(1)
            self.index = usable if self.index is None else self.index[usable]
            self._logprobs = {"sampler": sampler.index_select(0, usable)}
        self._check_finite("logprobs", self.logprob("policy"))

    def _select(self, field: Tensor) -> Tensor:
        return self.take(field.detach()).to(self.dtype)

    def _check_finite(self, name: str, values: Float[Tensor, "n"]) -> None:
        if _all_finite(values):
            return
        bad = int((~values.isfinite()).nonzero()[0])
        place = bad if self.index is None else int(self.index[bad])
        raise BatchError(f"batch.{name}[{place}] = {values[bad].item()}: a trainable token needs a finite value")

    @property
    def loaded_sources(self) -> set[str]:
        """Whose log-probs have been read."""
        return set(self._logprobs)

    def logprob(self, source: str) -> Float[Tensor, "n"]:
        """Log-probs of the policy, sampler, proximal, reference or teacher."""
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
        """o as a point between b and l, the nearer to l the staler the token (2512.06547)."""
        if self.batch.version is None:
            raise BatchError('objective.proximal = "interpolated" needs batch.version')
        if trainer_version is None:
            trainer_version = 0  # a step without a trainable token has no newest version, and nothing to make stale
        share = 1 - 1 / self.staleness(trainer_version).clamp(min=1).to(self.dtype)
        self._logprobs["proximal"] = torch.lerp(self.logprob("sampler"), self.logprob("policy"), share)

    def log_ratio(self, pair: str) -> Float[Tensor, "n"]:
        """The log-ratio of two policies, as in the settings: "policy/sampler" is d = l - b. Not to be modified."""
        if pair not in self._log_ratios:
            over, under = pair.split("/")
            self._log_ratios[pair] = self.logprob(over) - self.logprob(under)
        return self._log_ratios[pair]

    def staleness(self, trainer_version: int) -> Int[Tensor, "n"]:
        """Trainer version minus the version that sampled the token."""
        return trainer_version - self.take(cast(Tensor, self.batch.version))

    def take(self, field: Tensor, positions: Int[Tensor, "m"] | None = None) -> Tensor:
        """A field of the batch at the view's tokens, or at some of them."""
        if self.index is not None:
            positions = self.index if positions is None else self.index.index_select(0, positions)
        return field if positions is None else field.index_select(0, positions)

    @cached_property
    def segments(self) -> Segments:
        """The usable tokens by sequence."""
        return Segments(self.take(self.batch.sequence))

    @cached_property
    def trainable_segments(self) -> Segments:
        """All trainable tokens by sequence, unusable ones included."""
        if self.num_invalid_logprobs == 0:
            return self.segments
        sequence = self.batch.sequence
        return Segments(sequence if self.trainable_index is None else sequence[self.trainable_index])


def _all_finite(values: Tensor) -> bool:
    # a finite sum has finite terms; only the rare rest is worth a second look
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
