"""The accounts of a batch: what was refused, and how far sampler and policy are apart.

Counts of kept and dropped tokens are exact. Distributions, and everything split by staleness, are exact up to
`metrics_sample_size` tokens a step; above, they come from evenly spaced stretches of each batch, scaled to it, so that
the cost of metrics stays small. What belongs to whole sequences takes each sequence as it lies in the batch: one that
is cut over micro-batches counts in its parts. The sample is small, and so counted on the CPU by numpy, a call of which
costs a fraction of torch's.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.signal.active_tokens import MAX_LOG_RATIO, ActiveTokens
from keel.signal.cpu_ops import count_signs, count_true, less_than
from keel.signal.gates import FIRST_GATE, GateResult
from keel.signal.metrics import NUM_BINS, DerivedMetric, Histogram, Metric, Metrics, MetricValue
from keel.signal.step_totals import StepTotals, kept_tokens_by_sequence, reference_log_ratio

SAMPLE_WINDOWS = 8
"""Stretches of neighbouring tokens that a sample is made of: long enough to hold whole sequences."""
BLOCK_TOKENS = 65536
"""Tokens looked at together, so that temporaries stay small."""
KEPT, LOW, HIGH, CLIPPED = range(4)
"""What became of a token; CLIPPED is kept, but without gradient."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a view: its part of the loss, and what the metrics are made from."""

    loss: Tensor
    gradient: Tensor
    decision: GateResult
    advantage: Tensor
    clipped: Tensor | None
    """Whose gradient a clip has stopped: tokens, or rows of the view's segments."""
    clipped_by_sequence: bool
    """Whether `clipped` is about sequences."""
    term_losses: dict[str, Tensor]
    """The loss by term."""


def compute_metrics(view: ActiveTokens, totals: StepTotals, evaluated: Evaluated) -> Metrics:
    """All metrics of a view."""
    values: dict[str, MetricValue] = {}
    drift, share = _optional_reference_log_ratio(view), _sequence_fraction_in_view(view, totals)
    sample = _MetricsSample(view, totals, evaluated, drift) if "sampler" in view.loaded_sources else None
    if sample is not None:
        values |= sample.token_metrics()
    values |= _exact_metrics(view, evaluated, drift) | _sequence_gate_metrics(view, evaluated.decision, share)
    if sample is not None:
        values |= sample.sequence_metrics(share)
    return Metrics(values, _dropped_tokens(view, evaluated.decision))


def _exact_metrics(view: ActiveTokens, evaluated: Evaluated, ref_log_ratio: Tensor | None) -> dict[str, MetricValue]:
    """What is counted over every token whatever their number."""
    counts, members = evaluated.decision.counts, view.num_trainable
    low = sum(number for code, number in counts.items() if (code - FIRST_GATE) % 2 == 0)
    high = sum(counts.values()) - low
    values: dict[str, MetricValue] = {
        "is_masked": Metric(low + high, members),
        "is_masked_low": Metric(low, members),
        "is_masked_high": Metric(high, members),
        "signal/invalid_logprob_tokens": Metric(view.num_invalid_logprobs, members),
    }
    dropped, clipped = evaluated.decision.dropped, evaluated.clipped
    ups, downs, refused_up = count_signs(evaluated.advantage, dropped)
    refused_down = low + high - refused_up  # a pass less, when no advantage is zero
    if dropped is not None and ups + downs < len(view):
        refused_down = count_true(less_than(evaluated.advantage, 0.0), dropped)
    values["is_masked_adv_pos"], values["is_masked_adv_neg"] = Metric(refused_up, ups), Metric(refused_down, downs)
    if clipped is not None and evaluated.clipped_by_sequence:
        values["is_clipped"] = Metric(int((kept_tokens_by_sequence(view, evaluated.decision) * clipped).sum()), members)
    elif clipped is not None:
        values["is_clipped"] = Metric(
            count_true(clipped) - (0 if dropped is None else count_true(clipped, dropped)), members
        )
    if ref_log_ratio is not None:
        total = ref_log_ratio.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64)
        values["kl_policy_ref"] = Metric(float(total), count_true(ref_log_ratio.isfinite()))
    return values


