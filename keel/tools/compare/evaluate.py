"""Evaluate every objective on every step, with one call on all tokens of the step.

An objective that needs data that was not recorded (a reference, a teacher, the proximal policy, versions) is excluded
with the reason, and the others continue. Gradients are with respect to the recorded log-probs, exact and without a
backward pass.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.errors import BatchError, InvalidSignalError, KeelError
from keel.signal import Metric, ObjectiveResult, TokenBatch
from keel.signal.active_tokens import ratio
from keel.signal.gates import FIRST_GATE, INVALID_LOGPROB, OTHER_ROLE, TRAINED
from keel.tools.compare.accumulators import Array, ObjectiveCounts, ObjectivePairs, cosine_of
from keel.tools.compare.candidates import Candidate
from keel.tools.compare.schema import COLUMNS, RecordedStep

_BLOCK_TOKENS = 65536
"""Number of tokens whose gradients are multiplied at a time, in float64."""


class StepPoint(NamedTuple):
    """One objective at one step, a point of each curve."""

    step: int
    objective: str
    tokens: int
    dropped: int
    loss: float
    gradient_norm: float
    cosine: float
    """Cosine with the gradient of the first objective."""


@dataclass(frozen=True, eq=False)
class StepComparison:
    """The results of one step: counts of each objective that was evaluated, and of their pairs."""

    step: RecordedStep
    names: list[str]
    counts: list[ObjectiveCounts]
    pairs: ObjectivePairs
    gradients: list[Tensor]


class Comparison:
    """Compares objectives over the steps that are added."""

    def __init__(self, candidates: Sequence[Candidate], *, proximal_is_policy: bool = False) -> None:
        self.candidates = list(candidates)
        self.proximal_is_policy = proximal_is_policy
        self.failures: dict[str, str] = {}
        """Objectives that could not be evaluated, with the reason."""
        self.counts = {candidate.name: ObjectiveCounts() for candidate in candidates}
        self.pairs = ObjectivePairs.zeros(len(candidates))
        self.points: list[StepPoint] = []
        self.steps: list[int] = []
        self.groups = 0
        self.sequences = 0
        self.token_counts: dict[str, Counter[str]] = {}
        """Number of trainable tokens by position, staleness, advantage and text."""

    def add(self, step: RecordedStep) -> StepComparison:
        """Evaluate every objective on one more step. Raises an error if none can be evaluated."""
        batch = step.batch
        if self.proximal_is_policy and batch.proximal_logprobs is None:
            batch = batch.replace(proximal_logprobs=batch.logprobs)
        results = {}
        for candidate in self.candidates:
            if candidate.name not in self.failures:
                try:
                    results[candidate.name] = _evaluate(candidate, batch)
                except KeelError as error:
                    self._mark_failed(candidate.name, f"step {step.number}: {error}")
        if not results:
            raise KeelError("\n".join(f"{name} cannot be evaluated: {why}" for name, why in self.failures.items()))
        comparison = _compare_results(step, results)
        self._accumulate(comparison)
        return comparison

    def _mark_failed(self, name: str, reason: str) -> None:
        if self.names[0] == name:
            # cosines so far were with this objective, and another one is now the first
            self.points = [point._replace(cosine=math.nan) for point in self.points]
        self.failures[name] = reason

    @property
    def names(self) -> list[str]:
        """The objectives that were evaluated on every step."""
        return [candidate.name for candidate in self.candidates if candidate.name not in self.failures]

    def evaluated_indices(self) -> list[int]:
        """The indices of `names` in the matrices of pairs."""
        return [index for index, candidate in enumerate(self.candidates) if candidate.name not in self.failures]

    def _accumulate(self, comparison: StepComparison) -> None:
        step = comparison.step
        self.steps.append(step.number)
        self.sequences += len(torch.unique(step.batch.sequence))
        self.groups += 0 if step.batch.group is None else len(torch.unique(step.batch.group))
        for kind, labels in step.token_labels.items():
            self.token_counts.setdefault(kind, Counter()).update(labels.count())
        indices = np.ix_(self.evaluated_indices(), self.evaluated_indices())
        self.pairs.gram[indices] += comparison.pairs.gram
        self.pairs.both_dropped[indices] += comparison.pairs.both_dropped
        cosines = cosine_of(comparison.pairs.gram)[0].tolist()
        for name, counts, cosine in zip(comparison.names, comparison.counts, cosines, strict=True):
            self.counts[name].add(counts)
            self.points.append(
                StepPoint(step.number, name, counts.tokens, counts.dropped, counts.loss, counts.gradient_norm, cosine)
            )


def _evaluate(candidate: Candidate, batch: TokenBatch) -> ObjectiveResult:
    """Evaluate an objective on a step; a missing input is an error that names its column."""
    composition = candidate.objective.composition
    needed = {f"{model}_logprobs" for model in ("reference", "teacher") if composition.reads(model)}
    if composition.reads("proximal") and composition.proximal == "recorded":
        needed.add("proximal_logprobs")
    missing = [name for name in sorted(needed) if getattr(batch, name) is None]
    if composition.proximal == "interpolated" and batch.version is None:
        missing.append("versions")
    if composition.roles is not None and batch.role is None:
        missing.append("role")
    if missing:
        message = "; ".join(f"needs {name} ({COLUMNS[name].meaning}), which is not recorded" for name in missing)
        if "proximal_logprobs" in missing:
            message += "; --proximal policy uses the policy's log-probs instead, as a step with one update does"
        raise BatchError(message)
    result = candidate.objective(batch)
    if not bool(result.loss.isfinite()) or not bool(result.gradient.isfinite().all()):
        raise InvalidSignalError("its loss or gradient is not finite")
    return result


def _compare_results(step: RecordedStep, results: dict[str, ObjectiveResult]) -> StepComparison:
    reasons = [result.reasons.numpy() for result in results.values()]
    gradients = [result.gradient for result in results.values()]
    dropped = np.stack([codes >= FIRST_GATE for codes in reasons])
    pairs = zip(results.values(), reasons, strict=True)
    counts = [_count(step, result, codes) for result, codes in pairs]
    gram = np.zeros((len(results), len(results)))
    both_dropped = np.zeros((len(results), len(results)), np.int64)
    stacked = torch.stack(gradients).numpy()
    for start in range(0, stacked.shape[1], _BLOCK_TOKENS):
        part = stacked[:, start : start + _BLOCK_TOKENS].astype(np.float64)
        gram += part @ part.T
        dropped_part = dropped[:, start : start + _BLOCK_TOKENS].astype(np.float64)
        both_dropped += (dropped_part @ dropped_part.T).astype(np.int64)
    return StepComparison(step, list(results), counts, ObjectivePairs(gram, both_dropped), gradients)


def _count(step: RecordedStep, result: ObjectiveResult, codes: Array) -> ObjectiveCounts:
    """Return the counts of one objective at one step."""
    batch, names = step.batch, result.objective.reasons
    dropped = codes >= FIRST_GATE
    counts = np.bincount(codes, minlength=len(names))
    row = batch.sequence.numpy()
    rows = int(row.max()) + 1
    present, trained = (np.bincount(row[mask], minlength=rows) > 0 for mask in (codes != OTHER_ROLE, codes == TRAINED))
    hit = np.bincount(row[dropped], minlength=rows) > 0
    advantage = batch.advantages.double().abs().numpy() * (codes != OTHER_ROLE)
    gradient = result.gradient.double()
    assert batch.sampler_logprobs is not None
    importance = ratio((batch.logprobs - batch.sampler_logprobs).double()).numpy()[codes == TRAINED]
    importance = importance[np.isfinite(importance)]
    clipped = result.metrics.get("is_clipped")
    gate_codes = [code for code in range(FIRST_GATE, len(names)) if counts[code]]
    return ObjectiveCounts(
        steps=1,
        tokens=len(codes),
        kept=int(counts[TRAINED]),
        dropped=int(dropped.sum()),
        invalid_logprobs=int(counts[INVALID_LOGPROB]),
        other_role=int(counts[OTHER_ROLE]),
        clipped=clipped.sum if isinstance(clipped, Metric) else 0.0,
        sequences=int(present.sum()),
        sequences_dropped=int((present & ~trained).sum()),
        sequences_hit=int(hit.sum()),
        loss=float(result.loss),
        gradient_norm=float(gradient.norm()),
        gradient_sum=float(gradient.abs().sum()),
        gradient_square=float(gradient.square().sum()),
        ratio_sum=float(importance.sum()),
        ratio_square=float(np.square(importance).sum()),
        advantage_sum=float(advantage.sum()),
        advantage_dropped=float(advantage[dropped].sum()),
        terms={name: float(value) for name, value in result.terms.items()},
        gates=Counter({names[code]: int(counts[code]) for code in gate_codes}),
        gate_sequences=Counter({names[code]: len(np.unique(row[codes == code])) for code in gate_codes}),
        dropped_by={kind: labels.count(dropped) for kind, labels in step.token_labels.items()},
        dropped_positive=_dropped_positive(step, dropped),
    )


def _dropped_positive(step: RecordedStep, dropped: Array) -> Counter[str]:
    if "text" not in step.token_labels:
        return Counter()
    return step.token_labels["text"].count(dropped & (step.batch.advantages.numpy() > 0))
