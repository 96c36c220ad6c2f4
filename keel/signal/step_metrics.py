"""The accounts of a batch: what was refused, and how far sampler and policy are apart.

Counts of kept and dropped tokens are exact. Distributions, and everything split by staleness, are exact up to
`metric_tokens` tokens a step; above, they come from evenly spaced stretches of each batch, scaled to it, so that the
cost of metrics stays small. What belongs to whole sequences takes each sequence as it lies in the batch: one that is
cut over micro-batches counts in its parts. The sample is small, and so counted on the CPU by numpy, a call of which
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

from keel.signal.active_tokens import MAX_LOG_RATIO, View
from keel.signal.cpu_ops import below, count, count_signs
from keel.signal.gates import FIRST_GATE, Decision
from keel.signal.metrics import BINS, Derived, Histogram, Measure, Metric, Metrics
from keel.signal.step_totals import Totals, drift, kept_here

WINDOWS = 8
"""Stretches of neighbouring tokens that a sample is made of: long enough to hold whole sequences."""
BLOCK = 65536
"""Tokens looked at together, so that temporaries stay small."""
KEPT, LOW, HIGH, CLIPPED = range(4)
"""What became of a token; CLIPPED is kept, but without gradient."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """The evaluation of a view: its part of the loss, and what the metrics are made from."""

    loss: Tensor
    gradient: Tensor
    decision: Decision
    advantage: Tensor
    clipped: Tensor | None
    """Whose gradient a clip has stopped: tokens, or rows of the view's segments."""
    by_sequence: bool
    """Whether `clipped` is about sequences."""
    sizes: dict[str, Tensor]
    """The loss by term."""


def measure(view: View, totals: Totals, outcome: Outcome) -> Metrics:
    """All metrics of a view."""
    values: dict[str, Measure] = {}
    drift, share = _drift(view), _share_here(view, totals)
    sample = _Sample(view, totals, outcome, drift) if "sampler" in view.known else None
    if sample is not None:
        values |= sample.measures()
    values |= _exact(view, outcome, drift) | _rejected(view, outcome.decision, share)
    if sample is not None:
        values |= sample.sequence_measures(share)
    return Metrics(values, _dropped_tokens(view, outcome.decision))


def _exact(view: View, outcome: Outcome, drift: Tensor | None) -> dict[str, Measure]:
    """What is counted over every token whatever their number."""
    counts, members = outcome.decision.counts, view.members
    low = sum(number for code, number in counts.items() if (code - FIRST_GATE) % 2 == 0)
    high = sum(counts.values()) - low
    values: dict[str, Measure] = {
        "is_masked": Metric(low + high, members),
        "is_masked_low": Metric(low, members),
        "is_masked_high": Metric(high, members),
        "signal/unusable_tokens": Metric(view.unusable, members),
    }
    dropped, clipped = outcome.decision.dropped, outcome.clipped
    ups, downs, refused_up = count_signs(outcome.advantage, dropped)
    refused_down = low + high - refused_up  # a pass less, when no advantage is zero
    if dropped is not None and ups + downs < len(view):
        refused_down = count(below(outcome.advantage, 0.0), dropped)
    values["is_masked_positive"], values["is_masked_negative"] = Metric(refused_up, ups), Metric(refused_down, downs)
    if clipped is not None and outcome.by_sequence:
        values["is_clipped"] = Metric(int((kept_here(view, outcome.decision) * clipped).sum()), members)
    elif clipped is not None:
        values["is_clipped"] = Metric(count(clipped) - (0 if dropped is None else count(clipped, dropped)), members)
    if drift is not None:
        total = drift.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64)
        values["kl_policy_ref"] = Metric(float(total), count(drift.isfinite()))
    return values


def _rejected(view: View, decision: Decision, share: Tensor | None) -> dict[str, Measure]:
    """What gates at sequence scope refused; without one nothing is, however many sequences there are."""
    tokens = sequences = 0.0
    if decision.rejected is not None and share is not None:
        tokens = float((view.segments.count() * decision.rejected).sum())
        sequences = float((share * decision.rejected).sum())
    return {
        "opsm_rejected_sequences": Metric(sequences, float(view.members if share is None else share.sum())),
        "opsm_rejected_tokens": Metric(tokens, view.members),
    }


