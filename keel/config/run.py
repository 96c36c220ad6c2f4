"""The root settings of a run, and the rules that hold between its tables."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.engine import EngineSettings, PoolSettings, PublishSettings
from keel.config.launch import LaunchSettings
from keel.config.rollout import (
    EnvironmentSettings,
    RendererSettings,
    Sampling,
    SchedulerSettings,
)
from keel.config.sft import SftSettings
from keel.config.trainer import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.objectives.resolve import ObjectiveSettings

AdvantageEstimator = Literal[
    "group_mean", "group_mean_std", "leave_one_out", "mean_normalised", "moving_baseline", "constant"
]

ZeroVarianceGroups = Literal["drop", "train"]


GROUP_ESTIMATORS = ("group_mean", "group_mean_std", "leave_one_out", "mean_normalised")
"""Estimators whose advantages depend on the rewards of the group alone, and are zero if those are all equal."""


class AdvantageSettings(Settings):
    """How rewards become advantages."""

    name: AdvantageEstimator = "group_mean"
    """Estimator: the baseline and the scale; see docs/objectives.md."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the old baseline that moving_baseline keeps after each step. Defaults to 0.95."""
    baseline: float | None = None
    """Value that constant subtracts from each reward. Defaults to 0."""
    zero_variance_groups: ZeroVarianceGroups = "drop"
    """What happens to groups whose rewards are all equal. drop: they are dropped and counted; train: they are trained,
    with an advantage of zero, so that only penalties have a gradient."""

    @property
    def drops_equal_rewards(self) -> bool:
        """Whether a group is dropped exactly when its rewards are all equal, whatever else is in the batch."""
        return self.zero_variance_groups == "drop" and self.name in GROUP_ESTIMATORS

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        for field, owner in (("decay", "moving_baseline"), ("baseline", "constant")):
            if getattr(self, field) is not None and self.name != owner:
                raise setting_error(
                    f'{{{field}}} has no effect: it belongs to name = "{owner}"', **{field: getattr(self, field)}
                )
        return self


