"""Compute the metrics of a batch: dropped tokens, and the distance between sampler and policy.

Counts of kept and dropped tokens are exact. Distributions and metrics by staleness come from
`keel.signal.metrics_sample`.
"""

from collections import Counter

import torch
from torch import Tensor

from keel.signal.active_tokens import ActiveTokens
from keel.signal.cpu_ops import count_signs, count_true, less_than
from keel.signal.gates import FIRST_GATE, GateResult
from keel.signal.loss_terms import Evaluated
from keel.signal.metrics import Metric, Metrics, MetricValue
from keel.signal.metrics_sample import MetricsSample
from keel.signal.step_totals import StepTotals, kept_tokens_by_sequence, reference_log_ratio


def compute_metrics(active: ActiveTokens, totals: StepTotals, evaluated: Evaluated) -> Metrics:
    """Compute all metrics of a batch."""
    values: dict[str, MetricValue] = {}
    ref_log_ratio = _optional_reference_log_ratio(active)
    sequence_fraction = _sequence_fraction_in_batch(active, totals)
    sample = MetricsSample(active, totals, evaluated, ref_log_ratio) if "sampler" in active.loaded_sources else None
    if sample is not None:
        values |= sample.token_metrics()
    values |= _exact_metrics(active, evaluated, ref_log_ratio)
    values |= _sequence_gate_metrics(active, evaluated.decision, sequence_fraction)
    if sample is not None:
        values |= sample.sequence_metrics(sequence_fraction)
    return Metrics(values, _dropped_tokens(active, evaluated.decision))


def _exact_metrics(active: ActiveTokens, evaluated: Evaluated, ref_log_ratio: Tensor | None) -> dict[str, MetricValue]:
    """Compute the metrics that are exact for any number of tokens."""
    counts, trainable = evaluated.decision.counts, active.num_trainable
    low = sum(count for code, count in counts.items() if (code - FIRST_GATE) % 2 == 0)
    high = sum(counts.values()) - low
    values: dict[str, MetricValue] = {
        "is_masked": Metric(low + high, trainable),
        "is_masked_low": Metric(low, trainable),
        "is_masked_high": Metric(high, trainable),
        "signal/invalid_logprob_tokens": Metric(active.num_invalid_logprobs, trainable),
    }
    dropped, clipped = evaluated.decision.dropped, evaluated.clipped
    positive, negative, dropped_positive = count_signs(evaluated.advantage, dropped)
    dropped_negative = low + high - dropped_positive  # saves a pass if no advantage is zero
    if dropped is not None and positive + negative < len(active):
        dropped_negative = count_true(less_than(evaluated.advantage, 0.0), dropped)
    values["is_masked_adv_pos"] = Metric(dropped_positive, positive)
    values["is_masked_adv_neg"] = Metric(dropped_negative, negative)
    if clipped is not None and evaluated.clipped_by_sequence:
        values["is_clipped"] = Metric(
            int((kept_tokens_by_sequence(active, evaluated.decision) * clipped).sum()), trainable
        )
    elif clipped is not None:
        values["is_clipped"] = Metric(
            count_true(clipped) - (0 if dropped is None else count_true(clipped, dropped)), trainable
        )
    if ref_log_ratio is not None:
        total = ref_log_ratio.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64)
        values["kl_policy_ref"] = Metric(float(total), count_true(ref_log_ratio.isfinite()))
    return values


def _sequence_gate_metrics(
    active: ActiveTokens, decision: GateResult, sequence_fraction: Tensor | None
) -> dict[str, MetricValue]:
    """Compute the fractions of sequences and tokens dropped by gates at sequence scope; 0 without such a gate."""
    tokens = sequences = 0.0
    if decision.dropped_sequences is not None and sequence_fraction is not None:
        tokens = float((active.segments.count() * decision.dropped_sequences).sum())
        sequences = float((sequence_fraction * decision.dropped_sequences).sum())
    return {
        "masked_sequences": Metric(
            sequences, float(active.num_trainable if sequence_fraction is None else sequence_fraction.sum())
        ),
        "masked_sequence_tokens": Metric(tokens, active.num_trainable),
    }


def _optional_reference_log_ratio(active: ActiveTokens) -> Tensor | None:
    """Return k if there is a reference. One that the objective does not read may have NaNs, which are not counted."""
    if active.composition.reads("reference"):
        return reference_log_ratio(active)
    reference = active.batch.reference_logprobs
    return None if reference is None else active.logprob("policy") - active.take(reference.detach())


def _sequence_fraction_in_batch(active: ActiveTokens, totals: StepTotals) -> Tensor | None:
    """Return the fraction of each sequence in this batch, so that a sequence split over micro-batches counts once."""
    rows = totals.rows_for(active)
    if rows is None or "valid" not in rows.columns:
        return None
    return active.segments.count() / rows["valid"].clamp(min=1)


def _dropped_tokens(active: ActiveTokens, decision: GateResult) -> Counter[int]:
    if active.batch.token_ids is None or decision.dropped is None:
        return Counter()
    tokens, times = torch.unique(active.take(active.batch.token_ids)[decision.dropped], return_counts=True)
    return Counter(dict(zip(tokens.tolist(), times.tolist(), strict=True)))