def _sequence_gate_metrics(
    view: ActiveTokens, decision: GateResult, fraction_in_view: Tensor | None
) -> dict[str, MetricValue]:
    """What gates at sequence scope refused; without one nothing is, however many sequences there are."""
    tokens = sequences = 0.0
    if decision.dropped_sequences is not None and fraction_in_view is not None:
        tokens = float((view.segments.count() * decision.dropped_sequences).sum())
        sequences = float((fraction_in_view * decision.dropped_sequences).sum())
    return {
        "masked_sequences": Metric(
            sequences, float(view.num_trainable if fraction_in_view is None else fraction_in_view.sum())
        ),
        "masked_sequence_tokens": Metric(tokens, view.num_trainable),
    }


def _optional_reference_log_ratio(view: ActiveTokens) -> Tensor | None:
    """k where there is a reference; one that the objective does not read may have holes, which are not counted."""
    if view.composition.reads("reference"):
        return reference_log_ratio(view)
    reference = view.batch.reference_logprobs
    return None if reference is None else view.logprob("policy") - view.take(reference.detach())


def _sequence_fraction_in_view(view: ActiveTokens, totals: StepTotals) -> Tensor | None:
    """Which part of each sequence lies in this view, so that a sequence split over micro-batches counts once."""
    rows = totals.rows_of_view(view)
    if rows is None or "valid" not in rows.columns:
        return None
    return view.segments.count() / rows["valid"].clamp(min=1)


def _dropped_tokens(view: ActiveTokens, decision: GateResult) -> Counter[int]:
    if view.batch.token_ids is None or decision.dropped is None:
        return Counter()
    tokens, times = torch.unique(view.take(view.batch.token_ids)[decision.dropped], return_counts=True)
    return Counter(dict(zip(tokens.tolist(), times.tolist(), strict=True)))


