"""The settings of a run, from the root, and what has to hold between its tables."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.launch import LaunchSettings
from keel.config.rollout import (
    EngineSettings,
    EnvironmentSettings,
    PoolSettings,
    PublishSettings,
    RendererSettings,
    Sampling,
    SchedulerSettings,
)
from keel.config.trainer import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.objectives.resolve import ObjectiveSettings

AdvantageEstimator = Literal[
    "group_mean", "group_mean_std", "leave_one_out", "mean_normalised", "moving_baseline", "constant"
]

ZeroVarianceGroups = Literal["drop", "train"]


class AdvantageSettings(Settings):
    """How rewards become advantages."""

    name: AdvantageEstimator = "group_mean"
    """The baseline and scale; see docs/objectives.md."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """moving_baseline: the share of the old baseline that stays; not given: 0.95."""
    baseline: float | None = None
    """constant: the value subtracted from each reward; not given: 0."""
    zero_variance_groups: ZeroVarianceGroups = "drop"
    """Groups whose rewards are all equal: drop and count them, or train them, where only penalties act."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        for field, owner in (("decay", "moving_baseline"), ("baseline", "constant")):
            if getattr(self, field) is not None and self.name != owner:
                raise setting_error(
                    f'{{{field}}} cannot act: it belongs to name = "{owner}"', **{field: getattr(self, field)}
                )
        return self


class EvaluationSettings(Settings):
    """How the policy does on tasks it never trains on."""

    when: Literal["always", "start_and_end", "never"] = "always"
    """always: at the start, every so many steps and at the end; ends: at the start and the end; never."""
    every: Annotated[int, Field(ge=1)] = 10
    """always: steps between two evaluations."""
    num_tasks: Annotated[int, Field(ge=1)] = 64
    """Of each environment, the first of its eval split."""
    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Answers for each task; with more than one, pass@k is reported for k up to it."""
    sampling: Sampling | None = None
    """How answers are drawn; not given: as in training."""


class MetricsSettings(Settings):
    """Where numbers go besides the run's folder; see docs/metrics.md."""

    tensorboard: bool = False
    """Event files in the run's folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: in the run's folder, or also to its servers."""
    trackio: bool = False
    """In trackio's folder on this machine."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """wandb, trackio: what the run is listed under; not given: keel."""
    custom_sink: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """module:attribute of a sink of your own."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.project is not None and self.wandb == "off" and not self.trackio:
            raise setting_error(
                "{project} cannot act: it is for wandb and trackio, and both are off", project=self.project
            )
        return self


class RunSettings(Settings):
    """Everything a run is configured by."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Batches to train on."""
    stall_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds without any progress after which the run stops and says what it waits for; not given: an hour, or three
    times the longest limits.timeout of an environment."""
    environments: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], EnvironmentSettings] = {}
    """What is learned, by name; a table without `name` is of the environment that it is called."""
    sampling: Sampling = Sampling()
    """How answers are drawn."""
    renderer: RendererSettings = RendererSettings()
    """How messages become tokens."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """Groups, retries, staleness, batches."""
    engine: EngineSettings = EngineSettings()
    """What samples."""
    pool: PoolSettings | None = None
    """The servers, with engine.kind = "pool"."""
    publish: PublishSettings = PublishSettings()
    """How new weights reach the engine."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How the policy does on tasks it never trains on."""
    metrics: MetricsSettings = MetricsSettings()
    """Where numbers go besides the run's folder."""

    objective: ObjectiveSettings = Field(default_factory=lambda: ObjectiveSettings(name="icepop"))
    """The training signal."""
    advantages: AdvantageSettings = AdvantageSettings()
    """From rewards to advantages."""
    model: ModelSettings = ModelSettings()
    """What is trained."""
    trainer: TrainerSettings = TrainerSettings()
    """From a step's samples to new weights."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """What stays on disk."""
    references: dict[str, ReferenceSettings] = {}
    """Frozen policies by name, for objectives that compare with a reference."""
    teacher: ModelSettings | None = None
    """Scores what the policy sampled, for objectives with a teacher."""
    launch: LaunchSettings | None = None
    """Where `keel launch` places the parts on a cluster; `keel train` runs on this machine and leaves it aside."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything that is random."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_environment_names(cls, values: Any) -> Any:
        """An environment is called by its table unless it says otherwise."""
        tables = values.get("environments") if isinstance(values, dict) else None
        if isinstance(tables, list):
            raise setting_error(
                "environments is a list; write a table [environments.NAME] for each, not [[environments]]"
            )
        if not isinstance(tables, dict):
            return values
        named = {
            key: {"name": key, **table} if isinstance(table, dict) and "name" not in table else table
            for key, table in tables.items()
        }
        return {**values, "environments": named}

    @model_validator(mode="after")
    def _check_tables_agree(self) -> Self:
        kind, reads = self.engine.kind, self.objective.composition.reads
        if kind == "pool" and self.pool is None:
            raise setting_error("{engine.kind} needs a table [pool] with its servers", {"engine.kind": kind})
        if kind != "pool" and self.pool is not None:
            raise setting_error(
                'the table [pool] has no effect with {engine.kind}; set engine.kind = "pool"', {"engine.kind": kind}
            )
        if self.publish.every - 1 > self.scheduler.max_off_policy_steps:
            raise setting_error(
                "{publish.every} makes samples older than {scheduler.max_off_policy_steps} versions, which no"
                " batch may hold",
                {
                    "publish.every": self.publish.every,
                    "scheduler.max_off_policy_steps": self.scheduler.max_off_policy_steps,
                },
            )
        for name, environment in self.environments.items():
            if environment.limits.max_sequence_tokens > self.trainer.max_tokens_per_micro_batch:
                tokens = f"environments.{name}.limits.max_sequence_tokens"
                raise setting_error(
                    f"{{{tokens}}} must not be above {{trainer.max_tokens_per_micro_batch}}: a longer sample fits no micro-batch",
                    {
                        tokens: environment.limits.max_sequence_tokens,
                        "trainer.max_tokens_per_micro_batch": self.trainer.max_tokens_per_micro_batch,
                    },
                )
        self._check_transport()
        if self.references and not reads("reference"):
            raise setting_error(
                "{references} has no effect: the objective reads no reference", references=list(self.references)
            )
        if self.teacher is not None and not reads("teacher"):
            raise setting_error(
                "{teacher.name} has no effect: the objective reads no teacher", {"teacher.name": self.teacher.name}
            )
        return self

    def _check_transport(self) -> None:
        """Refuse a way that the weights of this run cannot take."""
        way, path, lora, kind = self.publish.transport, self.publish.path, self.model.lora is not None, self.engine.kind
        vllm = kind == "vllm" or (self.pool is not None and self.pool.backend == "vllm")
        why = ""
        if way == "adapter" and not lora:
            why = "has no effect: without model.lora there is no adapter"
        elif way in ("folder", "broadcast") and lora:
            why = 'has no effect: with model.lora only an adapter trains; leave it "auto"'
        elif way == "broadcast" and kind == "local":
            why = 'has no effect with engine.kind = "local", which takes a copy in this process'
        elif way == "broadcast" and vllm:
            why = 'has no effect with vLLM, which loads folders and adapters; leave it "auto"'
        if why:
            raise setting_error(f"{{publish.transport}} {why}", {"publish.transport": way})
        if path is not None and kind == "local" and way == "auto" and not lora:
            raise setting_error(
                '{publish.path} has no effect: the engine takes a copy in this process; set publish.transport = "folder"',
                {"publish.path": path},
            )
