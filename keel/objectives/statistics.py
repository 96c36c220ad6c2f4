"""The gate statistics: one table entry holds everything Keel knows about a statistic.

Validation, gate arithmetic, plots, descriptions, lens histograms and the audit read `STATISTICS`; none of them compares
statistic names. A new statistic is a new entry here and nothing else, and an entry cannot be incomplete: every field
without a default is required, and fields that contradict each other raise when the entry is created.

An entry states its value three times: for tensors (training), for two plain probabilities (plots and the audit) and in
SQL (the lens). The three share no code, so that a test can compare them. Tensor functions only call methods of their
arguments, because this package must not import torch at run time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from keel.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
"""The ratio of the token, the product over its sequence, or the geometric mean over its sequence."""

Scope = Literal["token", "sequence", "step"]
"""Which tokens are dropped together."""

Direction = Literal["rising", "falling", "distance"]
"""How a statistic moves as the policy's probability of the token grows.

rising: a value below the low bound means that the policy's probability is too low, above the high bound too high.
falling: the opposite.
distance: the value does not have a direction. It has only a high bound, and the sign of the log-ratio gives the side.
"""

TokenFunction = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Maps the log-ratio (over - under) and the log-probs of the policies over and under to one value per token.

It must not modify its arguments, but may return one of them.
"""

SequenceFunction = Callable[["Tensor", "Tensor"], "Tensor"]
"""Maps the sum of the token values of each sequence and its number of tokens (at least 1) to one value per sequence."""


@dataclass(frozen=True, kw_only=True)
class LensHistogram:
    """How the lens computes and draws a statistic of policy and sampler."""

    name: str
    """Identifier in the lens page, unique among the histograms."""
    title: str
    sql: str
    """DuckDB expression for the value that `GateStatistic.tensor` computes.

    For a token it reads `l` and `b`, the log-probs of policy and sampler. For a sequence it reads `d`, the sum of
    l - b, and `n`, the number of tokens, or the lists `logprobs` and `sampler_logprobs`, whose entries are null at
    tokens that do not train.
    """
    scale: float
    """Width of the linear part of the axis when no band is drawn."""
    always_shown: bool = False
    """Whether the lens shows it even if no gate of the objective bounds it."""


@dataclass(frozen=True, kw_only=True)
class GateStatistic:
    """A statistic that a gate can bound. `name` and `level` are the fields `statistic` and `level` of `Gate`."""

    name: str
    level: Level = "token"
    scopes: tuple[Scope, ...]
    """Scopes that a gate on it may have; the first is the default. At scope "step" the largest values are dropped until
    the mean of the rest is at most the high bound."""
    direction: Direction
    tensor: TokenFunction
    """Value of each token."""
    sequence: SequenceFunction | None = None
    """For a statistic of sequences: the value of a sequence, from the sum of `tensor` over its tokens."""
    in_log_space: bool = False
    """Whether `tensor` and `histogram.sql` compute the logarithm of the statistic, which keeps large ratios finite.
    Bounds and `scalar` are never logarithms."""
    scalar: Callable[[float, float], float]
    """Value for a sequence of one token with probabilities p and q in (0, 1] under the policies over and under."""
    formula: str
    """Text of the formula, a format string over the fields of `keel.objectives.notation.RatioNotation`."""
    magnitude_formula: str | None = None
    """Text of its absolute value, used when the bounds are the negatives of each other."""
    histogram: LensHistogram

    def __post_init__(self) -> None:
        if not self.scopes:
            raise ValueError(f"gate statistic {self.label!r}: scopes must not be empty")
        if self.sequence is not None and self.scopes != ("sequence",):
            raise ValueError(f'gate statistic {self.label!r}: a statistic of sequences has only the scope "sequence"')
        if "step" in self.scopes and self.direction != "distance":
            raise ValueError(f'gate statistic {self.label!r}: the scope "step" needs a distance')
        if self.direction == "distance" and self.in_log_space:
            raise ValueError(f"gate statistic {self.label!r}: a distance cannot be in log space")

    @property
    def label(self) -> str:
        """Name in messages and reason codes: "ratio", "geometric ratio"."""
        return self.name if self.level == "token" else f"{self.level} {self.name}"

    def comparable_bounds(self, low: float | None, high: float | None) -> tuple[float | None, float | None]:
        """Convert the bounds of a gate to the space of `tensor`. A low bound of 0 on a ratio becomes None."""
        if not self.in_log_space:
            return low, high
        return math.log(low) if low else None, math.log(high) if high else None


