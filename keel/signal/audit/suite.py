"""Run every check on batches from small to large, and reduce the first batch that fails.

The classes are the silent failures listed in docs/audit.md. Two of them, h and i, are not properties of a loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from keel.objectives import Composition
from keel.signal import Objective, TokenBatch
from keel.signal.audit import layout_checks, normalisation_checks, token_checks
from keel.signal.audit.drop_region_checks import check_drop_region
from keel.signal.audit.observe import Check
from keel.signal.audit.option_checks import check_options
from keel.signal.audit.preset_comparison import PresetComparison, find_comparison
from keel.signal.audit.probe_batches import Token, build, random_batches
from keel.signal.audit.shrink import shrink
from keel.signal.audit.target import LossError, Target, TargetError, find_target

CLASSES = {
    "a": "masked values reach the loss",
    "b": "depends on order or ids",
    "c": "dropped samples affect others",
    "d": "sequence mask applied per token",
    "e": "ratio against the wrong policy",
    "f": "wrong normalisation",
    "g": "option without effect",
    "h": "sampler and trainer distributions differ",
    "i": "sampler serves stale weights",
    "j": "depends on padding or micro-batches",
}
COMPARISON = "k"
"""The letter of the comparison with a preset."""

NOT_APPLICABLE = {"h": "concerns log-probs, not a loss", "i": "concerns weights, not a loss"}

BATCH_CHECKS: dict[str, tuple[Check, ...]] = {
    "a": (
        token_checks.check_untrainable_ignored,
        token_checks.check_extreme_ratios,
        token_checks.check_invalid_logprobs_dropped,
    ),
    "b": (
        layout_checks.check_order_invariance,
        layout_checks.check_relabelling,
        layout_checks.check_group_isolation,
    ),
    "c": (
        token_checks.check_failed_rollouts_ignored,
        token_checks.check_dropped_sequences_ignored,
        token_checks.check_dropped_tokens_have_no_gradient,
        token_checks.check_dropped_tokens_keep_penalty,
    ),
    "d": (token_checks.check_sequence_decision,),
    "e": (normalisation_checks.check_proximal_unused,),
    "f": (
        normalisation_checks.check_divisor,
        normalisation_checks.check_dropped_tokens_in_divisor,
        normalisation_checks.check_same_divisor_in_every_term,
    ),
    "j": (layout_checks.check_padding_invariance, layout_checks.check_micro_batch_sum),
}
TargetCheck = Callable[[Target], str | None]
TARGET_CHECKS: dict[str, tuple[TargetCheck, ...]] = {
    "e": (normalisation_checks.check_anchor_used, normalisation_checks.check_declared_decision_taken),
    "f": (check_drop_region,),
    "g": (check_options,),
}
"""Checks that build their own batches."""

Status = Literal["passed", "failed", "error", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one class.

    "error" means that the target raised an exception on a valid batch, or that its loss or gradient is not finite
    there, and that no check of the class failed on the other batches.
    """

    letter: str
    status: Status
    message: str = ""
    batch: TokenBatch | None = None
    """The smallest batch found on which a check fails or the target raises."""
    like: PresetComparison | None = None
    """The preset that the target was compared with, in the finding of the comparison."""

    @property
    def title(self) -> str:
        return CLASSES[self.letter] if self.like is None else f"differs from {self.like.name}"


