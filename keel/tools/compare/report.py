"""Summarise a comparison as plain numbers, from which every form of output is made.

Shares and cosines are computed here from the sums. Objectives that could not be evaluated appear with the reason only.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from keel.tools.compare.accumulators import Array, ObjectiveCounts
from keel.tools.compare.evaluate import Comparison, StepPoint
from keel.tools.compare.readers import Recording

SPLIT_KINDS = ("position", "staleness", "advantage")
"""How dropped tokens are split, in addition to their text."""


class LabelCount(NamedTuple):
    """The number of tokens with a label, and how many of them were dropped."""

    label: str
    tokens: int
    dropped: int


class TextCount(NamedTuple):
    """A token text, how often it occurs and how often it was dropped."""

    text: str
    tokens: int
    dropped: int
    dropped_positive: int
    """Dropped tokens with a positive advantage."""


class GateCount(NamedTuple):
    """Tokens and sequences dropped for one reason."""

    reason: str
    tokens: int
    sequences: int
    """Sequences with such a token."""


@dataclass(frozen=True)
class ObjectiveSummary:
    """The results of one objective."""

    objective: str
    tokens: int
    kept: int
    dropped: int
    dropped_share: float
    invalid_logprobs: int
    other_role: int
    clipped_share: float
    sequences: int
    sequences_dropped: int
    sequences_hit: int
    dropped_advantage: float
    effective_sample_size: float
    effective_gradient_tokens: float
    loss: float
    """Mean over steps, like `terms` and `gradient_norm`."""
    terms: dict[str, float]
    gradient_norm: float
    gates: list[GateCount]
    splits: dict[str, list[LabelCount]]
    texts: list[TextCount]


@dataclass(frozen=True)
class WeightGradientSummary:
    """Gradients with respect to a model's weights."""

    model: str
    steps: list[int]
    parameters: int
    logprob_difference: float
    """Mean absolute difference between the model's log-probs and the recorded ones."""
    gradient_norm: list[float]
    """By objective; root mean square over steps."""
    cosine: list[list[float]]


@dataclass(frozen=True)
class ComparisonReport:
    """The results of a comparison."""

    source: str
    steps: list[int]
    tokens: int
    sequences: int
    groups: int
    skipped: dict[str, int]
    """Number of sequences that were not evaluated, by reason."""
    failures: dict[str, str]
    objectives: list[ObjectiveSummary]
    cosine: list[list[float]]
    """Cosines of the gradients with respect to the log-probs, over all steps."""
    overlap: list[list[float]]
    """Of the tokens that the row's objective drops, the share that the column's also drops."""
    jaccard: list[list[float]]
    """Of the tokens that either drops, the share that both drop."""
    by_step: list[StepPoint]
    weights: WeightGradientSummary | None = field(default=None)

    @property
    def names(self) -> list[str]:
        return [row.objective for row in self.objectives]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data, with null for undefined numbers."""
        data = asdict(self)
        data["by_step"] = [point._asdict() for point in self.by_step]
        for row, summary in zip(data["objectives"], self.objectives, strict=True):
            row["gates"] = [gate._asdict() for gate in summary.gates]
            row["texts"] = [text._asdict() for text in summary.texts]
            row["splits"] = {kind: [count._asdict() for count in counts] for kind, counts in summary.splits.items()}
        cleaned: dict[str, Any] = replace_non_finite(data)
        return cleaned


def build_report(
    comparison: Comparison, recording: Recording, *, texts: int = 10, weights: WeightGradientSummary | None = None
) -> ComparisonReport:
    """Return the report of a comparison, with the `texts` most dropped token texts of each objective."""
    indices = np.ix_(comparison.evaluated_indices(), comparison.evaluated_indices())
    pairs = comparison.pairs
    return ComparisonReport(
        source=str(recording.path),
        steps=comparison.steps,
        tokens=comparison.token_counts.get("advantage", Counter()).total(),
        sequences=comparison.sequences,
        groups=comparison.groups,
        skipped=dict(recording.skipped),
        failures=dict(comparison.failures),
        objectives=[_objective_summary(name, comparison, texts) for name in comparison.names],
        cosine=_to_lists(pairs.cosine[indices]),
        overlap=_to_lists(pairs.overlap[indices]),
        jaccard=_to_lists(pairs.jaccard[indices]),
        by_step=[point for point in comparison.points if point.objective not in comparison.failures],
        weights=weights,
    )


def _objective_summary(name: str, comparison: Comparison, texts: int) -> ObjectiveSummary:
    counts, steps = comparison.counts[name], max(len(comparison.steps), 1)
    return ObjectiveSummary(
        objective=name,
        **{field: getattr(counts, field) for field in ("tokens", "kept", "dropped", "invalid_logprobs", "other_role")},
        dropped_share=counts.dropped_share,
        clipped_share=counts.clipped / counts.tokens if counts.tokens else math.nan,
        **{field: getattr(counts, field) for field in ("sequences", "sequences_dropped", "sequences_hit")},
        **{
            field: getattr(counts, field)
            for field in ("dropped_advantage", "effective_sample_size", "effective_gradient_tokens")
        },
        loss=counts.loss / steps,
        terms={term: value / steps for term, value in counts.terms.items()},
        gradient_norm=counts.gradient_norm / steps,
        gates=[GateCount(reason, count, counts.gate_sequences[reason]) for reason, count in counts.gates.most_common()],
        splits={
            kind: count_by_label(comparison, counts, kind) for kind in SPLIT_KINDS if kind in comparison.token_counts
        },
        texts=_most_dropped_texts(comparison, counts, texts),
    )


def count_by_label(comparison: Comparison, counts: ObjectiveCounts, kind: str) -> list[LabelCount]:
    """Return the dropped tokens by label, in the order of the labels."""
    dropped = counts.dropped_by.get(kind, Counter())
    labels = sorted(comparison.token_counts[kind], key=_label_sort_key)
    return [LabelCount(label, comparison.token_counts[kind][label], dropped[label]) for label in labels]


def _label_sort_key(label: str) -> tuple[float, str]:
    """Return a key that sorts numbers and ranges by size, and other labels after them."""
    head = label.split("-")[0] or label
    try:
        return float(head), label
    except ValueError:
        return math.inf, {"positive": "0", "negative": "1", "zero": "2"}.get(label, label)


def _most_dropped_texts(comparison: Comparison, counts: ObjectiveCounts, count: int) -> list[TextCount]:
    dropped = counts.dropped_by.get("text")
    if not dropped:
        return []
    occurrences = comparison.token_counts["text"]
    most = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [TextCount(text, occurrences[text], times, counts.dropped_positive[text]) for text, times in most]


def _to_lists(matrix: Array) -> list[list[float]]:
    rows: list[list[float]] = matrix.tolist()
    return rows


def replace_non_finite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