class _MetricsSample:
    """The tokens that distributions are taken from, as runs of neighbours of one sequence and one staleness.

    Columns are summed by run; a sum by staleness or by sequence is one over runs, of which there are few.
    """

    def __init__(
        self, view: ActiveTokens, totals: StepTotals, evaluated: Evaluated, ref_log_ratio: Tensor | None
    ) -> None:
        self.view, self.totals, self.evaluated, self.ref_log_ratio = view, totals, evaluated, ref_log_ratio
        self.window_length, self.window_stride = _sample_windows(view, totals)
        self.size = SAMPLE_WINDOWS * self.window_length if self.window_stride else len(view)
        self.scale = len(view) / max(self.size, 1)
        self.positions = None if view.index is None else self._sample_view(view.index)
        """The sample's positions in the batch; None: the view is the batch."""
        sequence, version = self._sample_batch(view.batch.sequence).cpu().numpy(), None
        first = np.zeros(self.size, dtype=bool)
        first[::BLOCK_TOKENS] = True  # so that no run crosses from block to block
        first[1:] |= sequence[1:] != sequence[:-1]
        if view.batch.version is not None and totals.trainer_version is not None and self.size:
            version = self._sample_batch(view.batch.version).long().cpu().numpy()
            first[1:] |= version[1:] != version[:-1]
        self.run_starts = np.flatnonzero(first)
        self.run_lengths = np.diff(self.run_starts, append=self.size)
        self.sequence_ids, self.run_sequence = _unique_inverse(sequence[self.run_starts])
        """The sequences of the sample, and which of them each run is of."""
        self.staleness_values: list[int] | None = None
        self.run_staleness = np.zeros_like(self.run_sequence)
        """The staleness values of the sample, and which of them each run has."""
        if version is not None:
            ages, self.run_staleness = _unique_inverse(totals.trainer_version - version[self.run_starts])
            self.staleness_values = ages.tolist()
        self.num_staleness_values = 1 if self.staleness_values is None else len(self.staleness_values)
        self.sequence_is_whole = np.ones(len(self.sequence_ids))
        """0 for the sequences at the ends of a stretch, which may go on beyond it."""
        if self.window_stride:
            self.sequence_is_whole[
                np.searchsorted(self.sequence_ids, sequence.reshape(SAMPLE_WINDOWS, -1)[:, [0, -1]])
            ] = 0.0
        self.fields = self._token_fields()
        self.column_names: list[str] = []
        blocks = [
            self._reduce_block(start) for start in range(0, max(self.size, 1), BLOCK_TOKENS)
        ]  # of an empty sample, one
        self.run_log_ratio = np.concatenate([block[0] for block in blocks])
        """The sum over each run."""
        self.state_counts, self.column_sums, self.histograms = (
            reduce(np.add, part) for part in zip(*(block[1:] for block in blocks), strict=True)
        )

    def _sample_view(self, field: Tensor) -> Tensor:
        """A field of the view's tokens, at the sample."""
        return (
            field.unfold(0, self.window_length, self.window_stride)[:SAMPLE_WINDOWS].flatten()
            if self.window_stride
            else field
        )

    def _sample_batch(self, field: Tensor) -> Tensor:
        """A field of the batch, at the sample."""
        return self._sample_view(field) if self.positions is None else field.index_select(0, self.positions)

    def _of_sampled_sequences(self, values: Tensor) -> Array:
        """Per-sequence values at the sequences of the sample."""
        return values.cpu().numpy()[np.searchsorted(self.view.segments.ids.cpu().numpy(), self.sequence_ids)]

    def _token_fields(self) -> dict[str, Tensor]:
        """What columns are made from: per token, at the sample, on the CPU."""
        view, outcome = self.view, self.evaluated
        fields = {"policy": view.logprob("policy"), "sampler": view.logprob("sampler"), "advantage": outcome.advantage}
        fields["reasons"] = outcome.decision.reasons
        if self.ref_log_ratio is not None:
            fields["drift"] = self.ref_log_ratio
        if outcome.clipped is not None and not outcome.clipped_by_sequence:
            fields["clipped"] = outcome.clipped
        fields = {name: self._sample_view(field).cpu() for name, field in fields.items()}
        if outcome.clipped is not None and outcome.clipped_by_sequence:
            clipped = self._of_sampled_sequences(outcome.clipped)[self.run_sequence]
            fields["clipped"] = torch.from_numpy(np.repeat(clipped, self.run_lengths))
        if view.batch.entropy is not None:
            fields["entropy"] = self._sample_batch(view.batch.entropy.detach()).to(view.dtype).cpu()
        return fields

    def _reduce_block(self, start: int) -> tuple[Array, ...]:
        """For a block of the sample: log-ratios by run; and by staleness states, columns and both histograms."""
        fields = {name: field[start : start + BLOCK_TOKENS] for name, field in self.fields.items()}
        runs = slice(*np.searchsorted(self.run_starts, (start, start + BLOCK_TOKENS)))
        age = np.repeat(self.run_staleness[runs], self.run_lengths[runs])
        state = _token_states(fields)
        masked = (state >= 3 * LOW) & (state < 3 * CLIPPED)
        columns, log_ratio, difference = _token_columns(fields, torch.from_numpy(masked))
        self.column_names = list(columns)
        starts = self.run_starts[runs] - start
        by_run = np.add.reduceat(torch.stack(list(columns.values())).double().numpy(), starts, axis=1)
        return (
            by_run[self.column_names.index("policy")] - by_run[self.column_names.index("sampler")],
            np.bincount(age * 12 + state, minlength=self.num_staleness_values * 12).reshape(-1, 4, 3),
            np.array([np.bincount(self.run_staleness[runs], row, self.num_staleness_values) for row in by_run]).T,
            self._histograms(log_ratio, difference, age),
        )

    def _histograms(self, log_ratio: Tensor, difference: Tensor, staleness_index: Array) -> Array:
        """[staleness, 2, BINS], counted together."""
        codes = Histogram.bin_indices(torch.stack((log_ratio, difference))).numpy()
        codes += (2 * NUM_BINS * staleness_index).astype(codes.dtype)
        codes[1] += NUM_BINS
        return np.bincount(codes.ravel(), minlength=self.num_staleness_values * 2 * NUM_BINS).reshape(
            self.num_staleness_values, 2, NUM_BINS
        )

    def token_metrics(self) -> dict[str, MetricValue]:
        """Over all tokens, and for each staleness."""
        ends = [""] + [f"/staleness={age}" for age in self.staleness_values or []]
        states, sums, histograms = map(self._prepend_total, (self.state_counts, self.column_sums, self.histograms))
        values: dict[str, MetricValue] = {}
        for end, *numbers in zip(ends, states.tolist(), sums.tolist(), torch.from_numpy(histograms), strict=True):
            self._add_metrics(values, end, *numbers)
        return values

    def _prepend_total(self, by_staleness: Array) -> Array:
        """Scaled to the view; and, when there are rows by staleness, their sum before them."""
        if self.staleness_values is None:
            return by_staleness * self.scale
        whole = np.empty((len(by_staleness) + 1, *by_staleness.shape[1:]))
        np.multiply(by_staleness, self.scale, out=whole[1:])
        np.sum(whole[1:], axis=0, out=whole[0])
        return whole

    def _add_metrics(
        self,
        values: dict[str, MetricValue],
        suffix: str,
        states: list[list[float]],
        sums: list[float],
        histograms: Tensor,
    ) -> None:
        """Add the measures of one staleness, or of all, to `values`, with `end` behind their names."""
        total = dict(zip(self.column_names, sums, strict=True))
        low, high = sum(states[LOW]), sum(states[HIGH])
        _, positive, negative = map(sum, zip(*states, strict=True))
        masked, count = low + high, sum(map(sum, states))

        def mean(name: str) -> Metric:
            return Metric(total[name], count)

        values |= {
            f"mismatch_kl{suffix}": mean("mismatch"),
            f"mismatch_kl_masked{suffix}": Metric(total["mismatch masked"], masked),
            f"mismatch_kl_unmasked{suffix}": Metric(total["mismatch"] - total["mismatch masked"], count - masked),
            f"is_masked{suffix}": Metric(masked, count),
            f"is_masked_low{suffix}": Metric(low, count),
            f"is_masked_high{suffix}": Metric(high, count),
            f"is_masked_adv_pos{suffix}": Metric(states[LOW][1] + states[HIGH][1], positive),
            f"is_masked_adv_neg{suffix}": Metric(states[LOW][2] + states[HIGH][2], negative),
            f"ratio{suffix}": Histogram(histograms[0], values_are_logs=True),
            f"probability_difference{suffix}": Histogram(histograms[1]),
            f"effective_sample_size{suffix}": DerivedMetric(
                (mean("excess"), mean("excess squared")), _effective_sample_size
            ),
            f"chi_square{suffix}": mean("excess squared"),
            f"sampler_perplexity{suffix}": DerivedMetric((mean("sampler"),), _perplexity),
            f"trainer_perplexity{suffix}": DerivedMetric((mean("policy"),), _perplexity),
            f"entropy{suffix}": mean("entropy"),
            f"correlation{suffix}": DerivedMetric(
                tuple(mean(name) for name in ("p", "q", "pp", "qq", "pq")), _correlation
            ),
        }
        if self.evaluated.clipped is not None:
            values[f"is_clipped{suffix}"] = Metric(sum(states[CLIPPED]), count)
        if "reference" in total:
            values[f"kl_policy_ref{suffix}"] = Metric(total["reference"], total["referenced"])

    def sequence_metrics(self, fraction_in_view: Tensor | None) -> dict[str, MetricValue]:
        """What belongs to whole sequences; a sequence is as stale as its oldest token."""
        rows, rejected, size = (
            self.totals.rows_of_view(self.view),
            self.evaluated.decision.dropped_sequences,
            len(self.sequence_ids),
        )
        if rows is not None and "sum policy/sampler" in rows.columns:
            log_ratio: Array = self._of_sampled_sequences(rows["sum policy/sampler"]).astype(np.float64)
        else:
            log_ratio = np.bincount(self.run_sequence, self.run_log_ratio, size)
        weight: Array = self.scale * (
            self.sequence_is_whole
            if fraction_in_view is None
            else self._of_sampled_sequences(fraction_in_view).astype(np.float64)
        )
        square = np.expm1(np.minimum(log_ratio, MAX_LOG_RATIO)) ** 2 * weight
        values: dict[str, MetricValue] = {"sequence_chi_square": Metric(float(square.sum()), float(weight.sum()))}
        if self.staleness_values is None:
            return values
        oldest = np.zeros_like(self.sequence_ids)
        np.maximum.at(oldest, self.run_sequence, self.run_staleness)
        refused = np.zeros(size) if rejected is None else self._of_sampled_sequences(rejected)
        length = np.bincount(self.run_sequence, self.run_lengths * self.scale, size)
        columns = (square, weight, refused * weight, length, refused * length)
        sums = [np.bincount(oldest, column, self.num_staleness_values).tolist() for column in columns]
        for age, chi, sequences, refused_sequences, tokens, refused_tokens in zip(
            self.staleness_values, *sums, strict=True
        ):
            values |= {
                f"sequence_chi_square/staleness={age}": Metric(chi, sequences),
                f"masked_sequences/staleness={age}": Metric(refused_sequences, sequences),
                f"masked_sequence_tokens/staleness={age}": Metric(refused_tokens, tokens),
            }
        return values


