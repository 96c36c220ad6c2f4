"""Estimate the distributions of a batch, and its metrics by staleness, from a sample of its tokens.

Exact up to `metrics_sample_size` tokens per step. Above, the sample consists of evenly spaced windows of each batch,
and its metrics are scaled to the size of the batch, so that metrics stay cheap. Metrics of sequences use the part of a
sequence in the batch: a sequence that is split over micro-batches counts in parts. The sample is small and is therefore
reduced on the CPU with numpy, whose calls have much less overhead than torch's.
"""

import math
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.signal.active_tokens import MAX_LOG_RATIO, ActiveTokens
from keel.signal.loss_terms import Evaluated
from keel.signal.metrics import NUM_BINS, DerivedMetric, Histogram, Metric, MetricValue
from keel.signal.step_totals import StepTotals

SAMPLE_WINDOWS = 8
"""Number of windows of adjacent tokens in a sample. Few, so that a window can contain complete sequences."""
BLOCK_TOKENS = 65536
"""Tokens processed together, so that temporaries stay small."""
KEPT, LOW, HIGH, CLIPPED = range(4)
"""State of a token. CLIPPED means kept, but without gradient."""

Array = NDArray[Any]


MAX_STALENESS_BUCKET = 16
"""Tokens of this staleness or more share one set of metrics. Every value adds about twenty."""


