"""Compute the totals of a whole step that are needed before the loss of any of its batches.

The KL mean, thresholds, per-sequence sums and denominators are computed over all micro-batches and ranks, so that
packing never changes a loss or a gradient. There are three passes: counts and the KL mean; the inputs of the gates; the
tokens that the gates kept. A rank passes `gather`, which exchanges its part of a pass with the other ranks and returns
all parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.errors import BatchError, InvalidSignalError
from keel.objectives import Composition
from keel.signal.active_tokens import ActiveTokens
from keel.signal.gates import (
    GateResult,
    apply_gates,
    sequence_columns,
    step_threshold,
    sum_sequences,
    token_values,
    token_violations,
)
from keel.signal.segments import SequenceTable

Gather = Callable[[Any], list[Any]]
"""Takes this rank's part and returns the parts of all ranks."""

LOG_RATIO_PAIRS = ("policy/sampler", "policy/proximal", "proximal/sampler")


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of a whole step, for a caller that sees its micro-batches one at a time.

    They depend on masks and recorded log-probs only, so they are known before the policy computes a log-prob.
    """

    num_trainable: int
    num_sequences: int
    """Sequences with a trainable token."""
    num_invalid_logprobs: int = 0
    """Trainable tokens whose sampler log-prob is NaN or infinite."""
    kl_sum: float = 0.0
    """Sum of k = b - f over the other trainable tokens, for kl_penalty_source = "sampled"."""
    trainer_version: int | None = None


@dataclass
class StepTotals:
    """The totals of a step."""

    composition: Composition
    num_trainable: int = 0
    """N: trainable tokens with one of the objective's roles, including dropped tokens and invalid log-probs."""
    num_invalid_logprobs: int = 0
    trainer_version: int | None = None
    kl_mean: float = 0.0
    """Mean of k over the step."""
    sequence_table: SequenceTable | None = None
    """Sums by sequence, if any part of the objective needs them."""
    thresholds: dict[int, float] = field(default_factory=dict)
    num_kept: int | None = None
    """Tokens that every gate kept, if they are the denominator."""
    num_sequences: int | None = None
    """Sequences of the step, if `sequence_table` holds only those of one micro-batch."""

    def advantage(self, active: ActiveTokens) -> Float[Tensor, "n"]:
        """Return the transformed advantage: adv_tau * (A + kl_penalty) + teacher_tau * (h - l)."""
        composition = self.composition
        advantage = active.advantages
        if composition.kl_penalty_coef:
            advantage = advantage + (self.kl_mean - reference_log_ratio(active)) * composition.kl_penalty_coef
        if composition.adv_tau != 1:
            advantage = advantage * composition.adv_tau
        if composition.teacher_tau:
            advantage = advantage + (active.logprob("teacher") - active.logprob("policy")) * composition.teacher_tau
        return advantage

    def rows_for(self, active: ActiveTokens) -> SequenceTable | None:
        """Return the rows of the sequence table for the sequences of these tokens."""
        return None if self.sequence_table is None else self.sequence_table.select_rows(active.segments.ids)

    def apply_gates(self, active: ActiveTokens, advantage: Float[Tensor, "n"]) -> GateResult:
        """Apply the gates of the objective."""
        table = self.rows_for(active) if any(gate.scope == "sequence" for gate in self.composition.gates) else None
        return apply_gates(self.composition.gates, active, advantage, table, self.thresholds)

    def denominator(self) -> float:
        """Return the divisor common to all tokens, without the sequence length of reduction over sequences.

        It is 0 if no token counts in it.
        """
        reduction = self.composition.reduction
        if reduction.over == "tokens":
            return float(self.num_trainable if self.num_kept is None else self.num_kept)
        if self.num_sequences is not None:
            return self.num_sequences * (reduction.length or 1.0)
        assert self.sequence_table is not None
        counts = self.sequence_table.columns.get("trainable" if reduction.denominator == "trainable" else "kept")
        sequences = 0.0 if counts is None else float((counts > 0).sum())  # None: a step without batches
        return sequences * (reduction.length or 1.0)


def reference_log_ratio(active: ActiveTokens) -> Float[Tensor, "n"]:
    """Return k, the log-ratio of the policy, or of the sampler, against the reference."""
    source = "sampler" if active.composition.kl_penalty_source == "sampled" else "policy"
    return active.logprob(source) - active.logprob("reference")