def statistic_names() -> tuple[str, ...]:
    """Return the values that `Gate.statistic` may take, in the order of the table."""
    return tuple(dict.fromkeys(name for name, _ in STATISTICS))


def gate_statistic(name: str, level: str = "token") -> GateStatistic:
    """Return the table entry of a statistic. A name or level that is not in the table raises a `ConfigError`."""
    statistic = STATISTICS.get((name, level))
    if statistic is None:
        known = ", ".join(entry.label for entry in STATISTICS.values())
        raise ConfigError(f'statistic = "{name}" at level = "{level}" is not a gate statistic; known: {known}')
    return statistic


# Token values as tensors


def log_ratio_of_token(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":  # noqa: ARG001
    return log_ratio


def _squared_log_ratio(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":  # noqa: ARG001
    return log_ratio.square()


def _probability_difference(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":  # noqa: ARG001
    return over.exp().sub_(under.exp())


def _binary_kl(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":  # noqa: ARG001
    return binary_kl(under, over)


def _signed_binary_kl(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":
    return binary_kl(under, over).mul_(log_ratio.sign())


def _symmetric_binary_kl(log_ratio: "Tensor", over: "Tensor", under: "Tensor") -> "Tensor":  # noqa: ARG001
    return binary_kl(under, over).maximum(binary_kl(over, under))


def binary_kl(start: "Tensor", end: "Tensor") -> "Tensor":
    """Return KL(start || end) of the two-outcome distributions (drawn token, any other token), from log-probs."""
    start_rest, end_rest = start.clamp(max=0).expm1_().neg_(), end.clamp(max=0).expm1_().neg_()
    rest = (start_rest * (start_rest.log() - end_rest.log())).masked_fill_(start_rest == 0, 0.0)
    return start.exp().mul_(start - end).add_(rest)


# Sequence values as tensors


def _sum(total: "Tensor", tokens: "Tensor") -> "Tensor":  # noqa: ARG001
    return total


def _mean(total: "Tensor", tokens: "Tensor") -> "Tensor":
    return total / tokens


def _negative_mean(total: "Tensor", tokens: "Tensor") -> "Tensor":
    return -total / tokens


# Values of one token, from plain probabilities


def bernoulli_kl(start: float, end: float) -> float:
    """Return KL(start || end) of (drawn token, any other token): s*log(s/e) + (1-s)*log((1-s)/(1-e)), 0*log(0) = 0."""
    divergence = start * math.log(start / end)
    if start < 1:
        divergence += math.inf if end == 1 else (1 - start) * math.log((1 - start) / (1 - end))
    return max(divergence, 0.0)


def _scalar_ratio(p: float, q: float) -> float:
    return p / q


# SQL

_REST = "greatest(1 - exp({}), 1e-300)"
_KL = "(exp({0}) * ({0} - {1}) + " + f"{_REST.format('{0}')} * (ln({_REST.format('{0}')}) - ln({_REST.format('{1}')})))"
_SAMPLER_TO_POLICY = f"greatest({_KL.format('b', 'l')}, 0)"
_POLICY_TO_SAMPLER = f"greatest({_KL.format('l', 'b')}, 0)"

_ENTRIES = (
    GateStatistic(
        name="ratio",
        scopes=("token", "sequence"),
        direction="rising",
        tensor=log_ratio_of_token,
        in_log_space=True,
        scalar=_scalar_ratio,
        formula="{ratio}",
        histogram=LensHistogram(
            name="ratio", title="ratio, policy / sampler", sql="(l - b)", scale=0.4, always_shown=True
        ),
    ),
    GateStatistic(
        name="probability_difference",
        scopes=("token", "sequence"),
        direction="rising",
        tensor=_probability_difference,
        scalar=lambda p, q: p - q,
        formula="{over} - {under}",
        magnitude_formula="|{over} - {under}|",
        histogram=LensHistogram(
            name="difference",
            title="probability, policy - sampler",
            sql="(exp(l) - exp(b))",
            scale=0.2,
            always_shown=True,
        ),
    ),
    GateStatistic(
        name="binary_kl",
        scopes=("token", "sequence"),
        direction="distance",
        tensor=_binary_kl,
        scalar=lambda p, q: bernoulli_kl(q, p),
        formula="KLb({under}, {over})",
        histogram=LensHistogram(
            name="binary_kl", title="binary KL, sampler to policy", sql=_SAMPLER_TO_POLICY, scale=0.01
        ),
    ),
    GateStatistic(
        name="signed_binary_kl",
        scopes=("token", "sequence"),
        direction="rising",
        tensor=_signed_binary_kl,
        scalar=lambda p, q: math.copysign(bernoulli_kl(q, p), p - q),
        formula="sign({log_ratio}) * KLb({under}, {over})",
        histogram=LensHistogram(
            name="signed_binary_kl",
            title="binary KL, signed",
            sql=f"({_SAMPLER_TO_POLICY} * sign(l - b))",
            scale=0.01,
        ),
    ),
    GateStatistic(
        name="symmetric_binary_kl",
        scopes=("token", "sequence"),
        direction="distance",
        tensor=_symmetric_binary_kl,
        scalar=lambda p, q: max(bernoulli_kl(q, p), bernoulli_kl(p, q)),
        formula="max(KLb({over}, {under}), KLb({under}, {over}))",
        histogram=LensHistogram(
            name="symmetric_binary_kl",
            title="binary KL, larger direction",
            sql=f"greatest({_SAMPLER_TO_POLICY}, {_POLICY_TO_SAMPLER})",
            scale=0.01,
        ),
    ),
    GateStatistic(
        name="sequence_kl",
        scopes=("sequence",),
        # mean(b - l) grows as the policy's probabilities fall
        direction="falling",
        tensor=log_ratio_of_token,
        sequence=_negative_mean,
        scalar=lambda p, q: math.log(q / p),
        formula="mean({reverse})",
        histogram=LensHistogram(
            name="sequence_kl", title="mean log-ratio of a sample, sampler / policy", sql="(-d / n)", scale=0.01
        ),
    ),
    GateStatistic(
        name="ratio",
        level="geometric",
        scopes=("sequence",),
        direction="rising",
        tensor=log_ratio_of_token,
        sequence=_mean,
        in_log_space=True,
        scalar=_scalar_ratio,
        formula="gmean({ratio})",
        histogram=LensHistogram(
            name="geometric_ratio", title="geometric mean ratio of a sample", sql="(d / n)", scale=0.02
        ),
    ),
    GateStatistic(
        name="ratio",
        level="sequence",
        scopes=("sequence",),
        direction="rising",
        tensor=log_ratio_of_token,
        sequence=_sum,
        in_log_space=True,
        scalar=_scalar_ratio,
        formula="prod({ratio})",
        histogram=LensHistogram(name="sequence_ratio", title="product of ratios of a sample", sql="d", scale=0.1),
    ),
    GateStatistic(
        name="second_moment",
        scopes=("step",),
        direction="distance",
        tensor=_squared_log_ratio,
        scalar=lambda p, q: math.log(p / q) ** 2,
        formula="{log_ratio}^2",
        histogram=LensHistogram(name="second_moment", title="squared log-ratio", sql="((l - b) * (l - b))", scale=0.01),
    ),
)

STATISTICS: dict[tuple[str, str], GateStatistic] = {(entry.name, entry.level): entry for entry in _ENTRIES}
"""Every gate statistic by `Gate.statistic` and `Gate.level`, in the order of documentation and of the lens."""