@dataclass(frozen=True)
class Report:
    """The outcome of every class for one target."""

    target: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The letters of the classes with a failed check."""
        return self._with_status("failed")

    @property
    def errors(self) -> list[str]:
        """The letters of the classes that could not be checked: the target raised, or its result is not finite."""
        return self._with_status("error")

    @property
    def passed(self) -> bool:
        """Whether no class failed and none had an error."""
        return not self.failed and not self.errors

    def _with_status(self, status: Status) -> list[str]:
        return [finding.letter for finding in self.findings if finding.status == status]


def audit(
    source: Any,
    /,
    *,
    seed: int = 0,
    parameters: dict[str, Any] | None = None,
    like: str | Objective | Composition | None = None,
    **declared: Any,
) -> Report:
    """Audit a preset's name, `module:function`, a TOML file, a function, an objective or a composition.

    With `like`, the loss and gradient of the target are also compared with those of a preset. `parameters` are then the
    parameters of that preset, and a function without a declaration is checked against the preset's. `declared`
    overrides fields of the target's declaration: anchor, decisions, dropped_from, divisor, signal. Raises TargetError
    if the target cannot be loaded, or called on any batch, or does not return a loss.
    """
    if like is None:
        target = _choose_precision(find_target(source, parameters, **declared))
        return Report(target.name, [_audit_class(target, letter, seed) for letter in CLASSES])
    comparison = find_comparison(like, parameters)
    target = _choose_precision(find_target(source, default=comparison.declaration, **declared))
    findings = [_audit_class(target, letter, seed) for letter in CLASSES]
    return Report(target.name, [*findings, compare_with_preset(target, comparison, seed)])


def compare_with_preset(target: Target, comparison: PresetComparison, seed: int = 0) -> Finding:
    """Compare the target with a preset on random batches, and reduce the first batch on which they differ."""
    finding = _run_checks(target, COMPARISON, comparison.checks, partial(comparison.batches, seed))
    return replace(finding, like=comparison)


def _choose_precision(target: Target) -> Target:
    """Call the target on several ordinary batches until one works, in float64 or else in float32."""
    failure: LossError | None = None
    for dtype in (torch.float64, torch.float32):
        for size in (1, 2, 3, 4, 8, 16):
            batch = build(target.declaration, [[Token(0.01 * index) for index in range(size)]])
            candidate = replace(target, dtype=dtype)
            try:
                return replace(candidate, exact=candidate.precision(batch) == torch.float64)
            except LossError as error:
                failure = failure or error
    assert failure is not None
    raise TargetError(f"{target.name} cannot be called: {failure}") from failure


def _audit_class(target: Target, letter: str, seed: int) -> Finding:
    """Run the checks of a class."""
    if letter in NOT_APPLICABLE:
        return Finding(letter, "not applicable", NOT_APPLICABLE[letter])
    return _run_checks(
        target,
        letter,
        BATCH_CHECKS.get(letter, ()),
        partial(_batches, target, letter, seed),
        TARGET_CHECKS.get(letter, ()),
    )


def _run_checks(
    target: Target,
    letter: str,
    batch_checks: Iterable[Check],
    make_batches: Callable[[], Iterable[TokenBatch]],
    target_checks: Iterable[TargetCheck] = (),
) -> Finding:
    """Run checks on every batch. After an error they continue with other batches: a failure takes precedence."""
    first_error: LossError | None = None
    for check in batch_checks:
        for batch in make_batches():
            try:
                message = _run_check(check, target, batch)
            except LossError as error:
                first_error = first_error or error
                continue
            if message is not None:
                smallest = shrink(batch, partial(_fails, check, target))
                return Finding(letter, "failed", check(target, smallest) or "", smallest)
    for target_check in target_checks:
        try:
            message = target_check(target)
        except LossError as error:
            first_error = first_error or error
            continue
        if message is not None:
            return Finding(letter, "failed", message)
    if first_error is not None:
        smallest = shrink(first_error.batch, partial(_raises, type(first_error.error), target))
        return Finding(letter, "error", str(first_error), smallest)
    return Finding(letter, "passed")


def _fails(check: Check, target: Target, batch: TokenBatch) -> bool:
    try:
        return _run_check(check, target, batch) is not None
    except LossError:
        return False


def _run_check(check: Check, target: Target, batch: TokenBatch) -> str | None:
    """Run a check on a batch with a finite loss and gradient; NaN is equal to nothing and would fail every check."""
    target.evaluate_finite(batch)
    return check(target, batch)


def _raises(kind: type[Exception], target: Target, batch: TokenBatch) -> bool:
    try:
        target.evaluate_finite(batch)
    except LossError as error:
        return type(error.error) is kind
    return False


def _batches(target: Target, letter: str, seed: int) -> Iterable[TokenBatch]:
    """Yield batches that are known to reveal failures of the class, then random ones."""
    declaration = target.declaration
    yield build(declaration, [[Token(-1.0, -1.0), Token(-1.0, 0.25), Token(-1.0, -1.0)]])
    if letter == "a":  # untrainable values that would change a sequence-level decision
        for untrainable in (Token(-1.0, 5.0, False, 9.0), Token(1.0, -5.0, False, -9.0)):
            first = [Token(-1.0, -1.0), untrainable, Token(-1.0, -1.0)]
            yield build(declaration, [first, [Token(0.01, 1.0), untrainable]])
    if letter == "d":
        for drift in (0.05, 1.0, 3.0, 8.0, -0.05, -3.0, -8.0):
            yield build(declaration, [[Token(drift, 1.0), Token(drift, -0.25), Token(drift, 1.0)]])
            yield build(declaration, [[Token(drift, -1.0), Token(drift, 0.25), Token(drift, -1.0)]])
        yield build(declaration, [[Token(-3.0, -1.0), Token(0.0, 1.0), Token(0.3, -1.0)], [Token(0.0, 1.0)]])
    yield from random_batches(declaration, seed)
