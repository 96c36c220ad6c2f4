"""What must be known of the whole step before any of its tokens can be scored.

Centres, thresholds, per-sequence sums and denominators are taken here, over all micro-batches and ranks, so that
packing never changes a loss or a gradient. Three passes: counts and centre; what the gates need; what survived them.
A rank passes `gather`, which exchanges a pass's part with the other ranks and returns all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.errors import BatchError, SignalRefused
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


@dataclass
class StepTotals:
    """The step as a whole."""

    composition: Composition
    num_trainable: int = 0
    """N: trainable tokens of the objective's roles, dropped and unusable ones included."""
    num_invalid_logprobs: int = 0
    trainer_version: int | None = None
    kl_mean: float = 0.0
    """Mean of k over the step."""
    sequence_table: SequenceTable | None = None
    """Sums by sequence, when any part needs them."""
    thresholds: dict[int, float] = field(default_factory=dict)
    num_kept: int | None = None
    """Tokens that survived every gate, when that divides."""

    def advantage(self, view: ActiveTokens) -> Float[Tensor, "n"]:
        """The advantage that every part uses: adv_tau * (A + kl_penalty) + teacher_tau * (h - l)."""
        composition = self.composition
        advantage = view.advantages
        if composition.kl_penalty_coef:
            advantage = advantage + (self.kl_mean - reference_log_ratio(view)) * composition.kl_penalty_coef
        if composition.adv_tau != 1:
            advantage = advantage * composition.adv_tau
        if composition.teacher_tau:
            advantage = advantage + (view.logprob("teacher") - view.logprob("policy")) * composition.teacher_tau
        return advantage

    def rows_of_view(self, view: ActiveTokens) -> SequenceTable | None:
        """The table's rows of the view's sequences."""
        return None if self.sequence_table is None else self.sequence_table.select_rows(view.segments.ids)

    def apply_gates(self, view: ActiveTokens, advantage: Float[Tensor, "n"]) -> GateResult:
        table = self.rows_of_view(view) if any(gate.scope == "sequence" for gate in self.composition.gates) else None
        return apply_gates(self.composition.gates, view, advantage, table, self.thresholds)

    def denominator(self) -> float:
        """What divides every token, apart from its sequence's length under reduction over sequences."""
        reduction = self.composition.reduction
        if reduction.over == "tokens":
            divisor = float(self.num_trainable if self.num_kept is None else self.num_kept)
        else:
            assert self.sequence_table is not None
            counts = self.sequence_table.columns.get("trainable" if reduction.denominator == "trainable" else "kept")
            sequences = 0.0 if counts is None else float((counts > 0).sum())  # no column: a step without any batch
            divisor = sequences * (reduction.length or 1.0)
        return max(divisor, 1.0)


def reference_log_ratio(view: ActiveTokens) -> Float[Tensor, "n"]:
    """k, the token's log-prob above the reference: of the policy, or of the sampler."""
    source = "sampler" if view.composition.kl_penalty_source == "sampled" else "policy"
    return view.logprob(source) - view.logprob("reference")


def compute_totals(composition: Composition, views: Sequence[ActiveTokens], gather: Gather | None = None) -> StepTotals:
    """The totals of a step whose batches on this rank are `views`."""
    gather = gather or (lambda part: [part])
    totals = StepTotals(composition)
    _count_tokens(totals, views, gather)
    if composition.proximal == "interpolated":
        for view in views:
            view.interpolate_proximal(totals.trainer_version)
    columns = _required_columns(composition)
    if columns:
        tables = [_sequence_sums(totals, view, columns) for view in views]
        totals.sequence_table = SequenceTable.merge(gather(SequenceTable.merge(tables)))
    for position, gate in enumerate(composition.gates):
        if gate.scope == "step":
            assert gate.high is not None
            values = torch.cat([token_values(gate, view) for view in views]) if views else torch.zeros(0)
            totals.thresholds[position] = step_threshold(torch.cat(gather(values)), gate.high)
    _count_kept(totals, views, gather)
    return totals


def _count_tokens(totals: StepTotals, views: Sequence[ActiveTokens], gather: Gather) -> None:
    kl_sum = 0.0
    if totals.composition.kl_penalty_coef:
        kl_sum = sum(float(reference_log_ratio(view).sum(dtype=torch.float64)) for view in views)
    newest = [view.newest_version for view in views if view.newest_version is not None]
    declared = {view.batch.trainer_version for view in views if view.batch.trainer_version is not None}
    parts = gather(
        (sum(v.num_trainable for v in views), sum(v.num_invalid_logprobs for v in views), kl_sum, newest, declared)
    )
    totals.num_trainable = sum(part[0] for part in parts)
    totals.num_invalid_logprobs = sum(part[1] for part in parts)
    totals.kl_mean = sum(part[2] for part in parts) / max(totals.num_trainable - totals.num_invalid_logprobs, 1)
    declared = set().union(*(part[4] for part in parts))
    if len(declared) > 1:
        raise BatchError(f"batch.trainer_version differs within the step: {sorted(declared)}")
    totals.trainer_version = max(declared or {version for part in parts for version in part[3]}, default=None)
    share = totals.num_invalid_logprobs / max(totals.num_trainable, 1)
    if share > totals.composition.max_invalid_logprob_fraction:
        raise SignalRefused(
            f"batch.sampler_logprobs is NaN or infinite on {totals.num_invalid_logprobs} of {totals.num_trainable} trainable tokens;"
            f" that is more than objective.max_invalid_logprob_fraction = {totals.composition.max_invalid_logprob_fraction}"
        )


