"""A comparison as a table of plain numbers, from which every form of output is made.

Shares and cosines are formed here from the sums. Objectives that were refused are in it by name and reason only.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from keel.tools.compare.accumulators import Array, Tally
from keel.tools.compare.evaluate import Comparison, Moment
from keel.tools.compare.readers import Recording

KINDS = ("position", "staleness", "advantage")
"""How dropped tokens are split, beside by text."""


class Share(NamedTuple):
    """The tokens under one label, and how many of them were dropped."""

    label: str
    tokens: int
    dropped: int


class Text(NamedTuple):
    """A token text, how often it occurs and how often it was dropped."""

    text: str
    tokens: int
    dropped: int
    dropped_positive: int
    """Of the dropped ones, those with a positive advantage."""


class Gate(NamedTuple):
    """What was refused for one reason."""

    reason: str
    tokens: int
    sequences: int
    """With such a token."""


@dataclass(frozen=True)
class Row:
    """One objective."""

    objective: str
    tokens: int
    kept: int
    dropped: int
    dropped_share: float
    unusable: int
    other_role: int
    clipped_share: float
    sequences: int
    sequences_dropped: int
    sequences_touched: int
    dropped_advantage: float
    effective_sample_size: float
    gradient_tokens: float
    loss: float
    """Mean over steps, as are the terms and the norm."""
    terms: dict[str, float]
    gradient_norm: float
    gates: list[Gate]
    by: dict[str, list[Share]]
    texts: list[Text]


@dataclass(frozen=True)
class Weights:
    """The gradients with respect to a model's weights."""

    model: str
    steps: list[int]
    parameters: int
    difference: float
    """Mean absolute difference between the model's log-probs and the recorded ones."""
    gradient_norm: list[float]
    """Of each objective; root of the mean of squares over steps."""
    cosine: list[list[float]]


@dataclass(frozen=True)
class Report:
    """The whole comparison."""

    source: str
    steps: list[int]
    tokens: int
    sequences: int
    groups: int
    left_out: dict[str, int]
    """Sequences that were not evaluated, by why."""
    refused: dict[str, str]
    objectives: list[Row]
    cosine: list[list[float]]
    """Of the gradients with respect to the log-probs, over all steps."""
    overlap: list[list[float]]
    """Of the tokens that the row's objective drops, the share that the column's drops too."""
    jaccard: list[list[float]]
    """Of the tokens that either drops, the share that both drop."""
    by_step: list[Moment]
    weights: Weights | None = field(default=None)

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
            row["by"] = {kind: [share._asdict() for share in shares] for kind, shares in found.by.items()}
        cleaned: dict[str, Any] = finite(plain)
        return cleaned


def report_of(
    comparison: Comparison, recording: Recording, *, texts: int = 10, weights: Weights | None = None
) -> Report:
    """The numbers of a comparison; the `texts` most dropped token texts of each objective."""
    places = np.ix_(comparison.places(), comparison.places())
    pairs = comparison.pairs
    return Report(
        source=str(recording.path),
        steps=comparison.steps,
        tokens=comparison.seen.get("advantage", Counter()).total(),
        sequences=comparison.sequences,
        groups=comparison.groups,
        left_out=dict(recording.left_out),
        refused=dict(comparison.refused),
        objectives=[_row(name, comparison, texts) for name in comparison.names],
        cosine=_rows(pairs.cosine[places]),
        overlap=_rows(pairs.overlap[places]),
        jaccard=_rows(pairs.jaccard[places]),
        by_step=[moment for moment in comparison.moments if moment.objective not in comparison.refused],
        weights=weights,
    )


def _row(name: str, comparison: Comparison, texts: int) -> Row:
    tally, steps = comparison.tallies[name], max(len(comparison.steps), 1)
    return Row(
        objective=name,
        **{field: getattr(tally, field) for field in ("tokens", "kept", "dropped", "unusable", "other_role")},
        dropped_share=tally.dropped_share,
        clipped_share=tally.clipped / tally.tokens if tally.tokens else math.nan,
        **{field: getattr(tally, field) for field in ("sequences", "sequences_dropped", "sequences_touched")},
        **{field: getattr(tally, field) for field in ("dropped_advantage", "effective_sample_size", "gradient_tokens")},
        loss=tally.loss / steps,
        terms={term: value / steps for term, value in tally.terms.items()},
        gradient_norm=tally.gradient_norm / steps,
        gates=[Gate(reason, count, tally.gate_sequences[reason]) for reason, count in tally.gates.most_common()],
        by={kind: shares(comparison, tally, kind) for kind in KINDS if kind in comparison.seen},
        texts=_texts(comparison, tally, texts),
    )


def shares(comparison: Comparison, tally: Tally, kind: str) -> list[Share]:
    """Dropped tokens by label, in the order of the labels."""
    dropped = tally.dropped_by.get(kind, Counter())
    labels = sorted(comparison.seen[kind], key=_order)
    return [Share(label, comparison.seen[kind][label], dropped[label]) for label in labels]


def _order(label: str) -> tuple[float, str]:
    """Numbers and ranges by their size, and words after them: negative staleness too."""
    head = label.split("-")[0] or label
    try:
        return float(head), label
    except ValueError:
        return math.inf, {"positive": "0", "negative": "1", "zero": "2"}.get(label, label)


def _texts(comparison: Comparison, tally: Tally, count: int) -> list[Text]:
    dropped = tally.dropped_by.get("text")
    if not dropped:
        return []
    seen = comparison.seen["text"]
    most = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [Text(text, seen[text], times, tally.dropped_positive[text]) for text, times in most]


def _rows(matrix: Array) -> list[list[float]]:
    found: list[list[float]] = matrix.tolist()
    return found


def finite(value: Any) -> Any:
    """A value that JSON can say: what is not finite is null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