def _drift(view: View) -> Tensor | None:
    """k where there is a reference; one that the objective does not read may have holes, which are not counted."""
    if view.composition.reads("reference"):
        return drift(view)
    reference = view.batch.reference_logprobs
    return None if reference is None else view.logprob("policy") - view.take(reference.detach())


def _share_here(view: View, totals: Totals) -> Tensor | None:
    """Which part of each sequence lies in this view, so that a sequence split over micro-batches counts once."""
    rows = totals.rows(view)
    if rows is None or "usable" not in rows.columns:
        return None
    return view.segments.count() / rows["usable"].clamp(min=1)


def _dropped_tokens(view: View, decision: Decision) -> Counter[int]:
    if view.batch.token_ids is None or decision.dropped is None:
        return Counter()
    tokens, times = torch.unique(view.take(view.batch.token_ids)[decision.dropped], return_counts=True)
    return Counter(dict(zip(tokens.tolist(), times.tolist(), strict=True)))


class _Sample:
    """The tokens that distributions are taken from, as runs of neighbours of one sequence and one staleness.

    Columns are summed by run; a sum by staleness or by sequence is one over runs, of which there are few.
    """

    def __init__(self, view: View, totals: Totals, outcome: Outcome, drift: Tensor | None) -> None:
        self.view, self.totals, self.outcome, self.drift = view, totals, outcome, drift
        self.length, self.stride = _windows(view, totals)
        self.size = WINDOWS * self.length if self.stride else len(view)
        self.scale = len(view) / max(self.size, 1)
        self.places = None if view.index is None else self._at(view.index)
        """The sample's positions in the batch; None: the view is the batch."""
        sequence, version = self._take(view.batch.sequence).cpu().numpy(), None
        first = np.zeros(self.size, dtype=bool)
        first[::BLOCK] = True  # so that no run crosses from block to block
        first[1:] |= sequence[1:] != sequence[:-1]
        if view.batch.version is not None and totals.trainer_version is not None and self.size:
            version = self._take(view.batch.version).long().cpu().numpy()
            first[1:] |= version[1:] != version[:-1]
        self.starts = np.flatnonzero(first)
        self.lengths = np.diff(self.starts, append=self.size)
        self.ids, self.row = _distinct(sequence[self.starts])
        """The sequences of the sample, and which of them each run is of."""
        self.ages: list[int] | None = None
        self.age = np.zeros_like(self.row)
        """The staleness values of the sample, and which of them each run has."""
        if version is not None:
            ages, self.age = _distinct(totals.trainer_version - version[self.starts])
            self.ages = ages.tolist()
        self.kinds = 1 if self.ages is None else len(self.ages)
        self.whole = np.ones(len(self.ids))
        """0 for the sequences at the ends of a stretch, which may go on beyond it."""
        if self.stride:
            self.whole[np.searchsorted(self.ids, sequence.reshape(WINDOWS, -1)[:, [0, -1]])] = 0.0
        self.fields = self._fields()
        self.names: list[str] = []
        blocks = [self._block(start) for start in range(0, max(self.size, 1), BLOCK)]  # of an empty sample, one
        self.log_ratio = np.concatenate([block[0] for block in blocks])
        """The sum over each run."""
        self.states, self.sums, self.histograms = (
            reduce(np.add, part) for part in zip(*(block[1:] for block in blocks), strict=True)
        )

    def _at(self, field: Tensor) -> Tensor:
        """A field of the view's tokens, at the sample."""
        return field.unfold(0, self.length, self.stride)[:WINDOWS].flatten() if self.stride else field

    def _take(self, field: Tensor) -> Tensor:
        """A field of the batch, at the sample."""
        return self._at(field) if self.places is None else field.index_select(0, self.places)

    def _of_rows(self, values: Tensor) -> Array:
        """Per-sequence values at the sequences of the sample."""
        return values.cpu().numpy()[np.searchsorted(self.view.segments.ids.cpu().numpy(), self.ids)]

    def _fields(self) -> dict[str, Tensor]:
        """What columns are made from: per token, at the sample, on the CPU."""
        view, outcome = self.view, self.outcome
        fields = {"policy": view.logprob("policy"), "sampler": view.logprob("sampler"), "advantage": outcome.advantage}
        fields["reasons"] = outcome.decision.reasons
        if self.drift is not None:
            fields["drift"] = self.drift
        if outcome.clipped is not None and not outcome.by_sequence:
            fields["clipped"] = outcome.clipped
        fields = {name: self._at(field).cpu() for name, field in fields.items()}
        if outcome.clipped is not None and outcome.by_sequence:
            clipped = self._of_rows(outcome.clipped)[self.row]
            fields["clipped"] = torch.from_numpy(np.repeat(clipped, self.lengths))
        if view.batch.entropy is not None:
            fields["entropy"] = self._take(view.batch.entropy.detach()).to(view.dtype).cpu()
        return fields

    def _block(self, start: int) -> tuple[Array, ...]:
        """For a block of the sample: log-ratios by run; and by staleness states, columns and both histograms."""
        fields = {name: field[start : start + BLOCK] for name, field in self.fields.items()}
        runs = slice(*np.searchsorted(self.starts, (start, start + BLOCK)))
        age = np.repeat(self.age[runs], self.lengths[runs])
        state = _states(fields)
        masked = (state >= 3 * LOW) & (state < 3 * CLIPPED)
        columns, log_ratio, difference = _columns(fields, torch.from_numpy(masked))
        self.names = list(columns)
        starts = self.starts[runs] - start
        by_run = np.add.reduceat(torch.stack(list(columns.values())).double().numpy(), starts, axis=1)
        return (
            by_run[self.names.index("policy")] - by_run[self.names.index("sampler")],
            np.bincount(age * 12 + state, minlength=self.kinds * 12).reshape(-1, 4, 3),
            np.array([np.bincount(self.age[runs], row, self.kinds) for row in by_run]).T,
            self._histograms(log_ratio, difference, age),
        )

    def _histograms(self, log_ratio: Tensor, difference: Tensor, age: Array) -> Array:
        """[staleness, 2, BINS], counted together."""
        codes = Histogram.codes(torch.stack((log_ratio, difference))).numpy()
        codes += (2 * BINS * age).astype(codes.dtype)
        codes[1] += BINS
        return np.bincount(codes.ravel(), minlength=self.kinds * 2 * BINS).reshape(self.kinds, 2, BINS)

    def measures(self) -> dict[str, Measure]:
        """Over all tokens, and for each staleness."""
        ends = [""] + [f"/staleness={age}" for age in self.ages or []]
        states, sums, histograms = map(self._with_total, (self.states, self.sums, self.histograms))
        values: dict[str, Measure] = {}
        for end, *numbers in zip(ends, states.tolist(), sums.tolist(), torch.from_numpy(histograms), strict=True):
            self._name(values, end, *numbers)
        return values

    def _with_total(self, part: Array) -> Array:
        """Scaled to the view; and, when there are rows by staleness, their sum before them."""
        if self.ages is None:
            return part * self.scale
        whole = np.empty((len(part) + 1, *part.shape[1:]))
        np.multiply(part, self.scale, out=whole[1:])
        np.sum(whole[1:], axis=0, out=whole[0])
        return whole

    def _name(
        self,
        values: dict[str, Measure],
        end: str,
        states: list[list[float]],
        sums: list[float],
        histograms: Tensor,
    ) -> None:
        """Add the measures of one staleness, or of all, to `values`, with `end` behind their names."""
        total = dict(zip(self.names, sums, strict=True))
        low, high = sum(states[LOW]), sum(states[HIGH])
        _, positive, negative = map(sum, zip(*states, strict=True))
        masked, count = low + high, sum(map(sum, states))

        def mean(name: str) -> Metric:
            return Metric(total[name], count)

        values |= {
            f"mismatch_kl{end}": mean("mismatch"),
            f"mismatch_kl_masked{end}": Metric(total["mismatch masked"], masked),
            f"mismatch_kl_unmasked{end}": Metric(total["mismatch"] - total["mismatch masked"], count - masked),
            f"is_masked{end}": Metric(masked, count),
            f"is_masked_low{end}": Metric(low, count),
            f"is_masked_high{end}": Metric(high, count),
            f"is_masked_positive{end}": Metric(states[LOW][1] + states[HIGH][1], positive),
            f"is_masked_negative{end}": Metric(states[LOW][2] + states[HIGH][2], negative),
            f"ratio{end}": Histogram(histograms[0], log=True),
            f"probability_difference{end}": Histogram(histograms[1]),
            f"effective_sample_size{end}": Derived((mean("excess"), mean("excess squared")), _sample_size),
            f"chi_square{end}": mean("excess squared"),
            f"sampler_perplexity{end}": Derived((mean("sampler"),), _perplexity),
            f"trainer_perplexity{end}": Derived((mean("policy"),), _perplexity),
            f"entropy{end}": mean("entropy"),
            f"correlation{end}": Derived(tuple(mean(name) for name in ("p", "q", "pp", "qq", "pq")), _correlation),
        }
        if self.outcome.clipped is not None:
            values[f"is_clipped{end}"] = Metric(sum(states[CLIPPED]), count)
        if "reference" in total:
            values[f"kl_policy_ref{end}"] = Metric(total["reference"], total["referenced"])

    def sequence_measures(self, share: Tensor | None) -> dict[str, Measure]:
        """What belongs to whole sequences; a sequence is as stale as its oldest token."""
        rows, rejected, size = self.totals.rows(self.view), self.outcome.decision.rejected, len(self.ids)
        if rows is not None and "sum policy/sampler" in rows.columns:
            log_ratio: Array = self._of_rows(rows["sum policy/sampler"]).astype(np.float64)
        else:
            log_ratio = np.bincount(self.row, self.log_ratio, size)
        weight: Array = self.scale * (self.whole if share is None else self._of_rows(share).astype(np.float64))
        square = np.expm1(np.minimum(log_ratio, MAX_LOG_RATIO)) ** 2 * weight
        values: dict[str, Measure] = {"sequence_chi_square": Metric(float(square.sum()), float(weight.sum()))}
        if self.ages is None:
            return values
        oldest = np.zeros_like(self.ids)
        np.maximum.at(oldest, self.row, self.age)
        refused = np.zeros(size) if rejected is None else self._of_rows(rejected)
        length = np.bincount(self.row, self.lengths * self.scale, size)
        columns = (square, weight, refused * weight, length, refused * length)
        sums = [np.bincount(oldest, column, self.kinds).tolist() for column in columns]
        for age, chi, sequences, refused_sequences, tokens, refused_tokens in zip(self.ages, *sums, strict=True):
            values |= {
                f"sequence_chi_square/staleness={age}": Metric(chi, sequences),
                f"opsm_rejected_sequences/staleness={age}": Metric(refused_sequences, sequences),
                f"opsm_rejected_tokens/staleness={age}": Metric(refused_tokens, tokens),
            }
        return values


