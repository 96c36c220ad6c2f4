"""The accounts of a batch: what was refused, and how far sampler and policy are apart.

Counts of kept and dropped tokens are exact. Distributions, and everything split by staleness, are exact up to
`metric_tokens` tokens a step; above, they come from evenly spaced stretches of each batch, scaled to it, so that the
cost of metrics stays small. What belongs to whole sequences takes each sequence as it lies in the batch: one that is
cut over micro-batches counts in its parts.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from keel.signal.gates import FIRST_GATE, Decision, row_sides
from keel.signal.metrics import BINS, Derived, Histogram, Measure, Metric, Metrics
from keel.signal.passes import above, below, count, places
from keel.signal.segments import Segments
from keel.signal.totals import Totals, drift, kept_here
from keel.signal.view import View, ratio

WINDOWS = 8
"""Stretches of neighbouring tokens that a sample is made of: long enough to hold whole sequences."""
BLOCK = 65536
"""Tokens looked at together, so that temporaries stay small."""


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
    sample = _Sample(view, totals, outcome) if "sampler" in view.known else None
    if sample is not None:
        values |= sample.measures()
    rejected = _rejected_rows(view, totals)
    values |= _exact(view, totals, outcome, rejected)
    if sample is not None:
        values |= sample.sequence_measures(rejected)
    return Metrics(values, _dropped_tokens(view, outcome.decision))


def _exact(view: View, totals: Totals, outcome: Outcome, rejected: Tensor | None) -> dict[str, Measure]:
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
    dropped = outcome.decision.dropped
    refused = outcome.advantage[:0] if dropped is None else outcome.advantage.index_select(0, places(dropped))
    for name, side in (("positive", above), ("negative", below)):
        values[f"is_masked_{name}"] = Metric(count(side(refused, 0.0)), count(side(outcome.advantage, 0.0)))
    clipped = outcome.clipped
    if clipped is not None and outcome.by_sequence:
        values["is_clipped"] = Metric(int((kept_here(view, outcome.decision) * clipped).sum()), members)
    elif clipped is not None:
        values["is_clipped"] = Metric(count(clipped if dropped is None else clipped & ~dropped), members)
    known = _drift(view)
    if known is not None:
        usable = known.isfinite()
        total = known.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64)
        values["kl_policy_ref"] = Metric(float(total), count(usable))
    share = _share_here(view, totals)
    # without a gate on sequences none is refused, however many there are
    sequences = float(members if share is None else share.sum())
    values["opsm_rejected_sequences"] = Metric(0.0, sequences)
    values["opsm_rejected_tokens"] = Metric(0.0, members)
    if rejected is not None:
        here = view.segments.count()
        values["opsm_rejected_tokens"] = Metric(float(here[rejected].sum()), members)
        weight = torch.ones_like(here) if share is None else share
        values["opsm_rejected_sequences"] = Metric(float(weight[rejected].sum()), sequences)
    return values


def _drift(view: View) -> Tensor | None:
    """k where there is a reference; one that the objective does not read may have holes, which are not counted."""
    if view.composition.reads("reference"):
        return drift(view)
    reference = view.batch.reference_logprobs
    return None if reference is None else view.logprob("policy") - view.take(reference.detach())


def _rejected_rows(view: View, totals: Totals) -> Tensor | None:
    """The view's sequences that a gate at sequence scope refused."""
    rejected = None
    for position, gate in enumerate(totals.composition.gates):
        if gate.scope == "sequence":
            rows = totals.rows(view)
            assert rows is not None
            for side in row_sides(gate, position, rows):
                if side is not None:
                    rejected = side if rejected is None else rejected | side
    return rejected


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
    """The tokens that distributions are taken from, as sums of columns by staleness."""

    def __init__(self, view: View, totals: Totals, outcome: Outcome) -> None:
        self.view, self.totals, self.outcome = view, totals, outcome
        self.index = _windows(view, totals)
        """The view's tokens in the sample; None: all of them."""
        self.segments = view.segments if self.index is None else Segments(view.take(view.batch.sequence, self.index))
        self.size = len(view) if self.index is None else len(self.index)
        self.scale = len(view) / max(self.size, 1)
        self.ages: list[int] | None = None
        parts, order = [self.size], None
        if view.batch.version is not None and totals.trainer_version is not None and self.size:
            self.staleness = totals.trainer_version - view.take(view.batch.version, self.index)
            by_age = Segments(self.staleness)
            self.ages, parts, order = by_age.ids.tolist(), by_age.count().tolist(), by_age.in_order()
        # from here on tokens of one age stand together, so that a sum by age is a sum over a slice
        self.places = order
        if self.index is not None:
            self.places = self.index if order is None else self.index.index_select(0, order)
        self.clipped = self._clipped(order)
        self.drift = _drift(view)
        self.names: list[str] = []
        self.sums: list[list[float]] = []
        """For each age the sum of each column."""
        self.ratios = self.differences = torch.zeros(len(parts), BINS, dtype=torch.int64)
        self._fill(parts)

    def _at(self, field: Tensor, block: slice) -> Tensor:
        """A field of the view's tokens, at a block of the sample."""
        return field[block] if self.places is None else field.index_select(0, self.places[block])

    def _of_rows(self, values: Tensor) -> Tensor:
        """Per-sequence values at the sequences of the sample."""
        if self.index is None:
            return values
        return values[torch.searchsorted(self.view.segments.ids, self.segments.ids)]

    def _clipped(self, order: Tensor | None) -> Tensor | None:
        """Which tokens of the sample a clip has stopped."""
        clipped = self.outcome.clipped
        if clipped is None or not self.outcome.by_sequence:
            return None if clipped is None else self._at(clipped, slice(None))
        clipped = self.segments.spread(self._of_rows(clipped))
        return clipped if order is None else clipped[order]

    def _fill(self, parts: list[int]) -> None:
        """Sum and count block by block, the first `parts[0]` tokens being of the first age, and so on."""
        sums = torch.zeros(len(parts), 1, dtype=torch.float64, device=self.view.advantages.device)
        for start in range(0, max(self.size, 1), BLOCK):  # once for an empty sample, so that every name is there
            columns, log_ratio, difference = self._columns(slice(start, start + BLOCK))
            self.names = list(columns)
            end = min(start + BLOCK, self.size)
            edges = [min(max(edge, start), end) - start for edge in accumulate(parts, initial=0)]
            matrix = torch.stack(list(columns.values()))
            sums = sums + torch.stack(
                [matrix[:, first:last].sum(1, dtype=torch.float64) for first, last in pairwise(edges)]
            )
            self.ratios = self.ratios + _count_by(Histogram.codes(log_ratio), edges)
            self.differences = self.differences + _count_by(Histogram.codes(difference), edges)
        self.sums = (sums * self.scale).tolist()

    def _columns(self, block: slice) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        view, outcome = self.view, self.outcome
        policy, sampler = self._at(view.logprob("policy"), block), self._at(view.logprob("sampler"), block)
        advantage, reasons = self._at(outcome.advantage, block), self._at(outcome.decision.reasons, block)
        d = policy - sampler
        p, q = policy.exp(), sampler.exp()
        excess = torch.expm1(d.clamp(max=40.0))  # r - 1, exact where the policies agree
        mismatch = excess - d
        masked, high = reasons.clamp(max=1).to(d.dtype), (reasons & 1).to(d.dtype)  # odd codes are high
        sign = advantage.sign()
        positive, negative = sign.clamp(min=0), -sign.clamp(max=0)
        # all of it is finite, so that a product with a mask is safe here
        columns = {
            "count": torch.ones_like(d),
            "masked": masked,
            "high": high,
            "positive": positive,
            "negative": negative,
            "masked positive": masked * positive,
            "masked negative": masked * negative,
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
        }
        if view.batch.entropy is not None:
            entropy = view.batch.entropy.detach()
            places = self.places
            entropy = view.take(entropy)[block] if places is None else view.take(entropy, places[block])
            columns["entropy"] = entropy.to(d.dtype)
        else:
            columns["entropy"] = -(excess + 1) * policy
        if self.clipped is not None:
            columns["clipped"] = self.clipped[block] * (1 - masked)
        if self.drift is not None:
            here = self._at(self.drift, block)
            columns["reference"] = here.nan_to_num(0.0, 0.0, 0.0)
            columns["referenced"] = here.isfinite().to(d.dtype)
        return columns, d, (p - q).abs()

    def measures(self) -> dict[str, Measure]:
        """Over all tokens, and for each staleness."""
        totals = [sum(column) for column in zip(*self.sums, strict=True)]
        values = self._named(totals, self.ratios.sum(0), self.differences.sum(0))
        for place, age in enumerate(self.ages or []):
            of_age = self._named(self.sums[place], self.ratios[place], self.differences[place])
            values |= {f"{name}/staleness={age}": value for name, value in of_age.items()}
        return values

    def _named(self, sums: list[float], ratios: Tensor, differences: Tensor) -> dict[str, Measure]:
        total = dict(zip(self.names, sums, strict=True))
        count = total["count"]

        def mean(name: str) -> Metric:
            return Metric(total[name], count)

        masked = total["masked"]
        values: dict[str, Measure] = {
            "mismatch_kl": mean("mismatch"),
            "mismatch_kl_masked": Metric(total["mismatch masked"], masked),
            "mismatch_kl_unmasked": Metric(total["mismatch"] - total["mismatch masked"], count - masked),
            "is_masked": mean("masked"),
            "is_masked_low": Metric(masked - total["high"], count),
            "is_masked_high": mean("high"),
            "is_masked_positive": Metric(total["masked positive"], total["positive"]),
            "is_masked_negative": Metric(total["masked negative"], total["negative"]),
            "ratio": Histogram(ratios.double() * self.scale, log=True),
            "probability_difference": Histogram(differences.double() * self.scale),
            "effective_sample_size": Derived((mean("excess"), mean("excess squared")), _sample_size),
            "chi_square": mean("excess squared"),
            "sampler_perplexity": Derived((mean("sampler"),), _perplexity),
            "trainer_perplexity": Derived((mean("policy"),), _perplexity),
            "entropy": mean("entropy"),
            "correlation": Derived(tuple(mean(name) for name in ("p", "q", "pp", "qq", "pq")), _correlation),
        }
        if "clipped" in total:
            values["is_clipped"] = mean("clipped")
        if "reference" in total:
            values["kl_policy_ref"] = Metric(total["reference"], total["referenced"])
        return values

    def sequence_measures(self, rejected: Tensor | None) -> dict[str, Measure]:
        """What belongs to whole sequences; a sequence is as stale as its oldest token."""
        view = self.view
        rows = self.totals.rows(view)
        if rows is not None and "sum policy/sampler" in rows.columns:
            log_ratio = self._of_rows(rows["sum policy/sampler"])
        else:
            log_ratio = view.log_ratio("policy/sampler")
            log_ratio = self.segments.sum(log_ratio if self.index is None else log_ratio.index_select(0, self.index))
        share = _share_here(view, self.totals)
        weight = self._whole() if share is None else self._of_rows(share)
        weight = weight.double() * self.scale
        square = (ratio(log_ratio).double() - 1).square() * weight
        values: dict[str, Measure] = {"sequence_chi_square": Metric(float(square.sum()), float(weight.sum()))}
        if self.ages is None:
            return values
        age = self.segments.max(self.staleness)
        refused = torch.zeros_like(weight) if rejected is None else self._of_rows(rejected).double()
        length = self.segments.count().double() * self.scale
        columns = torch.stack([square, weight, refused * weight, length, refused * length])
        member = age[:, None] == torch.tensor(self.ages, device=age.device)
        for each, sums in zip(self.ages, (columns @ member.double()).T.tolist(), strict=True):
            end = f"/staleness={each}"
            values |= {
                f"sequence_chi_square{end}": Metric(sums[0], sums[1]),
                f"opsm_rejected_sequences{end}": Metric(sums[2], sums[1]),
                f"opsm_rejected_tokens{end}": Metric(sums[4], sums[3]),
            }
        return values

    def _whole(self) -> Tensor:
        """1 for the sequences that lie in the sample from end to end, as far as their neighbours tell."""
        whole = torch.ones(len(self.segments), device=self.segments.ids.device)
        if self.index is not None:
            ends = self.index.view(WINDOWS, -1)[:, [0, -1]].flatten()
            cut = torch.isin(self.segments.ids, self.view.take(self.view.batch.sequence, ends))
            whole[cut] = 0.0
        return whole


