"""Compare a loss with a preset: on random batches both must have the same loss and the same gradient.

The other checks know only the declared properties of a loss. A clipped surrogate whose min and max are swapped has all
of them; it differs from its preset wherever a token is clipped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keel.objectives import Composition
from keel.signal import Objective, ObjectiveResult, TokenBatch
from keel.signal.audit.declaration import Declaration, declaration_of
from keel.signal.audit.observe import Check
from keel.signal.audit.probe_batches import SIZES, build, random_batches, random_sequences
from keel.signal.audit.target import Target, TargetError, load_objective

ROUNDS = 6
"""Number of random batches of each size."""

MAGNITUDES = [math.exp(-4 + 5.1 * index / 119) for index in range(120)]
"""Log-ratios from 0.018 to 3.0. Their density makes a threshold that differs by a tenth visible."""

FIELDS = {"proximal": "proximal_logprobs", "reference": "reference_logprobs", "teacher": "teacher_logprobs"}


@dataclass(frozen=True, eq=False)
class PresetComparison:
    """A preset that a target is compared with."""

    name: str
    objective: Objective

    @property
    def declaration(self) -> Declaration:
        """The declaration that follows from the preset."""
        return declaration_of(self.objective.composition)

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """The optional log-probs that the preset reads."""
        return tuple(field for source, field in FIELDS.items() if self.objective.composition.reads(source))  # type: ignore[arg-type]

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks in order: a gradient that differs tells more about the cause than a loss that differs."""
        return self.check_gradient, self.check_loss

    def batches(self, seed: int) -> Iterator[TokenBatch]:
        """Yield random batches from small to large: those of the other checks, then some with log-ratios that cover the
        range of thresholds densely."""
        yield from random_batches(self.declaration, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        drifts = [sign * magnitude for magnitude in MAGNITUDES for sign in (1, -1)]
        for sizes in SIZES:
            groups = [number // 2 for number in range(len(sizes))]
            for _ in range(ROUNDS):
                yield build(self.declaration, random_sequences(generator, sizes, drifts), groups)

    def check_gradient(self, target: Target, batch: TokenBatch) -> str | None:
        """Check that every token has the gradient that it has in the preset."""
        result = self.objective(batch)
        actual, expected = target.evaluate(batch).gradient, result.gradient
        difference = (actual - expected).abs()
        if float(difference.max()) <= _tolerance(target, result):
            return None
        index = int(difference.argmax())
        values = f"{_number(actual[index])}, but {_number(expected[index])} with {self.name}"
        return f"the gradient of token {index} is {values}"

    def check_loss(self, target: Target, batch: TokenBatch) -> str | None:
        """Check that the loss is that of the preset."""
        result = self.objective(batch)
        actual, expected = target.evaluate(batch).loss, float(result.loss)
        if abs(actual - expected) <= _tolerance(target, result):
            return None
        values = f"{_number(actual)}, but {_number(expected)} with {self.name}"
        return f"the loss is {values}; all gradients are equal to those of {self.name}"


def _tolerance(target: Target, expected: ObjectiveResult) -> float:
    """Return the accepted difference. It is relative to the largest value, because terms may cancel, and a loss in
    float64 may contain constants in float32."""
    largest = max(float(expected.gradient.abs().max()), abs(float(expected.loss)), 1e-9)
    return (1e-6 if target.exact else 1e-4) * largest


def _number(value: float | Tensor) -> str:
    return f"{float(value) + 0.0:.6g}"  # adding 0 turns -0 into 0


def find_comparison(
    source: str | Objective | Composition, parameters: dict[str, Any] | None = None
) -> PresetComparison:
    """Make a comparison with a preset's name and parameters, a TOML file, an objective or a composition."""
    if isinstance(source, str) and ":" in source:
        raise TargetError(f'like = "{source}" must be a preset or a TOML file with an [objective], not a function')
    objective = load_objective(source, parameters or {})
    name = objective.name or (source if isinstance(source, str) else "composition")
    return PresetComparison(name, objective)