class MetricsSample:
    """The sampled tokens of a batch, as runs of adjacent tokens with the same sequence and staleness.

    Columns are summed by run. Sums by staleness or by sequence are then sums over runs, of which there are few.
    """

    def __init__(
        self, active: ActiveTokens, totals: StepTotals, evaluated: Evaluated, ref_log_ratio: Tensor | None
    ) -> None:
        self.active, self.totals, self.evaluated, self.ref_log_ratio = active, totals, evaluated, ref_log_ratio
        self.window_length, self.window_stride = _sample_windows(active, totals)
        self.size = SAMPLE_WINDOWS * self.window_length if self.window_stride else len(active)
        self.scale = len(active) / max(self.size, 1)
        self.positions = None if active.index is None else self._sample_active(active.index)
        """Positions of the sample in the batch; None if all tokens of the batch are active."""
        sequence, version = self._sample_batch(active.batch.sequence).cpu().numpy(), None
        first = np.zeros(self.size, dtype=bool)
        first[::BLOCK_TOKENS] = True  # a run must not cross a block boundary
        first[1:] |= sequence[1:] != sequence[:-1]
        if active.batch.version is not None and totals.trainer_version is not None and self.size:
            version = self._sample_batch(active.batch.version).long().cpu().numpy()
            first[1:] |= version[1:] != version[:-1]
        self.run_starts = np.flatnonzero(first)
        self.run_lengths = np.diff(self.run_starts, append=self.size)
        self.sequence_ids, self.run_sequence = _unique_inverse(sequence[self.run_starts])
        """The sequences of the sample, and the index of each run's sequence."""
        self.staleness_values: list[str] | None = None
        self.run_staleness = np.zeros_like(self.run_sequence)
        """Index of each run's staleness in `staleness_values`."""
        if version is not None:
            staleness = totals.trainer_version - version[self.run_starts]
            buckets, self.run_staleness = _unique_inverse(staleness.clip(-1, MAX_STALENESS_BUCKET))
            self.staleness_values = [_bucket_name(bucket) for bucket in buckets.tolist()]
        self.num_staleness_values = 1 if self.staleness_values is None else len(self.staleness_values)
        self.sequence_is_whole = np.ones(len(self.sequence_ids))
        """0 for the sequences at the ends of a window, which may extend beyond it; 1 for the others."""
        if self.window_stride:
            self.sequence_is_whole[
                np.searchsorted(self.sequence_ids, sequence.reshape(SAMPLE_WINDOWS, -1)[:, [0, -1]])
            ] = 0.0
        self.fields = self._token_fields()
        self.column_names: list[str] = []
        # an empty sample has one empty block
        blocks = [self._reduce_block(start) for start in range(0, max(self.size, 1), BLOCK_TOKENS)]
        self.run_log_ratio = np.concatenate([block[0] for block in blocks])
        """Sum of the log-ratios over each run."""
        self.state_counts, self.column_sums, self.histograms = (
            reduce(np.add, part) for part in zip(*(block[1:] for block in blocks), strict=True)
        )

    def _sample_active(self, field: Tensor) -> Tensor:
        """Return a field of the active tokens at the sample."""
        return (
            field.unfold(0, self.window_length, self.window_stride)[:SAMPLE_WINDOWS].flatten()
            if self.window_stride
            else field
        )

    def _sample_batch(self, field: Tensor) -> Tensor:
        """Return a field of the batch at the sample."""
        return self._sample_active(field) if self.positions is None else field.index_select(0, self.positions)

    def _of_sampled_sequences(self, values: Tensor) -> Array:
        """Return per-sequence values at the sequences of the sample."""
        return values.cpu().numpy()[np.searchsorted(self.active.segments.ids.cpu().numpy(), self.sequence_ids)]

    def _token_fields(self) -> dict[str, Tensor]:
        """Return the inputs of the columns, per sampled token, on the CPU."""
        active, evaluated = self.active, self.evaluated
        fields = {
            "policy": active.logprob("policy"),
            "sampler": active.logprob("sampler"),
            "advantage": evaluated.advantage,
            "reasons": evaluated.decision.reasons,
        }
        if self.ref_log_ratio is not None:
            fields["ref_log_ratio"] = self.ref_log_ratio
        if evaluated.clipped is not None and not evaluated.clipped_by_sequence:
            fields["clipped"] = evaluated.clipped
        fields = {name: self._sample_active(field).cpu() for name, field in fields.items()}
        if evaluated.clipped is not None and evaluated.clipped_by_sequence:
            clipped = self._of_sampled_sequences(evaluated.clipped)[self.run_sequence]
            fields["clipped"] = torch.from_numpy(np.repeat(clipped, self.run_lengths))
        if active.batch.entropy is not None:
            fields["entropy"] = self._sample_batch(active.batch.entropy.detach()).to(active.dtype).cpu()
        return fields

    def _reduce_block(self, start: int) -> tuple[Array, ...]:
        """Return for a block of the sample: log-ratios by run; and states, columns and histograms by staleness."""
        fields = {name: field[start : start + BLOCK_TOKENS] for name, field in self.fields.items()}
        runs = slice(*np.searchsorted(self.run_starts, (start, start + BLOCK_TOKENS)))
        staleness_index = np.repeat(self.run_staleness[runs], self.run_lengths[runs])
        state = _token_states(fields)
        masked = (state >= 3 * LOW) & (state < 3 * CLIPPED)
        columns, log_ratio, difference = _token_columns(fields, torch.from_numpy(masked))
        self.column_names = list(columns)
        starts = self.run_starts[runs] - start
        by_run = np.add.reduceat(torch.stack(list(columns.values())).double().numpy(), starts, axis=1)
        return (
            by_run[self.column_names.index("policy")] - by_run[self.column_names.index("sampler")],
            np.bincount(staleness_index * 12 + state, minlength=self.num_staleness_values * 12).reshape(-1, 4, 3),
            np.array([np.bincount(self.run_staleness[runs], row, self.num_staleness_values) for row in by_run]).T,
            self._histograms(log_ratio, difference, staleness_index),
        )

    def _histograms(self, log_ratio: Tensor, difference: Tensor, staleness_index: Array) -> Array:
        """Return the histograms of both statistics, [staleness, 2, NUM_BINS], counted in one pass."""
        codes = Histogram.bin_indices(torch.stack((log_ratio, difference))).numpy()
        codes += (2 * NUM_BINS * staleness_index).astype(codes.dtype)
        codes[1] += NUM_BINS
        return np.bincount(codes.ravel(), minlength=self.num_staleness_values * 2 * NUM_BINS).reshape(
            self.num_staleness_values, 2, NUM_BINS
        )

    def token_metrics(self) -> dict[str, MetricValue]:
        """Return the metrics over all tokens, and for each staleness."""
        suffixes = [""] + [f"/staleness={staleness}" for staleness in self.staleness_values or []]
        states, sums, histograms = map(self._prepend_total, (self.state_counts, self.column_sums, self.histograms))
        values: dict[str, MetricValue] = {}
        rows = zip(suffixes, states.tolist(), sums.tolist(), torch.from_numpy(histograms), strict=True)
        for suffix, *counts in rows:
            self._add_metrics(values, suffix, *counts)
        return values

    def _prepend_total(self, by_staleness: Array) -> Array:
        """Scale counts to the batch and, if they are split by staleness, prepend their sum."""
        if self.staleness_values is None:
            return by_staleness * self.scale
        rows = np.empty((len(by_staleness) + 1, *by_staleness.shape[1:]))
        np.multiply(by_staleness, self.scale, out=rows[1:])
        np.sum(rows[1:], axis=0, out=rows[0])
        return rows

    def _add_metrics(
        self,
        values: dict[str, MetricValue],
        suffix: str,
        states: list[list[float]],
        sums: list[float],
        histograms: Tensor,
    ) -> None:
        """Add the metrics of one staleness, or of all tokens, to `values`, with `suffix` appended to their names."""
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

    def sequence_metrics(self, sequence_fraction: Tensor | None) -> dict[str, MetricValue]:
        """Return the metrics of sequences. The staleness of a sequence is that of its oldest token."""
        rows = self.totals.rows_for(self.active)
        dropped_sequences = self.evaluated.decision.dropped_sequences
        size = len(self.sequence_ids)
        if rows is not None and "sum policy/sampler" in rows.columns:
            log_ratio: Array = self._of_sampled_sequences(rows["sum policy/sampler"]).astype(np.float64)
        else:
            log_ratio = np.bincount(self.run_sequence, self.run_log_ratio, size)
        weight: Array = self.scale * (
            self.sequence_is_whole
            if sequence_fraction is None
            else self._of_sampled_sequences(sequence_fraction).astype(np.float64)
        )
        square = np.expm1(np.minimum(log_ratio, MAX_LOG_RATIO)) ** 2 * weight
        values: dict[str, MetricValue] = {"sequence_chi_square": Metric(float(square.sum()), float(weight.sum()))}
        if self.staleness_values is None:
            return values
        oldest = np.zeros_like(self.sequence_ids)
        np.maximum.at(oldest, self.run_sequence, self.run_staleness)
        is_dropped = np.zeros(size) if dropped_sequences is None else self._of_sampled_sequences(dropped_sequences)
        length = np.bincount(self.run_sequence, self.run_lengths * self.scale, size)
        columns = (square, weight, is_dropped * weight, length, is_dropped * length)
        sums = [np.bincount(oldest, column, self.num_staleness_values).tolist() for column in columns]
        for staleness, chi, sequences, masked_sequences, tokens, masked_tokens in zip(
            self.staleness_values, *sums, strict=True
        ):
            values |= {
                f"sequence_chi_square/staleness={staleness}": Metric(chi, sequences),
                f"masked_sequences/staleness={staleness}": Metric(masked_sequences, sequences),
                f"masked_sequence_tokens/staleness={staleness}": Metric(masked_tokens, tokens),
            }
        return values