def _count_by(codes: Tensor, edges: list[int]) -> Tensor:
    """[parts, BINS]: how often each bin occurs between one edge and the next."""
    parts = len(edges) - 1
    if parts > 1:
        sizes = torch.tensor(edges, device=codes.device).diff()
        first = torch.arange(parts, device=codes.device) * BINS
        codes = codes + first.repeat_interleave(sizes, output_size=len(codes))
    return torch.bincount(codes, minlength=parts * BINS).view(parts, BINS).cpu()


def _windows(view: View, totals: Totals) -> Tensor | None:
    """The sample: the view's part of `metric_tokens`, as a few evenly spaced stretches of neighbouring tokens."""
    wanted = view.composition.metric_tokens
    length = -(-wanted * len(view) // max(totals.members * WINDOWS, 1))
    if wanted == 0 or totals.members <= wanted or length * WINDOWS >= len(view):
        return None
    device = view.advantages.device
    starts = torch.linspace(0, len(view) - length, WINDOWS, dtype=torch.float64, device=device).long()
    return (starts[:, None] + torch.arange(length, device=device)).flatten()


def _sample_size(excess: float, squared: float) -> float:
    """(sum r)^2 / (n * sum r^2), from the means of r - 1 and (r - 1)^2."""
    return (1 + excess) ** 2 / (1 + 2 * excess + squared)


def _perplexity(logprob: float) -> float:
    return math.exp(min(-logprob, 700.0))


def _correlation(p: float, q: float, pp: float, qq: float, pq: float) -> float:
    spread = max(pp - p * p, 0.0) * max(qq - q * q, 0.0)
    return (pq - p * q) / math.sqrt(spread) if spread > 0 else math.nan
