"""Settings of rollouts: sampling, rendering, environments and the scheduler."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.dataset import DatasetSettings, Fraction, RewardSettings, RewardTotal, expand_reward
from keel.config.secrets import secret_names
from keel.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Sampling(Settings):
    """How completions are sampled."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Logits are divided by this value; the trainer computes log-probs at the same temperature. 0 selects the most
    likely token and is for evaluation only."""
    max_tokens: Count = 256
    """Maximum number of tokens in one completion."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. The tokens that contain them are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the model's end-of-turn token."""
    seed: int | None = None
    """Seed of a request. Equal requests with equal seeds give equal tokens on the same engine."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Evaluation only: sample from the most likely tokens whose probabilities add up to this value."""
    top_k: NonNegative = 0
    """Evaluation only: sample from this many of the most likely tokens. 0 means all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Evaluation only: exclude tokens whose probability is below this fraction of the most likely token's."""

    @property
    def truncates_distribution(self) -> bool:
        """Whether tokens are sampled from a different distribution than the model's at this temperature."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.temperature == 0

    def check_trainable(self, table: str = "sampling") -> None:
        """Raise a `ConfigError` for settings that the trainer cannot reproduce.

        The trainer's log-probs are those of the full distribution. `table` is the dotted name of these settings and
        appears in the error.
        """
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"{table}.{name} = {getattr(self, name)} truncates the distribution, but the trainer's log-probs"
                    " are those of the full distribution; use it for evaluation only"
                )
        if self.temperature == 0:
            raise ConfigError(f"{table}.temperature = 0 is greedy decoding; use it for evaluation only")


class RendererSettings(Settings):
    """How messages become tokens."""

    family: str = "auto"
    """Chat format. A family of the `renderers` library, such as "qwen3"; "template": the model's chat template; "auto":
    the family if the library knows the model by name, and the chat template otherwise."""
    preserve_all_thinking: bool = False
    """Keep the thinking of every earlier turn in the prompt. Off: keep what the family keeps by default."""
    preserve_thinking_between_tool_calls: bool = False
    """Keep the thinking of earlier turns that respond to the current user message."""

    @model_validator(mode="after")
    def _check_thinking_options(self) -> Self:
        if self.preserve_all_thinking and self.preserve_thinking_between_tool_calls:
            raise setting_error(
                "{preserve_thinking_between_tool_calls} has no effect: preserve_all_thinking keeps all thinking",
                preserve_thinking_between_tool_calls=True,
            )
        return self


class EpisodeLimits(Settings):
    """Limits of one episode."""

    max_turns: Count = 16
    """Maximum number of completions per episode."""
    max_sequence_tokens: Count = 4096
    """Maximum number of tokens in a training sample, prompt included."""
    on_overlength: Literal["drop", "truncate"] = "drop"
    """What happens to a longer sample: it is dropped, or truncated at the limit. Both are counted."""
    timeout: Seconds = 600.0
    """Maximum wall-clock seconds of one episode."""


class CurriculumSettings(Settings):
    """Which tasks of an environment are drawn. `curriculum = "uniform"` is short for `{order = "uniform"}`.

    The pass rate of a task is a moving average over its groups; it is measured with every order. See
    docs/curriculum.md.
    """

    order: Literal["epoch", "given", "uniform", "difficulty"] = "epoch"
    """How tasks are drawn. epoch: every task once before any repeats, shuffled anew by the run's seed in each epoch;
    given: the same in the order of the data set or environment; uniform: at random, each with the same probability;
    difficulty: at random, mostly tasks whose pass rate is in `band` or not known yet."""
    pass_threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """A rollout passes if its reward is at least this value."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest group in the moving average of a task's pass rate. 1 means the last group alone."""
    band: tuple[Fraction, Fraction] | None = None
    """Lowest and highest pass rate of the tasks that order = "difficulty" prefers. Defaults to [0.2, 0.8]."""
    floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the draws of order = "difficulty" that are uniform over all tasks that are not retired. Each of n
    tasks is therefore drawn with a probability of at least floor / n. Defaults to 0.2."""
    retire_after: Count | None = None
    """Retire a task when every rollout passed in this many of its groups in a row. By default no task is retired."""
    retest_after: Count | None = None
    """Steps after which a retired task may be drawn again. If every rollout passes, it is retired again. Defaults to
    100."""

    @property
    def target_band(self) -> tuple[float, float]:
        return self.band or (0.2, 0.8)

    @property
    def uniform_fraction(self) -> float:
        """The fraction of draws that are uniform over all tasks that are not retired."""
        return (self.floor or 0.2) if self.order == "difficulty" else 1.0

    @property
    def retest_steps(self) -> int:
        return self.retest_after or 100

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        for name in ("band", "floor"):
            value = getattr(self, name)
            if value is not None and self.order != "difficulty":
                raise setting_error(
                    f'{{{name}}} has no effect with {{order}}; set order = "difficulty", or remove it',
                    {name: list(value) if isinstance(value, tuple) else value, "order": self.order},
                )
        if self.retest_after is not None and self.retire_after is None:
            raise setting_error(
                "{retest_after} has no effect without retire_after: no task is retired", retest_after=self.retest_after
            )
        if self.band is not None and self.band[0] > self.band[1]:
            raise setting_error("{band} must be a lower and a higher pass rate", band=list(self.band))
        return self


class EnvironmentSettings(Settings):
    """One environment of a run."""

    name: Annotated[str, Field(min_length=1)]
    """A built-in name, `reasoning_gym:TASK`, `verifiers:TASKSET`, or `module:attribute`. With `dataset`, a label."""
    options: dict[str, Any] = {}
    """Options passed to the environment when it is created."""
    dataset: DatasetSettings | None = None
    """A data set whose rows are the tasks: one prompt and one completion each, scored by `rewards`."""
    rewards: list[RewardSettings] = []
    """Reward functions of the data set's completions, with weights."""
    reward_total: RewardTotal = "sum"
    """The reward is the weighted sum of the rewards that did not abstain, or their weighted mean."""
    max_reward_failure_fraction: Fraction = 0.5
    """The run stops when a reward function failed in more than this fraction of its calls, after its first 20."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the groups, relative to the other environments of the run."""
    group_size: Count | None = None
    """Rollouts in a group of this environment. Defaults to scheduler.group_size."""
    curriculum: CurriculumSettings = CurriculumSettings()
    """The order in which tasks are drawn."""
    sampling: Sampling | None = None
    """How completions are sampled in this environment. Defaults to the run's `sampling` table."""
    limits: EpisodeLimits = EpisodeLimits()
    """Limits of one episode in this environment."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if isinstance(values.get("dataset"), str):
            values["dataset"] = {"path": values["dataset"]}
        if isinstance(values.get("curriculum"), str):
            values["curriculum"] = {"order": values["curriculum"]}
        if isinstance(values.get("rewards"), str):
            values["rewards"] = [values["rewards"]]
        if isinstance(values.get("rewards"), list | tuple):
            values["rewards"] = [expand_reward(item) if isinstance(item, str) else item for item in values["rewards"]]
        return values

    @model_validator(mode="after")
    def _check_dataset(self) -> Self:
        if self.dataset is None:
            for name in ("rewards", "reward_total", "max_reward_failure_fraction"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise setting_error(f"{name} has no effect without a dataset")
            return self
        if not self.rewards:
            raise setting_error('dataset needs at least one reward function: rewards = ["exact"], for example')
        if self.options:
            raise setting_error("options have no effect with a dataset; options of a reward stand in its entry")
        if ":" in self.name:
            raise setting_error("{name} and a dataset cannot be combined", name=self.name)
        return self

    @model_validator(mode="after")
    def _check_no_secrets(self) -> Self:
        for name in secret_names(self.options):
            shown = name.replace("{", "(").replace("}", ")")  # setting_error would take braces for field names
            raise setting_error(
                f"option {shown} of an environment looks like a secret, and settings are written into the run's folder;"
                " let the environment read it from a file or a variable that an option names"
            )
        return self


class SchedulerSettings(Settings):
    """How groups are sampled and batches are cut."""

    groups_per_step: Count = 8
    """Groups in a batch."""
    group_size: Count = 8
    """Rollouts in a group, where an environment does not set its own."""
    max_in_flight: Count = 128
    """Maximum number of rollouts in flight."""
    max_error_reschedule_attempts: NonNegative | None = 3
    """Maximum number of retry rounds for the failed or empty rollouts of a group. A prompt that is too long, and an
    episode whose retry raises the same exception at the same line, are not retried again."""
    min_group_size: Count | None = None
    """When the retries are used up, train the remaining rollouts of the group if there are at least this many. By
    default only complete groups are trained."""
    max_off_policy_steps: NonNegative = 2
    """Maximum staleness, in versions, of the oldest token of a group when its batch is cut. 0 means synchronous."""
    on_stale: Literal["drop", "resample"] = "resample"
    """What happens to a group that is too stale: its task is dropped or sampled again."""
    window_batches: NonNegative = 1
    """Batches are cut in dispatch order. A finished group may overtake unfinished groups of at most this many
    batches."""
    refill: bool | None = None
    """Whether groups whose rewards are all equal take no place in the batch, so that sampling continues until it is
    full. Applies where advantages.zero_variance_groups = "drop". Defaults to true in asynchronous runs
    (max_off_policy_steps above 0) and to false in synchronous ones."""
    max_refill_factor: Annotated[float, Field(ge=1)] = 3.0
    """With refill, sample at most this many times groups_per_step groups for a step. Further groups whose rewards are
    all equal take a place in the batch."""
    max_empty_steps: Count | None = 10
    """Stop the run after this many consecutive batches without anything to train on."""
    rollout_timeout: Seconds | None = None
    """Seconds after which a rollout that has not returned is abandoned. Defaults to one minute more than the longest
    limits.timeout of the run."""

    @property
    def refills(self) -> bool:
        """`refill`, or its default for the mode of the run."""
        return self.max_off_policy_steps > 0 if self.refill is None else self.refill

    @property
    def max_refilled_groups(self) -> int:
        """The number of groups that may be replaced for one step."""
        allowed = int(self.max_refill_factor * self.groups_per_step + 1e-9)  # 1.15 * 20 must be 23, not 22.999...
        return allowed - self.groups_per_step if self.refills else 0

    @model_validator(mode="after")
    def _check_min_group_size(self) -> Self:
        if self.min_group_size is not None:
            if self.max_error_reschedule_attempts is None:
                raise setting_error(
                    "{min_group_size} has no effect without max_error_reschedule_attempts: failed rollouts are retried"
                    " indefinitely",
                    min_group_size=self.min_group_size,
                )
            if self.min_group_size > self.group_size:
                raise setting_error(
                    "{min_group_size} must not be above {group_size}",
                    min_group_size=self.min_group_size,
                    group_size=self.group_size,
                )
        return self