def compute_totals(
    composition: Composition, batches: Sequence[ActiveTokens], gather: Gather | None = None
) -> StepTotals:
    """Compute the totals of a step from its batches on this rank."""
    gather = gather or (lambda part: [part])
    totals = StepTotals(composition)
    _count_tokens(totals, batches, gather)
    _complete_totals(totals, batches, gather)
    return totals


def totals_from_counts(composition: Composition, active: ActiveTokens, counts: StepCounts) -> StepTotals:
    """Return the totals for one micro-batch of complete sequences, given the counts of its step."""
    parts = composition.step_logprob_parts()
    if parts:
        raise BatchError(f"{parts[0]} needs the log-probs of the whole step; compute its totals from all batches")
    totals = StepTotals(composition, counts.num_trainable, counts.num_invalid_logprobs, counts.trainer_version)
    totals.kl_mean = counts.kl_sum / max(counts.num_trainable - counts.num_invalid_logprobs, 1)
    totals.num_sequences = counts.num_sequences
    _check_invalid_logprobs(totals)
    _complete_totals(totals, [active], lambda part: [part])
    return totals


def _complete_totals(totals: StepTotals, batches: Sequence[ActiveTokens], gather: Gather) -> None:
    """Compute everything that follows the counts: per-sequence sums, thresholds and kept tokens."""
    composition = totals.composition
    if composition.proximal == "interpolated":
        for active in batches:
            active.interpolate_proximal(totals.trainer_version)
    columns = _required_columns(composition)
    if columns:
        tables = [_sequence_sums(totals, active, columns) for active in batches]
        totals.sequence_table = SequenceTable.merge(gather(SequenceTable.merge(tables)))
    for index, gate in enumerate(composition.gates):
        if gate.scope == "step":
            assert gate.high is not None
            values = torch.cat([token_values(gate, active) for active in batches]) if batches else torch.zeros(0)
            totals.thresholds[index] = step_threshold(torch.cat(gather(values)), gate.high)
    _count_kept(totals, batches, gather)


def _count_tokens(totals: StepTotals, batches: Sequence[ActiveTokens], gather: Gather) -> None:
    kl_sum = 0.0
    if totals.composition.kl_penalty_coef:
        kl_sum = sum(float(reference_log_ratio(active).sum(dtype=torch.float64)) for active in batches)
    newest = [active.newest_version for active in batches if active.newest_version is not None]
    declared = {active.batch.trainer_version for active in batches if active.batch.trainer_version is not None}
    parts = gather(
        (sum(v.num_trainable for v in batches), sum(v.num_invalid_logprobs for v in batches), kl_sum, newest, declared)
    )
    totals.num_trainable = sum(part[0] for part in parts)
    totals.num_invalid_logprobs = sum(part[1] for part in parts)
    totals.kl_mean = sum(part[2] for part in parts) / max(totals.num_trainable - totals.num_invalid_logprobs, 1)
    declared = set().union(*(part[4] for part in parts))
    if len(declared) > 1:
        raise BatchError(f"batch.trainer_version differs within the step: {sorted(declared)}")
    totals.trainer_version = max(declared or {version for part in parts for version in part[3]}, default=None)
    _check_invalid_logprobs(totals)


def _check_invalid_logprobs(totals: StepTotals) -> None:
    limit = totals.composition.max_invalid_logprob_fraction
    if totals.num_invalid_logprobs / max(totals.num_trainable, 1) > limit:
        raise InvalidSignalError(
            f"batch.sampler_logprobs is NaN or infinite on {totals.num_invalid_logprobs} of {totals.num_trainable}"
            f" trainable tokens, more than objective.max_invalid_logprob_fraction = {limit}"
        )


def _required_columns(composition: Composition) -> set[str]:
    """Return the names of the per-sequence sums that gates, weights and reduction need before the gates decide."""
    columns = set()
    for index, gate in enumerate(composition.gates):
        if gate.scope != "sequence":
            continue
        columns |= {"valid", "sum advantage"}
        if gate.spec.sequence is not None:
            columns |= sequence_columns(gate)
        else:
            columns |= {f"low {index}", f"high {index}"}
    for weight in composition.weights:
        if weight.level != "token":
            columns |= {"valid", f"sum {weight.between}", "sum advantage"}
    if composition.reduction.over != "tokens":
        columns.add("trainable")
    return columns