def _distinct(values: Array) -> tuple[Array, Array]:
    """The distinct values in increasing order, and the place of each value among them."""
    ordered = np.sort(values)
    distinct = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return distinct, np.searchsorted(distinct, values)


def _states(fields: dict[str, Tensor]) -> Array:
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


def _columns(fields: dict[str, Tensor], masked: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
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


def _windows(view: View, totals: Totals) -> tuple[int, int]:
    """The sample: length and distance of the stretches, or (0, 0) when it is all of the view.

    It is the view's part of `metric_tokens`, as a few evenly spaced stretches of neighbouring tokens.
    """
    wanted = view.composition.metric_tokens
    length = -(-wanted * len(view) // max(totals.members * WINDOWS, 1))
    if wanted == 0 or totals.members <= wanted or length * WINDOWS >= len(view):
        return 0, 0
    return length, (len(view) - length) // (WINDOWS - 1)


def _sample_size(excess: float, squared: float) -> float:
    """(sum r)^2 / (n * sum r^2), from the means of r - 1 and (r - 1)^2."""
    return (1 + excess) ** 2 / (1 + 2 * excess + squared)


def _perplexity(logprob: float) -> float:
    return math.exp(min(-logprob, 700.0))


def _correlation(p: float, q: float, pp: float, qq: float, pq: float) -> float:
    spread = max(pp - p * p, 0.0) * max(qq - q * q, 0.0)
    return (pq - p * q) / math.sqrt(spread) if spread > 0 else math.nan
