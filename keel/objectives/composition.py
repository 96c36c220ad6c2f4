"""What an objective is made of: gates, weights, a policy term, penalties and a reduction, as data.

Each part is a small frozen table; an objective is one of each kind of list. Combinations that cannot act, or that are
known to be wrong (a sequence statistic decided token by token, k1 as a plain loss), cannot be written down.
The meaning of every field is in docs/objectives.md; `keel.signal` turns the data into arithmetic.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import OneOf, Settings, setting_error
from keel.objectives.statistics import STATISTICS, GateStatistic, Level, Scope, gate_statistic, statistic_names

LogRatio = Literal["policy/sampler", "policy/proximal", "proximal/sampler"]
"""Which log-prob minus which: l - b, l - o, or o - b."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Gate(Settings):
    """Refuses the tokens whose statistic leaves the band [low, high]; the bounds themselves are kept."""

    statistic: Annotated[str, OneOf(statistic_names)]
    """The statistic the gate looks at."""
    between: LogRatio = "policy/sampler"
    """The two policies compared."""
    level: Level = "token"
    """statistic "ratio": the ratio of the token, of the sequence, or its geometric mean."""
    low: float | None = None
    """Refuse below this value."""
    high: float | None = None
    """Refuse above this value."""
    scope: Scope = "token"
    """Who leaves together. A token statistic at scope "sequence" refuses the sequence when any of its tokens is out."""
    when: Literal["always", "positive_advantage", "negative_advantage"] = "always"
    """Which advantages the gate applies to; at sequence scope the mean advantage of the sequence decides."""

    @model_validator(mode="before")
    @classmethod
    def _default_scope(cls, data: object) -> object:
        if isinstance(data, dict) and "scope" not in data:
            name, level = data.get("statistic"), data.get("level", "token")
            spec = STATISTICS.get((name, level)) if isinstance(name, str) and isinstance(level, str) else None
            if spec is not None:  # an unknown statistic fails the validation of its own field
                return {**data, "scope": spec.scopes[0]}
        return data

    @property
    def spec(self) -> GateStatistic:
        """The entry of the table of gate statistics for `statistic` at `level`."""
        return gate_statistic(self.statistic, self.level)

    @model_validator(mode="after")
    def _check_bounds_and_scope(self) -> Self:
        if self.low is None and self.high is None:
            raise setting_error("{statistic}: a gate needs a low or a high bound", statistic=self.statistic)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise setting_error("{low} must be below {high}", low=self.low, high=self.high)
        if (self.statistic, self.level) not in STATISTICS:
            owners = " or ".join(f'"{name}"' for name, level in STATISTICS if level == self.level)
            raise setting_error(f"{{level}} cannot act: it belongs to statistic = {owners}", level=self.level)
        spec = self.spec
        if spec.in_log_space and self.low is not None and self.low < 0:
            raise setting_error("{low} must not be negative: it bounds a ratio", low=self.low)
        if spec.in_log_space and self.high is not None and self.high <= 0:
            raise setting_error("{high} must be positive: it bounds a ratio", high=self.high)
        if spec.direction == "distance" and self.low is not None:
            raise setting_error("{low} cannot act: the statistic is a distance and has only a high bound", low=self.low)
        if spec.direction == "distance" and self.high is not None and self.high < 0:
            raise setting_error("{high} must not be negative: it bounds a distance", high=self.high)
        if self.scope not in spec.scopes:
            owner = spec.scopes[0]
            raise setting_error(
                f"{{scope}}: this statistic belongs to the {owner} and decides for it", scope=self.scope
            )
        if self.scope == "step" and self.when != "always":
            raise setting_error("{when}: a gate over the step applies to every advantage", when=self.when)
        return self


