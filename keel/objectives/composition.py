"""The parts of an objective as data: gates, importance weights, a policy term, penalties and a reduction.

Each part is a small frozen table. Options without effect, and combinations known to be wrong (a sequence statistic
decided token by token, k1 as a plain loss), are errors. docs/objectives.md explains every field; `keel.signal` turns
the data into tensor arithmetic.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import OneOf, Settings, setting_error
from keel.objectives.statistics import STATISTICS, GateStatistic, Level, Scope, gate_statistic, statistic_names

LogRatio = Literal["policy/sampler", "policy/proximal", "proximal/sampler"]
"""The two policies of a log-ratio: l - b, l - o or o - b."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Gate(Settings):
    """Drops the tokens whose statistic is outside the band [low, high]. A value equal to a bound is kept."""

    statistic: Annotated[str, OneOf(statistic_names)]
    """The statistic that the gate bounds."""
    between: LogRatio = "policy/sampler"
    """The two policies compared."""
    level: Level = "token"
    """For statistic "ratio": the ratio of the token, the product over its sequence, or the geometric mean over its
    sequence."""
    low: float | None = None
    """Drop below this value."""
    high: float | None = None
    """Drop above this value."""
    scope: Scope = "token"
    """Tokens that are dropped together. A token statistic at scope "sequence" drops the sequence if any of its tokens
    is outside the band."""
    when: Literal["always", "positive_advantage", "negative_advantage"] = "always"
    """Advantages that the gate applies to. At sequence scope the mean advantage of the sequence counts."""

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
            raise setting_error(f"{{level}} has no effect: it belongs to statistic = {owners}", level=self.level)
        spec = self.spec
        if spec.in_log_space and self.low is not None and self.low < 0:
            raise setting_error("{low} must not be negative: it bounds a ratio", low=self.low)
        if spec.in_log_space and self.high is not None and self.high <= 0:
            raise setting_error("{high} must be positive: it bounds a ratio", high=self.high)
        if spec.direction == "distance" and self.low is not None:
            raise setting_error(
                "{low} has no effect: the statistic is a distance and has only a high bound", low=self.low
            )
        if spec.direction == "distance" and self.high is not None and self.high < 0:
            raise setting_error("{high} must not be negative: it bounds a distance", high=self.high)
        if self.scope not in spec.scopes:
            raise setting_error(
                f'{{scope}} is not possible: this statistic needs scope = "{spec.scopes[0]}"', scope=self.scope
            )
        if self.scope == "step" and self.when != "always":
            raise setting_error('{when} is not possible: a gate with scope = "step" ignores advantages', when=self.when)
        return self