def _unique_inverse(values: Array) -> tuple[Array, Array]:
    """The distinct values in increasing order, and the place of each value among them."""
    ordered = np.sort(values)
    distinct = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return distinct, np.searchsorted(distinct, values)


def _token_states(fields: dict[str, Tensor]) -> Array:
    """3 * (KEPT, LOW, HIGH or CLIPPED), + 1 where the advantage is positive and + 2 where it is negative."""
    reasons, advantage = fields["reasons"].numpy(), fields["advantage"].numpy()
    masked = reasons != 0
    state: Array = masked + (reasons & 1)  # odd codes are high
    if "clipped" in fields:
        state += CLIPPED * (fields["clipped"].numpy() > masked).view(np.uint8)
    state *= 3
    state += (advantage > 0).view(np.uint8)
    state += 2 * (advantage < 0).view(np.uint8)
    return state


def _token_columns(fields: dict[str, Tensor], masked: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What is summed; and the two statistics that have a histogram, log-ratio and |p - q|."""
    policy, sampler = fields["policy"], fields["sampler"]
    d = policy - sampler
    p, q = policy.exp(), sampler.exp()
    excess = torch.expm1(d.clamp(max=MAX_LOG_RATIO))  # r - 1, exact where the policies agree
    mismatch = excess - d
    # all of it is finite, so that a product with a mask is safe here
    columns = {
        "mismatch": mismatch,
        "mismatch masked": mismatch * masked,
        "excess": excess,
        "excess squared": excess.square(),
        "policy": policy,
        "sampler": sampler,
        "p": p,
        "q": q,
        "pp": p * p,
        "qq": q * q,
        "pq": p * q,
        "entropy": fields["entropy"] if "entropy" in fields else torch.addcmul(policy, excess, policy).neg_(),
    }
    if "drift" in fields:
        columns["reference"] = fields["drift"].nan_to_num(0.0, 0.0, 0.0)
        columns["referenced"] = fields["drift"].isfinite().to(d.dtype)
    return columns, d, (p - q).abs()


def _sample_windows(view: ActiveTokens, totals: StepTotals) -> tuple[int, int]:
    """The sample: length and distance of the stretches, or (0, 0) when it is all of the view.

    It is the view's part of `metrics_sample_size`, as a few evenly spaced stretches of neighbouring tokens.
    """
    wanted = view.composition.metrics_sample_size
    length = -(-wanted * len(view) // max(totals.num_trainable * SAMPLE_WINDOWS, 1))
    if wanted == 0 or totals.num_trainable <= wanted or length * SAMPLE_WINDOWS >= len(view):
        return 0, 0
    return length, (len(view) - length) // (SAMPLE_WINDOWS - 1)


def _effective_sample_size(excess: float, squared: float) -> float:
    """(sum r)^2 / (n * sum r^2), from the means of r - 1 and (r - 1)^2."""
    return (1 + excess) ** 2 / (1 + 2 * excess + squared)


def _perplexity(logprob: float) -> float:
    return math.exp(min(-logprob, 700.0))


def _correlation(p: float, q: float, pp: float, qq: float, pq: float) -> float:
    spread = max(pp - p * p, 0.0) * max(qq - q * q, 0.0)
    return (pq - p * q) / math.sqrt(spread) if spread > 0 else math.nan