class EvaluationSettings(Settings):
    """Evaluation of the policy on tasks it is never trained on."""

    when: Literal["always", "start_and_end", "never"] = "always"
    """When to evaluate. always: at the start, every `every` steps and at the end; start_and_end: at the start and at
    the end; never."""
    every: Annotated[int, Field(ge=1)] = 10
    """Steps between two evaluations. Used by always."""
    num_tasks: Annotated[int, Field(ge=1)] = 64
    """Number of tasks per environment: the first ones of its eval split."""
    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Completions per task. With more than one, pass@k is reported for k up to this number."""
    sampling: Sampling | None = None
    """How completions are sampled. Defaults to the settings used in training."""


class MetricsSettings(Settings):
    """Where metrics are written in addition to the run folder; see docs/metrics.md."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases. offline: into the run folder; online: also to its servers."""
    trackio: bool = False
    """Log to trackio's folder on this machine."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project name for wandb and trackio. Defaults to keel."""
    custom_sink: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """`module:attribute` of a custom sink."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.project is not None and self.wandb == "off" and not self.trackio:
            raise setting_error(
                "{project} has no effect: it is for wandb and trackio, and both are off", project=self.project
            )
        return self


class RunSettings(Settings):
    """All settings of a run."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Number of batches to train on."""
    stall_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds without progress after which the run stops and reports what it was waiting for. Defaults to one hour, or
    to three times the longest limits.timeout of an environment if that is longer."""
    environments: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], EnvironmentSettings] = {}
    """Environments to train on, by name. A table without `name` uses the environment it is named after."""
    sampling: Sampling = Sampling()
    """How completions are sampled."""
    renderer: RendererSettings = RendererSettings()
    """How messages become tokens."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """How groups are sampled and batches are cut."""
    engine: EngineSettings = EngineSettings()
    """The engine that samples completions."""
    pool: PoolSettings | None = None
    """The servers of engine.kind = "pool"."""
    publish: PublishSettings = PublishSettings()
    """How new weights reach the engine."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Evaluation on tasks the policy is never trained on."""
    metrics: MetricsSettings = MetricsSettings()
    """Where metrics are written in addition to the run folder."""
    sft: SftSettings | None = None
    """Supervised fine-tuning, for `keel sft`; the objective is then cross_entropy."""

    objective: ObjectiveSettings = Field(default_factory=lambda: ObjectiveSettings(name="icepop"))
    """The objective: a preset with parameters, or a composition; see docs/objectives.md."""
    advantages: AdvantageSettings = AdvantageSettings()
    """How rewards become advantages."""
    model: ModelSettings = ModelSettings()
    """The model that is trained."""
    trainer: TrainerSettings = TrainerSettings()
    """How a step's samples become new weights."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """Which checkpoints are written and kept."""
    references: dict[str, ReferenceSettings] = {}
    """Frozen reference models by name, for objectives with a KL to a reference."""
    teacher: ModelSettings | None = None
    """The model that scores the sampled tokens, for objectives with a teacher."""
    launch: LaunchSettings | None = None
    """How `keel launch` places the components of the run on a cluster. `keel train` ignores it."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all random numbers of the run."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_environment_names(cls, values: Any) -> Any:
        """Give an environment without a `name` the name of its table."""
        tables = values.get("environments") if isinstance(values, dict) else None
        if isinstance(tables, list):
            raise setting_error(
                "environments is a list; write one table [environments.NAME] per environment, not [[environments]]"
            )
        if not isinstance(tables, dict):
            return values
        named_tables = {
            key: {"name": key, **table} if isinstance(table, dict) and "name" not in table else table
            for key, table in tables.items()
        }
        return {**values, "environments": named_tables}

    @model_validator(mode="before")
    @classmethod
    def _set_default_objective(cls, values: Any) -> Any:
        """Train with cross-entropy if the recipe is one of supervised fine-tuning."""
        if isinstance(values, dict) and values.get("sft") is not None and "objective" not in values:
            return {**values, "objective": {"name": "cross_entropy"}}
        return values

    @model_validator(mode="after")
    def _check_tables_agree(self) -> Self:
        kind, reads = self.engine.kind, self.objective.composition.reads
        if kind == "pool" and self.pool is None:
            raise setting_error("{engine.kind} needs a table [pool] that lists the servers", {"engine.kind": kind})
        if kind != "pool" and self.pool is not None:
            raise setting_error(
                'the table [pool] has no effect with {engine.kind}; set engine.kind = "pool"', {"engine.kind": kind}
            )
        if self.scheduler.refill and not self.advantages.drops_equal_rewards:
            raise setting_error(
                "{scheduler.refill} has no effect with {advantages.name} and {advantages.zero_variance_groups}: it"
                " replaces groups that are dropped because their rewards are all equal; remove it",
                {
                    "scheduler.refill": True,
                    "advantages.name": self.advantages.name,
                    "advantages.zero_variance_groups": self.advantages.zero_variance_groups,
                },
            )
        if self.publish.every - 1 > self.scheduler.max_off_policy_steps:
            raise setting_error(
                "{publish.every} makes samples older than {scheduler.max_off_policy_steps} versions, so no batch could"
                " be cut; lower the first or raise the second",
                {
                    "publish.every": self.publish.every,
                    "scheduler.max_off_policy_steps": self.scheduler.max_off_policy_steps,
                },
            )
        self._check_group_sizes()
        for name, environment in self.environments.items():
            if environment.limits.max_sequence_tokens > self.trainer.max_tokens_per_micro_batch:
                setting = f"environments.{name}.limits.max_sequence_tokens"
                raise setting_error(
                    f"{{{setting}}} must not be above {{trainer.max_tokens_per_micro_batch}}: a longer sample fits into"
                    " no micro-batch",
                    {
                        setting: environment.limits.max_sequence_tokens,
                        "trainer.max_tokens_per_micro_batch": self.trainer.max_tokens_per_micro_batch,
                    },
                )
        self._check_transport()
        if self.sft is not None:
            self._check_sft(self.sft)
        if self.sft is None or self.sft.epochs is None or "steps" in self.model_fields_set:
            self._check_schedule()  # `keel sft` computes the steps of its epochs, and loads the settings with them
        if self.references and not reads("reference"):
            raise setting_error(
                "{references} has no effect: the objective reads no reference", references=list(self.references)
            )
        if self.teacher is not None and not reads("teacher"):
            raise setting_error(
                "{teacher.name} has no effect: the objective reads no teacher", {"teacher.name": self.teacher.name}
            )
        return self

    def group_size(self, environment: EnvironmentSettings) -> int:
        """Return the number of rollouts in a group of an environment."""
        return environment.group_size or self.scheduler.group_size

    @property
    def mean_group_size(self) -> float:
        """Mean number of rollouts in a group, over the environments by their share of the groups."""
        weights = [environment.weight for environment in self.environments.values()]
        sizes = [self.group_size(environment) for environment in self.environments.values()]
        if not weights:
            return self.scheduler.group_size
        return sum(weight * size for weight, size in zip(weights, sizes, strict=True)) / sum(weights)

    def _check_group_sizes(self) -> None:
        """Raise an error if an environment has smaller groups than the scheduler requires of every group."""
        smallest = self.scheduler.min_group_size
        for name, environment in self.environments.items():
            if smallest is not None and environment.group_size is not None and smallest > environment.group_size:
                setting = f"environments.{name}.group_size"
                raise setting_error(
                    f"{{scheduler.min_group_size}} must not be above {{{setting}}}; lower the first or raise the"
                    " second",
                    {"scheduler.min_group_size": smallest, setting: environment.group_size},
                )

    @property
    def max_optimizer_steps(self) -> int:
        """Maximum number of optimizer steps of the run. A batch takes at most one per group."""
        return self.steps * min(self.trainer.optimizer_steps, self.scheduler.groups_per_step)

    @property
    def trainer_with_schedule(self) -> TrainerSettings:
        """The trainer's settings, with the length of the run as the length of its learning-rate schedule by default."""
        optimizer = self.trainer.optimizer
        if optimizer.lr_schedule == "constant" or optimizer.total_steps is not None:
            return self.trainer
        optimizer = optimizer.model_copy(update={"total_steps": self.max_optimizer_steps})
        return self.trainer.model_copy(update={"optimizer": optimizer})

    def _check_schedule(self) -> None:
        """Raise an error if the learning-rate schedule would end before the run."""
        optimizer, length = self.trainer.optimizer, self.max_optimizer_steps
        if optimizer.lr_schedule == "constant":
            return
        run = {"steps": self.steps, "trainer.optimizer_steps": self.trainer.optimizer_steps}
        if optimizer.total_steps is not None and optimizer.total_steps < length:
            raise setting_error(
                "{trainer.optimizer.total_steps} ends the learning-rate schedule before the run: {steps} with"
                f" {{trainer.optimizer_steps}} takes up to {length} optimizer steps; remove total_steps, which then"
                f" follows the run, or set it to at least {length}",
                {"trainer.optimizer.total_steps": optimizer.total_steps, **run},
            )
        if optimizer.total_steps is None and optimizer.warmup_steps >= length:
            raise setting_error(
                "{trainer.optimizer.warmup_steps} must be below the length of the learning-rate schedule: {steps} with"
                f" {{trainer.optimizer_steps}} takes up to {length} optimizer steps",
                {"trainer.optimizer.warmup_steps": optimizer.warmup_steps, **run},
            )

    def _check_sft(self, sft: SftSettings) -> None:
        """Raise an error for settings that supervised fine-tuning does not use or cannot satisfy."""
        policy, reads = self.objective.composition.policy, self.objective.composition.reads
        if policy.surrogate != "cross_entropy" or reads("sampler") or reads("proximal") or reads("reference"):
            raise setting_error(
                '{objective.name} cannot be trained with the table [sft]; leave it out, or set it to "cross_entropy"'
                " without gates and penalties",
                {"objective.name": self.objective.name},
            )
        for table in ("scheduler", "publish", "pool", "advantages", "launch"):
            if getattr(self, table) != type(self).model_fields[table].default:
                raise setting_error(f"the table [{table}] has no effect with the table [sft]; remove it")
        if self.trainer.optimizer_steps > 1:
            raise setting_error(
                "{trainer.optimizer_steps} has no effect with the table [sft]; lower sft.rows_per_step instead",
                {"trainer.optimizer_steps": self.trainer.optimizer_steps},
            )
        if sft.max_sequence_tokens > self.trainer.max_tokens_per_micro_batch:
            raise setting_error(
                "{sft.max_sequence_tokens} must not be above {trainer.max_tokens_per_micro_batch}: a longer sample fits"
                " into no micro-batch",
                {
                    "sft.max_sequence_tokens": sft.max_sequence_tokens,
                    "trainer.max_tokens_per_micro_batch": self.trainer.max_tokens_per_micro_batch,
                },
            )
        if sft.environment is not None and sft.environment not in self.environments:
            raise setting_error(
                "{sft.environment} is not a table of this recipe: add [environments.NAME]",
                {"sft.environment": sft.environment},
            )

    def _check_transport(self) -> None:
        """Raise an error if the weights of this run cannot be published with the configured transport."""
        transport, path, kind = self.publish.transport, self.publish.path, self.engine.kind
        lora = self.model.lora is not None
        vllm = kind == "vllm" or (self.pool is not None and self.pool.backend == "vllm")
        problem = ""
        if transport == "adapter" and not lora:
            problem = "has no effect: without model.lora there is no adapter"
        elif transport in ("folder", "broadcast") and lora:
            problem = 'has no effect: with model.lora only an adapter trains; leave it "auto"'
        elif transport == "broadcast" and kind == "local":
            problem = 'has no effect with engine.kind = "local", which copies weights in memory'
        elif transport == "broadcast" and vllm:
            problem = 'has no effect with vLLM, which loads folders and adapters; leave it "auto"'
        if problem:
            raise setting_error(f"{{publish.transport}} {problem}", {"publish.transport": transport})
        if path is not None and kind == "local" and transport == "auto" and not lora:
            raise setting_error(
                '{publish.path} has no effect: weights are copied in memory; set publish.transport = "folder"',
                {"publish.path": path},
            )