class ImportanceWeight(Settings):
    """A factor without gradient on the policy term: an importance ratio, optionally clamped or shaped by a kernel."""

    between: LogRatio = "policy/sampler"
    """The two policies compared."""
    level: Level = "token"
    """Ratio of the token, or product or geometric mean over its sequence."""
    low: NonNegative | None = None
    """Smaller weights are raised to this value."""
    high: Positive | None = None
    """Larger weights are lowered to this value."""
    kernel: Literal["ratio", "gamma"] = "ratio"
    """ratio: the ratio itself; gamma: ratio^k * exp(rate * (1 - ratio)), with a separate k and rate for each sign of
    the advantage (VESPO)."""
    k_positive: Positive | None = None
    """Power of the gamma kernel where the advantage is positive."""
    rate_positive: NonNegative | None = None
    """Decay of the gamma kernel where the advantage is positive."""
    k_negative: Positive | None = None
    """Power of the gamma kernel elsewhere."""
    rate_negative: NonNegative | None = None
    """Decay of the gamma kernel elsewhere."""

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
    """linear: -A*r; clip: its PPO clip; soft: SAPO's sigmoid of it; log_prob: -A*l; cross_entropy: -l, without an
    advantage."""
    anchor: Literal["sampler", "proximal", "none"] = "sampler"
    """The policy that the ratio is measured against."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the geometric mean over its sequence (with the sequence's mean advantage)."""
    eps: NonNegative | None = None
    """clip: the ratio is clipped to [1 - eps, 1 + eps_high]."""
    eps_high: NonNegative | None = None
    """clip: the upper half of the band. Defaults to eps."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """clip: the loss of a token with negative advantage is at most dual_clip * |A|."""
    ratio_cap: Positive | None = None
    """linear: the gradient uses at most this ratio, -A * min(r, ratio_cap). A capped token still trains."""
    tau_positive: Positive | None = None
    """soft: temperature where A > 0."""
    tau_negative: Positive | None = None
    """soft: temperature where A <= 0."""
    token_clip: Positive | None = None
    """level "sequence": each token's log-ratio is clipped at this magnitude, in the direction its advantage pushes it
    (GMPO)."""

    @model_validator(mode="after")
    def _check_surrogate(self) -> Self:
        owners = {
            "eps": "clip",
            "eps_high": "clip",
            "dual_clip": "clip",
            "ratio_cap": "linear",
            "tau_positive": "soft",
            "tau_negative": "soft",
        }
        for field, owner in owners.items():
            if getattr(self, field) is not None and self.surrogate != owner:
                raise setting_error(
                    f'{{{field}}} has no effect: it belongs to surrogate = "{owner}"', **{field: getattr(self, field)}
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
            raise setting_error(
                '{token_clip} has no effect: it belongs to level = "sequence"', token_clip=self.token_clip
            )
        return self


class Penalty(Settings):
    """A term that does not depend on the advantage: coef times an estimate of the distance between two policies."""

    estimator: Literal["log_ratio_squared", "k1", "k2", "k3"]
    """log_ratio_squared: d^2; or one of the KL estimators k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1, with x = l -
    f."""
    between: Literal["policy/sampler", "policy/proximal", "policy/reference"] = "policy/reference"
    """The two policies compared. log_ratio_squared defaults to policy/sampler."""
    coef: float
    """Factor on the estimate."""
    scope: Literal["kept", "all"] = "kept"
    """kept: dropped tokens have no penalty; all: dropped tokens keep theirs."""
    ratio_correction: bool = False
    """Multiply the estimator by the ratio r, whose gradient is included."""

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
                "{estimator} cannot be combined with {ratio_correction}: the gradient would not contain the reference",
                estimator=self.estimator,
                ratio_correction=self.ratio_correction,
            )
        if self.estimator == "log_ratio_squared" and self.ratio_correction:
            raise setting_error("{ratio_correction} has no effect: it belongs to k1, k2 and k3", ratio_correction=True)
        return self


class Reduction(Settings):
    """The divisor of the sum over the step's tokens."""

    over: Literal["tokens", "sequences", "constant"] = "tokens"
    """tokens: mean over the step's tokens; sequences: mean of the sequences' token means; constant: sum / (sequences *
    length)."""
    denominator: Literal["trainable", "kept"] = "trainable"
    """Tokens that count in the divisor: all trainable tokens, or only those that no gate dropped."""
    length: Positive | None = None
    """over "constant": the constant length that each sequence is divided by."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.over == "constant" and self.length is None:
            raise setting_error("{over} needs length", over=self.over)
        if self.over != "constant" and self.length is not None:
            raise setting_error('{length} has no effect: it belongs to over = "constant"', length=self.length)
        return self


class AdvantageTransforms(Settings):
    """Settings that apply to every objective, independent of its parts."""

    adv_tau: float = 1.0
    """Factor on the advantage."""
    teacher_tau: NonNegative = 0.0
    """Add teacher_tau * (h - l), without gradient, to the advantage; needs teacher log-probs."""
    kl_penalty_coef: NonNegative = 0.0
    """Add kl_penalty_coef * (mean(k) - k) to the advantage, where k is the log-ratio against the reference, centred
    over the step."""
    kl_penalty_source: Literal["policy", "sampled"] = "policy"
    """policy: k = l - f; sampled: k = b - f, which needs no log-probs of the policy before the step."""
    proximal: Literal["recorded", "interpolated"] = "recorded"
    """Source of o: recorded, from the batch; or interpolated, b + (1 - 1/staleness) * (l - b) without gradient (arXiv
    2512.06547)."""
    roles: list[int] | None = None
    """Role ids: only trainable tokens with one of these roles belong to the objective. Defaults to all tokens."""
    max_invalid_logprob_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """A step is not trained if more than this fraction of its trainable tokens has a NaN or infinite sampler
    log-prob."""
    metrics_sample_size: Annotated[int, Field(ge=0)] = 8192
    """Above this many tokens per step, distributions and metrics by staleness are computed on evenly spaced blocks with
    about this many tokens in total. Counts of kept and dropped tokens are always exact. 0 disables sampling."""

    @model_validator(mode="after")
    def _check_kl_penalty_source(self) -> Self:
        if self.kl_penalty_source != "policy" and self.kl_penalty_coef == 0:
            raise setting_error(
                "{kl_penalty_source} has no effect with kl_penalty_coef = 0", kl_penalty_source=self.kl_penalty_source
            )
        return self


class Composition(AdvantageTransforms):
    """A complete objective."""

    gates: list[Gate] = []
    """Rules that drop tokens."""
    weights: list[ImportanceWeight] = []
    """Factors without gradient on the policy term."""
    policy: PolicyTerm = PolicyTerm()
    """The term that carries the advantage."""
    penalties: list[Penalty] = []
    """Terms that do not depend on the advantage."""
    reduction: Reduction = Reduction()
    """The divisor of the sum over the step's tokens."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.policy.surrogate == "cross_entropy":
            for field in ("teacher_tau", "kl_penalty_coef"):
                if getattr(self, field):
                    raise setting_error(
                        f"{{{field}}} has no effect: cross_entropy has no advantage", **{field: getattr(self, field)}
                    )
            if self.adv_tau != 1:
                raise setting_error("{adv_tau} has no effect: cross_entropy has no advantage", adv_tau=self.adv_tau)
            if self.weights:
                raise setting_error(
                    "{weights} has no effect: cross_entropy takes no weights", weights=len(self.weights)
                )
        if self.policy.level == "sequence":
            # M averages the transformed advantages over the sequence, so the step's centring would cancel them
            for field, instead in (("kl_penalty_coef", "reference_kl_coef"), ("teacher_tau", "")):
                if getattr(self, field):
                    raise setting_error(
                        f"{{{field}}} changes the advantage of single tokens, and a policy term with level ="
                        ' "sequence" uses only the mean advantage of a sequence'
                        + (f"; use {instead}, a penalty, in its place" if instead else ""),
                        **{field: getattr(self, field)},
                    )
        if self.reduction.denominator == "kept" and not self.gates and not self.reads("sampler"):
            raise setting_error("{denominator} has no effect: no gate drops a token", denominator="kept")
        if self.policy.level == "sequence" and any(weight.level == "token" for weight in self.weights):
            raise setting_error(
                "{level}: a sequence-level policy term takes no token-level weights", level=self.policy.level
            )
        if self.proximal == "interpolated" and not self.reads("proximal"):
            raise setting_error(
                "{proximal} has no effect: no part of the objective uses the proximal policy", proximal=self.proximal
            )
        return self

    def reads(self, source: Literal["sampler", "proximal", "reference", "teacher"]) -> bool:
        """Whether a batch must contain these log-probs.

        Every term with an advantage needs the sampler's, even if it uses no ratio: a token without a sampler log-prob
        is never treated as on-policy.
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
        """Whether each token's gradient depends on that token alone, up to one factor common to the step."""
        return (
            all(gate.scope == "token" for gate in self.gates)
            and all(weight.level == "token" for weight in self.weights)
            and self.policy.level == "token"
            and self.reduction.over != "sequences"
            and (self.kl_penalty_coef == 0 or self.kl_penalty_source == "sampled")
        )

    def step_logprob_parts(self) -> list[str]:
        """Return the settings that need log-probs of the policy over the whole step before the loss of any token.

        Without them, everything step-wide is a count that is known before the first forward pass.
        """
        parts = [f'the gate on {gate.statistic} with scope = "step"' for gate in self.gates if gate.scope == "step"]
        if self.reduction.denominator == "kept":
            parts.append('denominator = "kept"')
        if self.kl_penalty_coef and self.kl_penalty_source == "policy":
            parts.append(f'kl_penalty_coef = {self.kl_penalty_coef} with kl_penalty_source = "policy"')
        return parts
