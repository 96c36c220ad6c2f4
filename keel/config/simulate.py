"""Assumptions of `keel simulate` about engines, completions, failures, the trainer and publishing.

Every number is an assumption unless `--from RUN` measures it. Groups, limits and staleness come from the recipe.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class LengthSettings(Settings):
    """Number of tokens sampled per rollout. On the command line: fixed:512, lognormal:512:0.8, or 512."""

    kind: Literal["fixed", "lognormal", "empirical"] = "lognormal"
    """Distribution. fixed: all equal; lognormal: most are short, a few very long; empirical: drawn from `values`."""
    mean: Positive | None = None
    """Mean of fixed and lognormal, before truncation at sampling.max_tokens. Defaults to half of
    sampling.max_tokens."""
    sigma: Annotated[float, Field(gt=0, le=4)] | None = None
    """Standard deviation of the logarithm, for lognormal. Defaults to 0.8."""
    values: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Observed lengths, for empirical."""

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: Any) -> Any:
        """Convert `lognormal:512:0.8` to a table."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"kind": "fixed", "mean": value}
        if not isinstance(value, str):
            return value
        kind, *parameters = value.split(":")
        names = {"fixed": ["mean"], "lognormal": ["mean", "sigma"]}.get(kind)
        if names is None or not 1 <= len(parameters) <= len(names):
            raise setting_error("{kind}: write fixed:MEAN, lognormal:MEAN or lognormal:MEAN:SIGMA", kind=value)
        return {"kind": kind, **dict(zip(names, parameters, strict=False))}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind == "empirical") != bool(self.values):
            raise setting_error('{kind}: kind = "empirical" needs values, and only it takes them', kind=self.kind)
        if self.sigma is not None and self.kind != "lognormal":
            raise setting_error('{sigma} has no effect: it belongs to kind = "lognormal"', sigma=self.sigma)
        if self.mean is not None and self.kind == "empirical":
            raise setting_error('{mean} has no effect: kind = "empirical" has the mean of its values', mean=self.mean)
        return self


class SimulateSettings(Settings):
    """The simulated cluster and its speeds."""

    steps: Count | None = None
    """Steps to simulate. Defaults to the steps of the recipe, but at most 50."""

    engines: Count = 1
    """Number of engines."""
    tokens_per_second: Positive = 2000.0
    """Tokens per second of one engine that decodes max_batch requests, summed over the requests."""
    tokens_per_second_alone: Positive = 60.0
    """Tokens per second of one engine that decodes a single request. In between, a decode step takes a + b x requests
    seconds."""
    max_batch: Count | None = None
    """Requests that an engine decodes together; further requests wait. Defaults to engine.max_batch, or to 256 for vllm
    and pool."""
    prefill_tokens_per_second: Positive | None = None
    """Prompt tokens per second of one engine. Each group's prompt is computed once, and decoding waits for it. By
    default prefill takes no time."""
    trainer_slowdown: Annotated[float, Field(ge=1)] = 1.0
    """Factor by which engines are slower while the trainer computes. 1 means that they share no machine."""

    length: LengthSettings = LengthSettings()
    """Number of tokens sampled per rollout."""
    prompt_tokens: Count = 256
    """Tokens of a rollout that are not sampled: the prompt and tool results."""
    turns: Count = 1
    """Maximum number of completions per rollout. A rollout samples at most this many times sampling.max_tokens."""
    environment_seconds: Seconds = 0.0
    """Seconds a rollout spends outside the engine: tools and scoring."""
    rollout_failures: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of rollouts that fail, at a random point."""
    zero_variance_share: Fraction = 0.0
    """Fraction of groups whose rewards are all equal. They are trained only with advantages.zero_variance_groups =
    "train"."""
    engine_crash_hours: Positive | None = None
    """Average hours between two crashes of one engine. By default engines never crash."""
    engine_restart_seconds: Seconds = 120.0
    """Seconds until a crashed engine is running again, before it loads weights."""

    ranks: Count | None = None
    """Ranks of the trainer. Defaults to trainer.ranks of the recipe."""
    trainer_tokens_per_second: Positive = 4000.0
    """Tokens per second that one rank trains. The prompt of a group counts once."""
    rank_efficiency: Fraction = 0.9
    """Fraction of one rank's speed that each further rank adds."""
    step_seconds: Seconds = 0.5
    """Seconds of a step that do not depend on its size: optimizer and records."""
    checkpoint_seconds: Seconds = 0.0
    """Seconds to write a checkpoint, every checkpoints.every steps."""

    publish_gigabytes: Seconds = 0.0
    """Gigabytes per publication: 2 bytes per parameter in bfloat16, or the size of the adapter."""
    bandwidth: Positive = 1.0
    """Gigabytes per second of one machine's network link."""
    storage_bandwidth: Positive | None = None
    """Gigabytes per second that all engines together can read from shared storage, for transport folder. By default
    only their links limit them."""
    publish_seconds: Seconds = 0.0
    """Seconds of a publication that do not depend on its size."""
    load_seconds: Seconds = 0.0
    """Seconds for which an engine stops sampling to load new weights."""

    @model_validator(mode="after")
    def _check_speeds(self) -> Self:
        if self.tokens_per_second < self.tokens_per_second_alone:
            raise setting_error(
                "{tokens_per_second} must not be below {tokens_per_second_alone}",
                tokens_per_second=self.tokens_per_second,
                tokens_per_second_alone=self.tokens_per_second_alone,
            )
        return self