def _required_columns(composition: Composition) -> set[str]:
    """The per-sequence sums that the gates, weights and reduction need before anything is decided."""
    columns = set()
    for position, gate in enumerate(composition.gates):
        if gate.scope != "sequence":
            continue
        columns |= {"valid", "sum advantage"}
        if gate.spec.sequence is not None:
            columns |= sequence_columns(gate)
        else:
            columns |= {f"low {position}", f"high {position}"}
    for weight in composition.weights:
        if weight.level != "token":
            columns |= {"valid", f"sum {weight.between}", "sum advantage"}
    if composition.reduction.over != "tokens":
        columns.add("trainable")
    return columns


def _sequence_sums(totals: StepTotals, view: ActiveTokens, columns: set[str]) -> SequenceTable:
    """One view's part of the table."""
    segments = view.segments
    sums: dict[str, Tensor] = {}
    if "valid" in columns:
        sums["valid"] = segments.count()
    if "sum advantage" in columns:
        sums["sum advantage"] = segments.sum(totals.advantage(view))
    for pair in ("policy/sampler", "policy/proximal", "proximal/sampler"):
        if f"sum {pair}" in columns:
            sums[f"sum {pair}"] = segments.sum(view.log_ratio(pair))
    for position, gate in enumerate(totals.composition.gates):
        if gate.spec.sequence is not None:
            sums |= sum_sequences(gate, view)
        if f"low {position}" in columns:
            for name, side in zip(("low", "high"), token_violations(gate, view), strict=True):
                zeros = torch.zeros(len(segments), device=segments.ids.device)
                sums[f"{name} {position}"] = zeros if side is None else segments.sum(side)
    table = SequenceTable(segments.ids, sums)
    if "trainable" not in columns:
        return table
    trainable = SequenceTable(view.trainable_segments.ids, {"trainable": view.trainable_segments.count()})
    if view.num_invalid_logprobs:
        return SequenceTable.merge([trainable, table])
    return SequenceTable(table.ids, table.columns | trainable.columns)


def _count_kept(totals: StepTotals, views: Sequence[ActiveTokens], gather: Gather) -> None:
    """After the gates: survivors that divide, and the ratios of sequence-level policy terms."""
    composition = totals.composition
    by_sequence = composition.policy.level == "sequence" or composition.reduction.over != "tokens"
    if composition.reduction.denominator != "kept" and composition.policy.level != "sequence":
        return
    tables, kept = [], 0
    for view in views:
        advantage = totals.advantage(view)
        decision = totals.apply_gates(view, advantage)
        view.cached_decision = (advantage, decision)
        kept += len(view) - decision.num_dropped
        if by_sequence:
            tables.append(_kept_sequence_sums(totals, view, advantage, decision))
    if composition.reduction.denominator == "kept":
        totals.num_kept = sum(gather(kept))
    if by_sequence:
        survivors = SequenceTable.merge(gather(SequenceTable.merge(tables)))
        totals.sequence_table = (
            survivors if totals.sequence_table is None else _join_columns(totals.sequence_table, survivors)
        )


def _kept_sequence_sums(
    totals: StepTotals, view: ActiveTokens, advantage: Tensor, decision: GateResult
) -> SequenceTable:
    segments, policy = view.segments, totals.composition.policy
    columns = {"kept": kept_tokens_by_sequence(view, decision)}
    if policy.level == "sequence":
        log_ratio = view.log_ratio(f"policy/{policy.anchor}")
        if policy.token_clip is not None:
            log_ratio = clip_log_ratios(log_ratio, advantage, policy.token_clip)
        if decision.counts:
            log_ratio, advantage = decision.zero_dropped_(log_ratio.clone()), decision.zero_dropped_(advantage.clone())
        columns |= {"kept log-ratio": segments.sum(log_ratio), "kept advantage": segments.sum(advantage)}
    return SequenceTable(segments.ids, columns)


def kept_tokens_by_sequence(view: ActiveTokens, decision: GateResult) -> Int[Tensor, "rows"]:
    """How many tokens of each of the view's sequences survived the gates."""
    dropped = decision.dropped
    return view.segments.count() if dropped is None else view.segments.sum(~dropped).long()


def clip_log_ratios(log_ratio: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """Token log-ratios, clipped on the side that the advantage pushes to."""
    up = advantage > 0
    return torch.where(up, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound))


def _join_columns(first: SequenceTable, second: SequenceTable) -> SequenceTable:
    return (
        SequenceTable(first.ids, first.columns | second.columns)
        if first.ids is second.ids
        else SequenceTable.merge([first, second])
    )
