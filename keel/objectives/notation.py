"""The notation of formulas: the symbols of each pair of policies, and the meaning of every symbol.

A symbol has the same meaning in every formula, sentence and page. Symbols that depend on the composition (a temperature
by the sign of the advantage, the ratio of a sequence) are defined in `keel.objectives.describe`.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class Symbol(NamedTuple):
    """One entry of a legend. `definition` is written in other symbols and is empty for inputs and functions."""

    name: str
    definition: str
    meaning: str


class RatioNotation(NamedTuple):
    """The symbols of a log-ratio between two policies, `over` and `under`."""

    ratio: str
    log_ratio: str
    over: str
    under: str
    reverse: str


RATIO_NOTATIONS = {
    "policy/sampler": RatioNotation("r", "d", "p", "q", "b - l"),
    "policy/proximal": RatioNotation("r_o", "d_o", "p", "u", "o - l"),
    "proximal/sampler": RatioNotation("w", "c", "u", "q", "b - o"),
    "policy/reference": RatioNotation("r_f", "x", "p", "v", "f - l"),
}

SIGNS = ("positive", "negative")

COMMON_SYMBOLS = (
    Symbol("keep", "", "1 where every gate keeps the token, else 0; decided without gradient"),
    Symbol("A", "", "advantage, never carries a gradient"),
    Symbol("r", "exp(d)", "ratio against the sampler"),
    Symbol("r_o", "exp(d_o)", "ratio against the proximal policy"),
    Symbol("w", "exp(c)", "ratio of the proximal policy against the sampler"),
    Symbol("d", "l - b", "log-ratio against the sampler"),
    Symbol("d_o", "l - o", "log-ratio against the proximal policy"),
    Symbol("c", "o - b", "log-ratio of the proximal policy against the sampler"),
    Symbol("x", "l - f", "log-ratio against the reference"),
    Symbol("p", "exp(l)", "probability of the drawn token under the policy"),
    Symbol("q", "exp(b)", "probability of the drawn token under the sampler"),
    Symbol("u", "exp(o)", "probability of the drawn token under the proximal policy"),
    Symbol("l", "", "log-prob under the policy being trained, carries the gradient"),
    Symbol("b", "", "log-prob recorded by the sampler when the token was drawn"),
    Symbol("o", "", "log-prob under the proximal policy, the one at the start of the step; without gradient"),
    Symbol("f", "", "log-prob under the frozen reference"),
    Symbol("h", "", "log-prob under the teacher"),
    Symbol("N", "", "trainable tokens of the whole step, dropped ones included"),
    Symbol("N_k", "", "kept tokens of the whole step"),
    Symbol("S", "", "sequences of the step with a trainable token"),
    Symbol("S_k", "", "sequences of the step with a kept token"),
    Symbol("n", "", "trainable tokens of the token's own sequence"),
    Symbol("n_k", "", "kept tokens of the token's own sequence"),
    Symbol("mean", "", "mean over the trainable tokens of the token's sequence"),
    Symbol("mean_kept", "", "mean over the kept tokens of the token's sequence"),
    Symbol("mean_step", "", "mean over the trainable tokens of the step"),
    Symbol("prod", "", "product over the trainable tokens of the token's sequence"),
    Symbol("gmean", "", "geometric mean over the trainable tokens of the token's sequence"),
    Symbol("KLb", "", "KLb(s, e) = s*log(s/e) + (1 - s)*log((1 - s)/(1 - e)), KL of (drawn token, any other)"),
    Symbol("sg", "", "stop-gradient: its argument is treated as a constant"),
)
"""In the order of legends."""

FUNCTIONS = {"mean", "mean_kept", "mean_step", "prod", "gmean", "KLb", "sg"}
"""Symbols that count only when followed by an argument, because "mean" also occurs as an English word."""


def symbols_used_in(text: str, known: Mapping[str, Symbol]) -> tuple[Symbol, ...]:
    """Return the symbols used in a text and, transitively, in their definitions. Symbols not in `COMMON_SYMBOLS`
    first."""
    used: set[str] = set()
    unread = {text}
    while unread:
        tokens = {match for part in unread for match in re.findall(r"([A-Za-z]\w*'?)(\()?", part)}
        symbols = {token for token, bracket in tokens if token in known and (bracket or token not in FUNCTIONS)}
        unread = {known[name].definition for name in symbols - used}
        used |= symbols
    order = {symbol.name: index for index, symbol in enumerate(COMMON_SYMBOLS)}
    selected = [symbol for name, symbol in known.items() if name in used]
    return tuple(sorted(selected, key=lambda symbol: order.get(symbol.name, -1)))
