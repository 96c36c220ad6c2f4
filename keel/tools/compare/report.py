"""A comparison as a table of plain numbers, from which every form of output is made.

Shares and cosines are formed here from the sums. Objectives that were refused are in it by name and reason only.
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
"""How dropped tokens are split, beside by text."""


class LabelCount(NamedTuple):
    """The tokens under one label, and how many of them were dropped."""

    label: str
    tokens: int
    dropped: int


class TextCount(NamedTuple):
    """A token text, how often it occurs and how often it was dropped."""

    text: str
    tokens: int
    dropped: int
    dropped_positive: int
    """Of the dropped ones, those with a positive advantage."""


class GateCount(NamedTuple):
    """What was refused for one reason."""

    reason: str
    tokens: int
    sequences: int
    """With such a token."""


@dataclass(frozen=True)
class ObjectiveSummary:
    """One objective."""

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
    """Mean over steps, as are the terms and the norm."""
    terms: dict[str, float]
    gradient_norm: float
    gates: list[GateCount]
    splits: dict[str, list[LabelCount]]
    texts: list[TextCount]


@dataclass(frozen=True)
class WeightGradientSummary:
    """The gradients with respect to a model's weights."""

    model: str
    steps: list[int]
    parameters: int
    logprob_difference: float
    """Mean absolute difference between the model's log-probs and the recorded ones."""
    gradient_norm: list[float]
    """Of each objective; root of the mean of squares over steps."""
    cosine: list[list[float]]


@dataclass(frozen=True)
class ComparisonReport:
    """The whole comparison."""

    source: str
    steps: list[int]
    tokens: int
    sequences: int
    groups: int
    skipped: dict[str, int]
    """Sequences that were not evaluated, by why."""
    failures: dict[str, str]
    objectives: list[ObjectiveSummary]
    cosine: list[list[float]]
    """Of the gradients with respect to the log-probs, over all steps."""
    overlap: list[list[float]]
    """Of the tokens that the row's objective drops, the share that the column's drops too."""
    jaccard: list[list[float]]
    """Of the tokens that either drops, the share that both drop."""
    by_step: list[StepPoint]
    weights: WeightGradientSummary | None = field(default=None)

    @property
    def names(self) -> list[str]:
        return [row.objective for row in self.objectives]

    def as_json(self) -> dict[str, Any]:
        """For machines: what is undefined is null."""
        plain = asdict(self)
        plain["by_step"] = [moment._asdict() for moment in self.by_step]
        for row, found in zip(plain["objectives"], self.objectives, strict=True):
            row["gates"] = [gate._asdict() for gate in found.gates]
            row["texts"] = [text._asdict() for text in found.texts]
            row["splits"] = {kind: [share._asdict() for share in shares] for kind, shares in found.splits.items()}
        cleaned: dict[str, Any] = replace_non_finite(plain)
        return cleaned


def build_report(
    comparison: Comparison, recording: Recording, *, texts: int = 10, weights: WeightGradientSummary | None = None
) -> ComparisonReport:
    """The numbers of a comparison; the `texts` most dropped token texts of each objective."""
    places = np.ix_(comparison.evaluated_indices(), comparison.evaluated_indices())
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
        cosine=_to_lists(pairs.cosine[places]),
        overlap=_to_lists(pairs.overlap[places]),
        jaccard=_to_lists(pairs.jaccard[places]),
        by_step=[moment for moment in comparison.points if moment.objective not in comparison.failures],
        weights=weights,
    )


def _objective_summary(name: str, comparison: Comparison, texts: int) -> ObjectiveSummary:
    tally, steps = comparison.counts[name], max(len(comparison.steps), 1)
    return ObjectiveSummary(
        objective=name,
        **{field: getattr(tally, field) for field in ("tokens", "kept", "dropped", "invalid_logprobs", "other_role")},
        dropped_share=tally.dropped_share,
        clipped_share=tally.clipped / tally.tokens if tally.tokens else math.nan,
        **{field: getattr(tally, field) for field in ("sequences", "sequences_dropped", "sequences_hit")},
        **{
            field: getattr(tally, field)
            for field in ("dropped_advantage", "effective_sample_size", "effective_gradient_tokens")
        },
        loss=tally.loss / steps,
        terms={term: value / steps for term, value in tally.terms.items()},
        gradient_norm=tally.gradient_norm / steps,
        gates=[GateCount(reason, count, tally.gate_sequences[reason]) for reason, count in tally.gates.most_common()],
        splits={
            kind: count_by_label(comparison, tally, kind) for kind in SPLIT_KINDS if kind in comparison.token_counts
        },
        texts=_most_dropped_texts(comparison, tally, texts),
    )


def count_by_label(comparison: Comparison, counts: ObjectiveCounts, kind: str) -> list[LabelCount]:
    """Dropped tokens by label, in the order of the labels."""
    dropped = counts.dropped_by.get(kind, Counter())
    labels = sorted(comparison.token_counts[kind], key=_label_sort_key)
    return [LabelCount(label, comparison.token_counts[kind][label], dropped[label]) for label in labels]


def _label_sort_key(label: str) -> tuple[float, str]:
    """Numbers and ranges by their size, and words after them: negative staleness too."""
    head = label.split("-")[0] or label
    try:
        return float(head), label
    except ValueError:
        return math.inf, {"positive": "0", "negative": "1", "zero": "2"}.get(label, label)


def _most_dropped_texts(comparison: Comparison, counts: ObjectiveCounts, count: int) -> list[TextCount]:
    dropped = counts.dropped_by.get("text")
    if not dropped:
        return []
    seen = comparison.token_counts["text"]
    most = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [TextCount(text, seen[text], times, counts.dropped_positive[text]) for text, times in most]


def _to_lists(matrix: Array) -> list[list[float]]:
    found: list[list[float]] = matrix.tolist()
    return found


def replace_non_finite(value: Any) -> Any:
    """A value that JSON can say: what is not finite is null."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