class ImportanceWeight(Settings):
    """A factor without gradient on the policy term: an importance ratio, clamped, or shaped by a kernel."""

    between: LogRatio = "policy/sampler"
    """The two policies compared."""
    level: Level = "token"
    """Ratio of the token, product or geometric mean over its sequence."""
    low: NonNegative | None = None
    """Smaller weights are raised to this value."""
    high: Positive | None = None
    """Larger weights are lowered to this value."""
    kernel: Literal["ratio", "gamma"] = "ratio"
    """"gamma": ratio^k * exp(rate * (1 - ratio)), with its own k and rate for each sign of the advantage (VESPO)."""
    k_positive: Positive | None = None
    """gamma: power where the advantage is positive."""
    rate_positive: NonNegative | None = None
    """gamma: decay where the advantage is positive."""
    k_negative: Positive | None = None
    """gamma: power elsewhere."""
    rate_negative: NonNegative | None = None
    """gamma: decay elsewhere."""

    @model_validator(mode="after")
    def _check_kernel(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise setting_error("{low} must be below {high}", low=self.low, high=self.high)
        shape = (self.k_positive, self.rate_positive, self.k_negative, self.rate_negative)
        if self.kernel == "gamma" and None in shape:
            raise setting_error(
                "{kernel} needs k_positive, rate_positive, k_negative and rate_negative", kernel=self.kernel
            )
        if self.kernel == "ratio" and any(value is not None for value in shape):
            raise setting_error(
                "{kernel} has no k_positive, rate_positive, k_negative or rate_negative", kernel=self.kernel
            )
        return self


class PolicyTerm(Settings):
    """The term that carries the advantage: a surrogate of the ratio against an anchor."""

    surrogate: Literal["linear", "clip", "soft", "log_prob", "cross_entropy"] = "linear"
    """-A*r; its PPO clip; SAPO's sigmoid of it; -A*l; or -l without any advantage."""
    anchor: Literal["sampler", "proximal", "none"] = "sampler"
    """The policy that the ratio is measured against."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the geometric mean over its sequence (with the sequence's mean advantage)."""
    eps: NonNegative | None = None
    """clip: the ratio's band is [1 - eps, 1 + eps_high]."""
    eps_high: NonNegative | None = None
    """clip: the upper half of the band; equal to eps when not given."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """clip: the loss of a token with negative advantage is at most dual_clip * |A|."""
    tau_positive: Positive | None = None
    """soft: temperature where A > 0."""
    tau_negative: Positive | None = None
    """soft: temperature where A <= 0."""
    token_clip: Positive | None = None
    """level "sequence": each token's log-ratio is clipped to this size, on the side its advantage pushes to (GMPO)."""

    @model_validator(mode="after")
    def _check_surrogate(self) -> Self:
        belongs = {
            "eps": "clip",
            "eps_high": "clip",
            "dual_clip": "clip",
            "tau_positive": "soft",
            "tau_negative": "soft",
        }
        for field, surrogate in belongs.items():
            if getattr(self, field) is not None and self.surrogate != surrogate:
                raise setting_error(
                    f'{{{field}}} cannot act: it belongs to surrogate = "{surrogate}"', **{field: getattr(self, field)}
                )
        if self.surrogate == "clip" and self.eps is None:
            raise setting_error("{surrogate} needs eps", surrogate=self.surrogate)
        if self.surrogate == "soft" and (self.tau_positive is None or self.tau_negative is None):
            raise setting_error("{surrogate} needs tau_positive and tau_negative", surrogate=self.surrogate)
        if (self.anchor == "none") != (self.surrogate in ("log_prob", "cross_entropy")):
            raise setting_error("{anchor} does not fit {surrogate}", anchor=self.anchor, surrogate=self.surrogate)
        if self.level == "sequence" and self.anchor == "none":
            raise setting_error(
                "{level} needs a ratio, and {surrogate} has none", level=self.level, surrogate=self.surrogate
            )
        if self.token_clip is not None and self.level != "sequence":
            raise setting_error('{token_clip} cannot act: it belongs to level = "sequence"', token_clip=self.token_clip)
        return self


class Penalty(Settings):
    """A term that does not look at the advantage: coef times a measure of drift."""

    estimator: Literal["log_ratio_squared", "k1", "k2", "k3"]
    """d^2, or the KL estimators k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1, with x = l - f."""
    between: Literal["policy/sampler", "policy/proximal", "policy/reference"] = "policy/reference"
    """The two policies compared; log_ratio_squared: policy/sampler when not given."""
    coef: float
    """Factor on the measure."""
    scope: Literal["kept", "all"] = "kept"
    """Whether a token refused by a gate still pays it."""
    ratio_correction: bool = False
    """Multiply the estimator by the ratio r, which carries a gradient too."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_policies(cls, data: object) -> object:
        if isinstance(data, dict) and "between" not in data and data.get("estimator") == "log_ratio_squared":
            return {**data, "between": "policy/sampler"}
        return data

    @model_validator(mode="after")
    def _check_ratio_correction(self) -> Self:
        if self.estimator == "k1" and not self.ratio_correction:
            raise setting_error(
                "{estimator} cannot go with {ratio_correction}: the gradient would not contain the reference",
                estimator=self.estimator,
                ratio_correction=self.ratio_correction,
            )
        if self.estimator == "log_ratio_squared" and self.ratio_correction:
            raise setting_error("{ratio_correction} cannot act: it belongs to k1, k2 and k3", ratio_correction=True)
        return self


class Reduction(Settings):
    """What divides."""

    over: Literal["tokens", "sequences", "constant"] = "tokens"
    """Mean over the step's tokens; mean of the sequences' token means; or sum / (sequences * length)."""
    denominator: Literal["trainable", "kept"] = "trainable"
    """Whether the tokens that a gate refused still count."""
    length: Positive | None = None
    """over "constant": the constant length that divides each sequence."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.over == "constant" and self.length is None:
            raise setting_error("{over} needs length", over=self.over)
        if self.over != "constant" and self.length is not None:
            raise setting_error('{length} cannot act: it belongs to over = "constant"', length=self.length)
        return self


class AdvantageTransforms(Settings):
    """What composes with every objective, whatever its parts."""

    adv_tau: float = 1.0
    """Factor on the advantage."""
    teacher_tau: NonNegative = 0.0
    """Adds teacher_tau * (h - l), without gradient, to the advantage; needs teacher log-probs."""
    kl_penalty_coef: NonNegative = 0.0
    """Adds kl_penalty_coef * (mean(k) - k) to the advantage, k the drift from the reference, centred over the step."""
    kl_penalty_source: Literal["policy", "sampled"] = "policy"
    """k = l - f, or k = b - f, which needs no log-probs of the policy before the step."""
    proximal: Literal["recorded", "interpolated"] = "recorded"
    """Where o comes from: the batch, or b + (1 - 1/staleness) * (l - b) without gradient (2512.06547)."""
    roles: list[int] | None = None
    """Only trainable tokens with one of these role ids belong to the objective; not given: all."""
    max_invalid_logprob_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """A step is refused when more than this share of its trainable tokens has no usable sampler log-prob."""
    metrics_sample_size: Annotated[int, Field(ge=0)] = 8192
    """Above this many tokens a step, distributions and what is split by staleness come from evenly spaced stretches of
    about as many; counts of kept and dropped tokens are always exact. 0: never sample."""

    @model_validator(mode="after")
    def _check_kl_penalty_source(self) -> Self:
        if self.kl_penalty_source != "policy" and self.kl_penalty_coef == 0:
            raise setting_error(
                "{kl_penalty_source} cannot act while kl_penalty_coef = 0", kl_penalty_source=self.kl_penalty_source
            )
        return self


class Composition(AdvantageTransforms):
    """A whole objective."""

    gates: list[Gate] = []
    weights: list[ImportanceWeight] = []
    policy: PolicyTerm = PolicyTerm()
    penalties: list[Penalty] = []
    reduction: Reduction = Reduction()

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.policy.surrogate == "cross_entropy":
            for field in ("teacher_tau", "kl_penalty_coef"):
                if getattr(self, field):
                    raise setting_error(
                        f"{{{field}}} cannot act: cross_entropy has no advantage", **{field: getattr(self, field)}
                    )
            if self.adv_tau != 1:
                raise setting_error("{adv_tau} cannot act: cross_entropy has no advantage", adv_tau=self.adv_tau)
            if self.weights:
                raise setting_error("{weights}: cross_entropy takes no weights", weights=len(self.weights))
        if self.reduction.denominator == "kept" and not self.gates and not self.reads("sampler"):
            raise setting_error("{denominator} cannot act: nothing here drops a token", denominator="kept")
        if self.policy.level == "sequence" and any(weight.level == "token" for weight in self.weights):
            raise setting_error(
                "{level}: a sequence-level policy term takes no token-level weights", level=self.policy.level
            )
        if self.proximal == "interpolated" and not self.reads("proximal"):
            raise setting_error("{proximal} cannot act: nothing here uses the proximal policy", proximal=self.proximal)
        return self

    def reads(self, source: Literal["sampler", "proximal", "reference", "teacher"]) -> bool:
        """Whether a batch must bring these log-probs.

        Every term with an advantage needs the sampler's, even when it takes no ratio: a token without one is never
        read as on-policy.
        """
        if source == "reference":
            return self.kl_penalty_coef > 0 or any(penalty.between == "policy/reference" for penalty in self.penalties)
        if source == "teacher":
            return self.teacher_tau > 0
        pairs = [gate.between for gate in self.gates] + [weight.between for weight in self.weights]
        pairs += [penalty.between for penalty in self.penalties if penalty.between != "policy/reference"]
        if source == "proximal":
            return self.policy.anchor == "proximal" or any("proximal" in pair for pair in pairs)
        corrected = any(penalty.ratio_correction for penalty in self.penalties)
        return self.policy.surrogate != "cross_entropy" or corrected or any("sampler" in pair for pair in pairs)

    @property
    def token_local(self) -> bool:
        """Whether each token's gradient, up to one step-wide factor, follows from that token alone."""
        return (
            all(gate.scope == "token" for gate in self.gates)
            and all(weight.level == "token" for weight in self.weights)
            and self.policy.level == "token"
            and self.reduction.over != "sequences"
            and (self.kl_penalty_coef == 0 or self.kl_penalty_source == "sampled")
        )
