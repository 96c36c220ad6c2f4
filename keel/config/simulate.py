"""What `keel simulate` assumes of engines, answers, failures, the trainer and the way of weights.

Every number here is an assumption until `--from RUN` measures it. The recipe says the rest: groups, limits, staleness.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class LengthSettings(Settings):
    """How many tokens a rollout samples. On the command line: fixed:512, lognormal:512:0.8, or 512."""

    kind: Literal["fixed", "lognormal", "empirical"] = "lognormal"
    """fixed: all alike; lognormal: most are short and some are very long; empirical: drawn from `values`."""
    mean: Positive | None = None
    """fixed, lognormal: before any is cut at sampling.max_tokens; not given: half of sampling.max_tokens."""
    sigma: Annotated[float, Field(gt=0, le=4)] | None = None
    """lognormal: the standard deviation of the logarithm; not given: 0.8."""
    values: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """empirical: lengths that were seen."""

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: Any) -> Any:
        """`lognormal:512:0.8` as a table."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"kind": "fixed", "mean": value}
        if not isinstance(value, str):
            return value
        kind, *numbers = value.split(":")
        names = {"fixed": ["mean"], "lognormal": ["mean", "sigma"]}.get(kind)
        if names is None or not 1 <= len(numbers) <= len(names):
            raise setting_error("{kind}: write fixed:MEAN, lognormal:MEAN or lognormal:MEAN:SIGMA", kind=value)
        return {"kind": kind, **dict(zip(names, numbers, strict=False))}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind == "empirical") != bool(self.values):
            raise setting_error('{kind} and values belong together: kind = "empirical" has some', kind=self.kind)
        if self.sigma is not None and self.kind != "lognormal":
            raise setting_error('{sigma} cannot act: it belongs to kind = "lognormal"', sigma=self.sigma)
        if self.mean is not None and self.kind == "empirical":
            raise setting_error('{mean} cannot act: kind = "empirical" has the mean of its values', mean=self.mean)
        return self


class SimulateSettings(Settings):
    """The cluster and the speeds that are simulated."""

    steps: Count | None = None
    """Steps to simulate; not given: those of the recipe, and at most 50."""

    engines: Count = 1
    """Engines that sample."""
    tokens_per_second: Positive = 2000.0
    """Of one engine with max_batch requests, all of them together."""
    tokens_per_second_alone: Positive = 60.0
    """Of one request that an engine has to itself; in between, a decode step takes a + b x requests seconds."""
    max_batch: Count | None = None
    """Requests that an engine decodes together, others wait; not given: engine.max_batch, or 256 for vllm and pool."""
    prefill_tokens_per_second: Positive | None = None
    """Prompt tokens of one engine; each group's prompt is computed once, and decoding waits; not given: no time."""
    trainer_slowdown: Annotated[float, Field(ge=1)] = 1.0
    """How many times slower engines are while the trainer computes; 1: they share no machine."""

    length: LengthSettings = LengthSettings()
    """Tokens that a rollout samples."""
    prompt_tokens: Count = 256
    """Tokens of a rollout that it does not sample: the prompt, tool answers."""
    turns: Count = 1
    """Answers of a rollout at most: it is cut at so many times sampling.max_tokens."""
    environment_seconds: Seconds = 0.0
    """Of a rollout outside of the engine: tools, scoring."""
    rollout_failures: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rollouts that fail, somewhere on their way."""
    zero_variance_share: Share = 0.0
    """Share of groups whose rewards are all equal; they train only with advantages.zero_variance_groups = "train"."""
    engine_crash_hours: Positive | None = None
    """Hours between two crashes of one engine, in the mean; not given: never."""
    engine_restart_seconds: Seconds = 120.0
    """Until an engine that crashed is back, before it loads weights."""

    ranks: Count | None = None
    """Of the trainer; not given: trainer.ranks of the recipe."""
    trainer_tokens_per_second: Positive = 4000.0
    """Of one rank: tokens of trained samples, prompts of a group counted once."""
    rank_efficiency: Share = 0.9
    """The share of a rank's speed that each further rank adds."""
    step_seconds: Seconds = 0.5
    """Of a step whatever its size: optimizer, records."""
    checkpoint_seconds: Seconds = 0.0
    """Of each checkpoint, every checkpoints.every steps."""

    publish_gigabytes: Seconds = 0.0
    """What is published: 2 bytes for each parameter in bfloat16, or the adapter alone."""
    bandwidth: Positive = 1.0
    """Gigabytes a second of one machine's link."""
    storage_bandwidth: Positive | None = None
    """folder: gigabytes a second that all engines together can read; not given: no limit beyond their links."""
    publish_seconds: Seconds = 0.0
    """Of a publication whatever its size."""
    load_seconds: Seconds = 0.0
    """For which an engine stops sampling to take new weights."""

    @model_validator(mode="after")
    def _check_speeds(self) -> Self:
        if self.tokens_per_second < self.tokens_per_second_alone:
            raise setting_error(
                "{tokens_per_second} must not be below {tokens_per_second_alone}",
                tokens_per_second=self.tokens_per_second,
                tokens_per_second_alone=self.tokens_per_second_alone,
            )
        return self
