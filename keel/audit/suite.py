"""The audit: every question, asked of batches from small to large until one breaks, and the smallest such batch.

The classes are those of the real silent failures in docs/objectives.md. Two of them, h and i, live outside a loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from keel.audit import layout, scale, tokens
from keel.audit.asking import Question
from keel.audit.options import dead_option
from keel.audit.probes import Token, build, random_batches
from keel.audit.region import dropped_as_declared
from keel.audit.shrink import shrink
from keel.audit.target import Target, TargetError, find_target
from keel.signal import TokenBatch

CLASSES = {
    "a": "masking by multiplication",
    "b": "grouping by position",
    "c": "rejected rows still vote",
    "d": "sequence decision at token scope",
    "e": "wrong old policy",
    "f": "numerator and denominator disagree",
    "g": "option accepted, not wired",
    "h": "sampler's distribution is not the trainer's",
    "i": "stale weights served",
    "j": "layout changes the number",
}
OUTSIDE = {"h": "about log-probs, not a loss", "i": "about weights, not a loss"}

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "a": (tokens.junk_is_never_read, tokens.extremes_are_finite, tokens.unusable_is_dropped),
    "b": (layout.order_means_nothing, layout.labels_mean_nothing, layout.groups_keep_to_themselves),
    "c": (
        tokens.empty_rows_have_no_vote,
        tokens.rejected_rows_have_no_vote,
        tokens.dropped_tokens_leave,
        tokens.dropped_tokens_still_pay,
    ),
    "d": (tokens.sequences_share_one_fate,),
    "e": (scale.anchor_is_as_declared,),
    "f": (scale.divisor_is_as_declared, scale.dropped_tokens_count_as_declared, scale.every_term_divides),
    "j": (layout.filler_changes_nothing, layout.micro_batches_add_up),
}
WHOLE: dict[str, tuple[Callable[[Target], str | None], ...]] = {
    "e": (scale.follows_its_anchor, scale.somebody_is_dropped),
    "f": (dropped_as_declared,),
    "g": (dead_option,),
}


@dataclass(frozen=True)
class Finding:
    """One class of failure: held, broken, or not a matter of a loss."""

    letter: str
    status: str
    """"held", "broken" or "outside"."""
    message: str = ""
    batch: TokenBatch | None = None
    """The smallest counterexample found."""

    @property
    def title(self) -> str:
        return CLASSES[self.letter]


@dataclass(frozen=True)
class Report:
    """What the audit found about one target."""

    target: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """The letters of the classes that broke."""
        return [finding.letter for finding in self.findings if finding.status == "broken"]

    @property
    def held(self) -> bool:
        return not self.broken


def audit(what: Any, /, *, seed: int = 0, parameters: dict[str, Any] | None = None, **word: Any) -> Report:
    """Audit a recipe's name, `module:function`, a TOML file, a function, an objective or a composition.

    `word` overrides fields of the target's declaration: anchor, decisions, leaves, divisor, signal.
    """
    target = _fit(find_target(what, parameters, **word))
    misfit = _misfit(target, seed)
    report = Report(target.name)
    for letter in CLASSES:
        # a rule that needs a certain shape counts by position: said once, where it belongs
        report.findings.append(misfit if misfit and letter == "b" else _class(target, letter, seed, fussy=bool(misfit)))
    return report


def _fit(target: Target) -> Target:
    """The target as it can be called: on one of several ordinary batches, in float64 or else in float32."""
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        for size in (1, 2, 3, 4, 8, 16):
            batch = build(target.declaration, [[Token(0.01 * place) for place in range(size)]])
            candidate = replace(target, dtype=dtype)
            try:
                return replace(candidate, exact=candidate.precision(batch) == torch.float64)
            except TargetError:
                raise
            except Exception as error:  # noqa: BLE001 - a target is anybody's code
                failure = failure or error
    assert failure is not None
    raise TargetError(f"{target.name} cannot be called: {type(failure).__name__}: {failure}") from failure


def _misfit(target: Target, seed: int) -> Finding | None:
    """A legal batch that cannot even be scored."""
    for batch in _batches(target, "b", seed):
        try:
            target.evaluate(batch)
        except TargetError:
            raise
        except Exception as error:  # noqa: BLE001 - a target is anybody's code
            message = f"a batch of {len(batch)} tokens cannot be scored: {type(error).__name__}: {error}"
            return Finding("b", "broken", message, batch)
    return None


def _class(target: Target, letter: str, seed: int, fussy: bool) -> Finding:
    """One class of failure. A fussy target fails on some legal shapes, and its exceptions say nothing more."""
    if letter in OUTSIDE:
        return Finding(letter, "outside", OUTSIDE[letter])
    for question in QUESTIONS.get(letter, ()):
        ask = partial(_answer, question, target, fussy)
        for batch in _batches(target, letter, seed):
            if ask(batch) is not None:
                small = shrink(batch, lambda candidate, ask=ask: ask(candidate) is not None)  # type: ignore[misc]
                return Finding(letter, "broken", ask(small) or "", small)
    for whole in WHOLE.get(letter, ()):
        message = _answer(whole, target, fussy)
        if message is not None:
            return Finding(letter, "broken", message)
    return Finding(letter, "held")


def _answer(question: Callable[..., str | None], target: Target, fussy: bool, *batch: TokenBatch) -> str | None:
    try:
        return question(target, *batch)
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001 - a target that fails on a legal batch has not held
        return None if fussy else f"{question.__name__.replace('_', ' ')}: {type(error).__name__}: {error}"


def _batches(target: Target, letter: str, seed: int) -> Iterable[TokenBatch]:
    """Well-known hard cases first, then random batches."""
    word = target.declaration
    yield build(word, [[Token(-1.0, -1.0), Token(-1.0, 0.25), Token(-1.0, -1.0)]])
    if letter == "a":  # untrainable numbers that would tip a decision about the sequence
        middle = [Token(-1.0, 5.0, False, 9.0), Token(1.0, -5.0, False, -9.0)]
        for token in middle:
            yield build(word, [[Token(-1.0, -1.0), token, Token(-1.0, -1.0)], [Token(0.01, 1.0), token]])
    if letter == "d":
        for drift in (0.05, 1.0, 3.0, 8.0, -0.05, -3.0, -8.0):
            yield build(word, [[Token(drift, 1.0), Token(drift, -0.25), Token(drift, 1.0)]])
            yield build(word, [[Token(drift, -1.0), Token(drift, 0.25), Token(drift, -1.0)]])
        yield build(word, [[Token(-3.0, -1.0), Token(0.0, 1.0), Token(0.3, -1.0)], [Token(0.0, 1.0)]])
    yield from random_batches(word, seed)
