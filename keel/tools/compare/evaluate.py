"""Every objective on every step: one call each, on the same tokens, as a whole step.

What an objective needs and the recording does not have (a reference, a teacher, the proximal policy, versions) refuses
that objective, by name and with the reason, and the others go on. Gradients are with respect to the recorded
log-probs, exact and without a backward pass.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.errors import BatchError, KeelError, SignalRefused
from keel.signal import Metric, Result, TokenBatch
from keel.signal.active_tokens import ratio
from keel.signal.gates import FIRST_GATE, OTHER_ROLE, TRAINED, UNUSABLE
from keel.tools.compare.accumulators import Array, Pairs, Tally, cosine_of
from keel.tools.compare.candidates import Candidate
from keel.tools.compare.schema import COLUMNS, Step

_BLOCK = 65536
"""Tokens whose gradients are multiplied at once, in float64."""


class Moment(NamedTuple):
    """One objective at one step: a point of a curve."""

    step: int
    objective: str
    tokens: int
    dropped: int
    loss: float
    gradient_norm: float
    cosine: float
    """With the first objective's gradient."""


@dataclass(frozen=True, eq=False)
class Compared:
    """One step: a tally for each objective that goes on, and their pairs."""

    step: Step
    names: list[str]
    tallies: list[Tally]
    pairs: Pairs
    gradients: list[Tensor]


class Comparison:
    """Objectives side by side over the steps that were added."""

    def __init__(self, candidates: Sequence[Candidate], *, proximal_is_policy: bool = False) -> None:
        self.candidates = list(candidates)
        self.proximal_is_policy = proximal_is_policy
        self.refused: dict[str, str] = {}
        """Objectives that could not be evaluated, and why."""
        self.tallies = {candidate.name: Tally() for candidate in candidates}
        self.pairs = Pairs.none(len(candidates))
        self.moments: list[Moment] = []
        self.steps: list[int] = []
        self.groups = 0
        self.sequences = 0
        self.seen: dict[str, Counter[str]] = {}
        """All trainable tokens by position, staleness, advantage and text."""

    def add(self, step: Step) -> Compared:
        """Evaluate every objective on one more step. Refused when none can be."""
        batch = step.batch
        if self.proximal_is_policy and batch.proximal_logprobs is None:
            batch = batch.replace(proximal_logprobs=batch.logprobs)
        results = {}
        for candidate in self.candidates:
            if candidate.name not in self.refused:
                try:
                    results[candidate.name] = _called(candidate, batch)
                except KeelError as error:
                    self._refuse(candidate.name, f"step {step.number}: {error}")
        if not results:
            raise KeelError("\n".join(f"{name} was refused: {why}" for name, why in self.refused.items()))
        compared = _compare(step, results)
        self._take(compared)
        return compared

    def _refuse(self, name: str, why: str) -> None:
        if self.names[0] == name:
            # what was measured against it says nothing of the objective that is now the first
            self.moments = [moment._replace(cosine=math.nan) for moment in self.moments]
        self.refused[name] = why

    @property
    def names(self) -> list[str]:
        """The objectives that were evaluated on every step."""
        return [candidate.name for candidate in self.candidates if candidate.name not in self.refused]

    def places(self) -> list[int]:
        """Where those stand in the matrices of pairs."""
        return [place for place, one in enumerate(self.candidates) if one.name not in self.refused]

    def _take(self, compared: Compared) -> None:
        step = compared.step
        self.steps.append(step.number)
        self.sequences += len(torch.unique(step.batch.sequence))
        self.groups += 0 if step.batch.group is None else len(torch.unique(step.batch.group))
        for kind, keys in step.keys.items():
            self.seen.setdefault(kind, Counter()).update(keys.count())
        places = np.ix_(self.places(), self.places())
        self.pairs.gram[places] += compared.pairs.gram
        self.pairs.common[places] += compared.pairs.common
        cosine = cosine_of(compared.pairs.gram)[0].tolist()
        for name, tally, angle in zip(compared.names, compared.tallies, cosine, strict=True):
            self.tallies[name].add(tally)
            moment = Moment(step.number, name, tally.tokens, tally.dropped, tally.loss, tally.gradient_norm, angle)
            self.moments.append(moment)