def _sequence_sums(totals: StepTotals, active: ActiveTokens, columns: set[str]) -> SequenceTable:
    """Return the sequence table of one batch."""
    segments = active.segments
    sums: dict[str, Tensor] = {}
    if "valid" in columns:
        sums["valid"] = segments.count()
    if "sum advantage" in columns:
        sums["sum advantage"] = segments.sum(totals.advantage(active))
    for pair in LOG_RATIO_PAIRS:
        if f"sum {pair}" in columns:
            sums[f"sum {pair}"] = segments.sum(active.log_ratio(pair))
    for index, gate in enumerate(totals.composition.gates):
        if gate.spec.sequence is not None:
            sums |= sum_sequences(gate, active)
        if f"low {index}" in columns:
            for name, side in zip(("low", "high"), token_violations(gate, active), strict=True):
                zeros = torch.zeros(len(segments), device=segments.ids.device)
                sums[f"{name} {index}"] = zeros if side is None else segments.sum(side)
    table = SequenceTable(segments.ids, sums)
    if "trainable" not in columns:
        return table
    trainable = SequenceTable(active.trainable_segments.ids, {"trainable": active.trainable_segments.count()})
    if active.num_invalid_logprobs:
        return SequenceTable.merge([trainable, table])
    return SequenceTable(table.ids, table.columns | trainable.columns)


def _count_kept(totals: StepTotals, batches: Sequence[ActiveTokens], gather: Gather) -> None:
    """Count the kept tokens for the denominator, and sum the kept log-ratios for sequence-level policy terms."""
    composition = totals.composition
    by_sequence = composition.policy.level == "sequence" or composition.reduction.over != "tokens"
    if composition.reduction.denominator != "kept" and composition.policy.level != "sequence":
        return
    tables, kept = [], 0
    for active in batches:
        advantage = totals.advantage(active)
        decision = totals.apply_gates(active, advantage)
        active.cached_decision = (advantage, decision)
        kept += len(active) - decision.num_dropped
        if by_sequence:
            tables.append(_kept_sequence_sums(totals, active, advantage, decision))
    if composition.reduction.denominator == "kept":
        totals.num_kept = sum(gather(kept))
    if by_sequence:
        kept_table = SequenceTable.merge(gather(SequenceTable.merge(tables)))
        totals.sequence_table = (
            kept_table if totals.sequence_table is None else _join_columns(totals.sequence_table, kept_table)
        )


def _kept_sequence_sums(
    totals: StepTotals, active: ActiveTokens, advantage: Tensor, decision: GateResult
) -> SequenceTable:
    segments, policy = active.segments, totals.composition.policy
    columns = {"kept": kept_tokens_by_sequence(active, decision)}
    if policy.level == "sequence":
        log_ratio = active.log_ratio(f"policy/{policy.anchor}")
        if policy.token_clip is not None:
            log_ratio = clip_log_ratios(log_ratio, advantage, policy.token_clip)
        if decision.counts:
            log_ratio, advantage = decision.zero_dropped_(log_ratio.clone()), decision.zero_dropped_(advantage.clone())
        columns |= {"kept log-ratio": segments.sum(log_ratio), "kept advantage": segments.sum(advantage)}
    return SequenceTable(segments.ids, columns)


def kept_tokens_by_sequence(active: ActiveTokens, decision: GateResult) -> Int[Tensor, "rows"]:
    """Return the number of kept tokens in each sequence of the active tokens."""
    dropped = decision.dropped
    return active.segments.count() if dropped is None else active.segments.sum(~dropped).long()


def clip_log_ratios(log_ratio: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """Clip token log-ratios in the direction in which the advantage pushes them."""
    return torch.where(advantage > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound))


def _join_columns(first: SequenceTable, second: SequenceTable) -> SequenceTable:
    return (
        SequenceTable(first.ids, first.columns | second.columns)
        if first.ids is second.ids
        else SequenceTable.merge([first, second])
    )