def _bucket_name(bucket: int) -> str:
    """Return the name of a staleness in metrics. Tokens newer than the trainer share "<0"."""
    if bucket < 0:
        return "<0"
    return f"{bucket}+" if bucket == MAX_STALENESS_BUCKET else str(bucket)


def _unique_inverse(values: Array) -> tuple[Array, Array]:
    """Return the distinct values in increasing order, and the index of each value among them."""
    ordered = np.sort(values)
    distinct = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return distinct, np.searchsorted(distinct, values)


def _token_states(fields: dict[str, Tensor]) -> Array:
    """Return 3 * (KEPT, LOW, HIGH or CLIPPED), plus 1 where the advantage is positive and 2 where it is negative."""
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
    """Return the columns to sum, and the two statistics that have a histogram: log-ratio and |p - q|."""
    policy, sampler = fields["policy"], fields["sampler"]
    d = policy - sampler
    p, q = policy.exp(), sampler.exp()
    excess = torch.expm1(d.clamp(max=MAX_LOG_RATIO))  # r - 1, exact where the policies agree
    mismatch = excess - d
    # all values are finite, so multiplying by a mask is safe here
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
    if "ref_log_ratio" in fields:
        columns["reference"] = fields["ref_log_ratio"].nan_to_num(0.0, 0.0, 0.0)
        columns["referenced"] = fields["ref_log_ratio"].isfinite().to(d.dtype)
    return columns, d, (p - q).abs()


def _sample_windows(active: ActiveTokens, totals: StepTotals) -> tuple[int, int]:
    """Return length and stride of the sample's windows, or (0, 0) if the sample is all active tokens.

    The sample has the batch's share of `metrics_sample_size` tokens, in a few evenly spaced windows of adjacent tokens.
    """
    sample_size = active.composition.metrics_sample_size
    length = -(-sample_size * len(active) // max(totals.num_trainable * SAMPLE_WINDOWS, 1))
    if sample_size == 0 or totals.num_trainable <= sample_size or length * SAMPLE_WINDOWS >= len(active):
        return 0, 0
    return length, (len(active) - length) // (SAMPLE_WINDOWS - 1)


def _effective_sample_size(excess: float, squared: float) -> float:
    """Return (sum r)^2 / (n * sum r^2), from the means of r - 1 and (r - 1)^2."""
    return (1 + excess) ** 2 / (1 + 2 * excess + squared)


def _perplexity(logprob: float) -> float:
    return math.exp(min(-logprob, 700.0))


def _correlation(p: float, q: float, pp: float, qq: float, pq: float) -> float:
    variances = max(pp - p * p, 0.0) * max(qq - q * q, 0.0)
    return (pq - p * q) / math.sqrt(variances) if variances > 0 else math.nan