def _called(candidate: Candidate, batch: TokenBatch) -> Result:
    """The objective on the step, or the reason why not in words about columns."""
    composition = candidate.objective.composition
    needs = {f"{who}_logprobs" for who in ("reference", "teacher") if composition.reads(who)}
    if composition.reads("proximal") and composition.proximal == "recorded":
        needs.add("proximal_logprobs")
    lacking = [name for name in sorted(needs) if getattr(batch, name) is None]
    if composition.proximal == "interpolated" and batch.version is None:
        lacking.append("versions")
    if composition.roles is not None and batch.role is None:
        lacking.append("role")
    if lacking:
        words = "; ".join(f"needs {name} ({COLUMNS[name].meaning}), which is not recorded" for name in lacking)
        if "proximal_logprobs" in lacking:
            words += "; --proximal policy takes the policy itself, as a step with one update does"
        raise BatchError(words)
    result = candidate.objective(batch)
    if not bool(result.loss.isfinite()) or not bool(result.gradient.isfinite().all()):
        raise SignalRefused("its loss or gradient is not finite")
    return result


def _compare(step: Step, results: dict[str, Result]) -> Compared:
    reasons = [result.reasons.numpy() for result in results.values()]
    gradients = [result.gradient for result in results.values()]
    dropped = np.stack([codes >= FIRST_GATE for codes in reasons])
    pairs = zip(results.values(), reasons, strict=True)
    tallies = [_tally(step, result, codes) for result, codes in pairs]
    gram = np.zeros((len(results), len(results)))
    common = np.zeros((len(results), len(results)), np.int64)
    stacked = torch.stack(gradients).numpy()
    for start in range(0, stacked.shape[1], _BLOCK):
        part = stacked[:, start : start + _BLOCK].astype(np.float64)
        gram += part @ part.T
        both = dropped[:, start : start + _BLOCK].astype(np.float64)
        common += (both @ both.T).astype(np.int64)
    return Compared(step, list(results), tallies, Pairs(gram, common), gradients)


def _tally(step: Step, result: Result, codes: Array) -> Tally:
    """All that is counted of one objective at one step."""
    batch, names = step.batch, result.objective.reasons
    dropped = codes >= FIRST_GATE
    counts = np.bincount(codes, minlength=len(names))
    row = batch.sequence.numpy()
    rows = int(row.max()) + 1
    present, trained = (np.bincount(row[mask], minlength=rows) > 0 for mask in (codes != OTHER_ROLE, codes == TRAINED))
    touched = np.bincount(row[dropped], minlength=rows) > 0
    advantage = batch.advantages.double().abs().numpy() * (codes != OTHER_ROLE)
    gradient = result.gradient.double()
    assert batch.sampler_logprobs is not None
    importance = ratio((batch.logprobs - batch.sampler_logprobs).double()).numpy()[codes == TRAINED]
    importance = importance[np.isfinite(importance)]
    clipped = result.metrics.get("is_clipped")
    refused = [code for code in range(FIRST_GATE, len(names)) if counts[code]]
    return Tally(
        steps=1,
        tokens=len(codes),
        kept=int(counts[TRAINED]),
        dropped=int(dropped.sum()),
        unusable=int(counts[UNUSABLE]),
        other_role=int(counts[OTHER_ROLE]),
        clipped=clipped.sum if isinstance(clipped, Metric) else 0.0,
        sequences=int(present.sum()),
        sequences_dropped=int((present & ~trained).sum()),
        sequences_touched=int(touched.sum()),
        loss=float(result.loss),
        gradient_norm=float(gradient.norm()),
        gradient_sum=float(gradient.abs().sum()),
        gradient_square=float(gradient.square().sum()),
        ratio_sum=float(importance.sum()),
        ratio_square=float(np.square(importance).sum()),
        advantage_sum=float(advantage.sum()),
        advantage_dropped=float(advantage[dropped].sum()),
        terms={name: float(value) for name, value in result.terms.items()},
        gates=Counter({names[code]: int(counts[code]) for code in refused}),
        gate_sequences=Counter({names[code]: len(np.unique(row[codes == code])) for code in refused}),
        dropped_by={kind: keys.count(dropped) for kind, keys in step.keys.items()},
        dropped_positive=_positive(step, dropped),
    )


def _positive(step: Step, dropped: Array) -> Counter[str]:
    if "text" not in step.keys:
        return Counter()
    return step.keys["text"].count(dropped & (step.batch.advantages.numpy() > 0))
