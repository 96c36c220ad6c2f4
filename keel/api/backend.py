"""Train from your own loop: register a model, let agents talk to it, train on what they did.

Guarantees: when `train` returns, the endpoint samples from the new weights and stamps their step as the version; a step
is complete and on disk, or did not happen; only tokens that the endpoint recorded train; a folder has one writer.
Training runs in a thread while the endpoint keeps answering. Every step is recorded in the run folder of its model,
which `keel lens`, `keel report` and `keel compare` read. The backend schedules nothing: the loop is the caller's.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError

from keel.api.checkpointed_trainer import CheckpointedTrainer
from keel.api.endpoint import ModelEndpoint
from keel.api.run_recorder import RunRecorder, step_metrics
from keel.api.samples import SampleBatch, build_batch
from keel.api.train_request import ObjectiveLike, TrainRequest
from keel.api.trainable_model import EndpointConnection, TrainableModel
from keel.api.trajectories import TrajectoryGroup
from keel.common.openmp import OpenMPReleasingExecutor
from keel.common.settings import Settings, to_config_error
from keel.config import CheckpointSettings, EngineSettings, MetricsSettings, RendererSettings, TrainerSettings
from keel.config.run import AdvantageSettings, ZeroVarianceGroups
from keel.errors import ConfigError, KeelError, ModelError
from keel.inference.protocol import WeightSource
from keel.training import StepReport, load_model

SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a call of `train`."""

    step: int
    """Step of the weights that are live now; one more than before, unless nothing trained."""
    metrics: dict[str, float]
    """Metrics of the trainer, the groups and the trajectories."""
    checkpoint_path: Path
    """The weights of `step`, in Hugging Face or PEFT layout."""
    skip_reason: str = ""
    """Why the optimizer did not step; empty if it did."""


class LocalBackend:
    """Engines and trainers in this process, and their folder.

    `path/NAME` is the run folder of model NAME, and `checkpoints/step_N` in it is the model after N steps. The newest
    checkpoints are kept according to `checkpoints`; step 0, the model as registered, is always kept. The settings apply
    to every model: `renderer` says how messages become tokens, for example whether the thinking of earlier turns stays
    in the prompt, and `metrics` where metrics go in addition to the folder. Each is a settings object or a dict.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        trainer: TrainerSettings | Mapping[str, Any] | None = None,
        checkpoints: CheckpointSettings | Mapping[str, Any] | None = None,
        engine: EngineSettings | Mapping[str, Any] | None = None,
        renderer: RendererSettings | Mapping[str, Any] | None = None,
        metrics: MetricsSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.path = Path(path)
        self.trainer = _settings(TrainerSettings, trainer, "trainer")
        self.checkpoints = _settings(CheckpointSettings, checkpoints, "checkpoints")
        self.engine = _settings(EngineSettings, engine, "engine")
        self.renderer = _settings(RendererSettings, renderer, "renderer")
        self.metrics = _settings(MetricsSettings, metrics, "metrics")
        _check_no_effect_settings(self.engine, ("kind", "dtype", "vllm_python"), "engine")
        _check_no_effect_settings(self.checkpoints, ("every",), "checkpoints")
        self.seed = seed
        self._sessions: dict[str, _ModelSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> None:
        """Load the model and open its endpoint. Returns when the endpoint accepts requests.

        A folder with checkpoints is resumed from the last intact one; a broken checkpoint is a warning.
        """
        if model.name in self._sessions:
            raise ConfigError(f'a model named "{model.name}" is already registered; choose another name')
        if model._endpoint is not None:
            raise ConfigError(f'model "{model.name}" is registered with another backend; close that backend first')
        session = _ModelSession(self, model)
        self._sessions[model.name] = session
        try:
            await session.open()
        except BaseException:
            del self._sessions[model.name]
            await session.close()
            raise

    async def step(self, model: TrainableModel) -> int:
        """Return the number of steps the model has been trained for."""
        return self._session_for(model).trainer.step_number

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        *,
        objective: ObjectiveLike = "icepop",
        learning_rate: float | None = None,
        advantages: str | AdvantageSettings = "group_mean",
        zero_variance_groups: ZeroVarianceGroups | None = None,
        kl_penalty_coef: float = 0.0,
        kl_penalty_reference_step: int | None = None,
        kl_ref_adapter_path: str | Path | None = None,
    ) -> TrainResult:
        """Train one step on these groups; returns when its checkpoint is written and the endpoint samples from it.

        `learning_rate` defaults to that of the backend's `trainer` settings. `zero_variance_groups` says whether groups
        whose advantages are all zero are dropped ("drop") or trained ("train": they count in means, and penalties apply
        to them); by default it is taken from `advantages`, which drops them. `kl_penalty_coef` adds the centred
        log-ratio to a reference to the advantages (docs/objectives.md); the reference is a checkpoint of this model, an
        adapter of its base, or the base itself if neither is given.

        A parameter without effect, or a trajectory that the endpoint did not record, raises an error before anything
        changes. Calls for one model run one after another. Cancelling the call does not undo the step.
        """
        session = self._session_for(model)
        request = TrainRequest.from_arguments(
            groups,
            objective=objective,
            learning_rate=learning_rate,
            advantages=advantages,
            zero_variance_groups=zero_variance_groups,
            kl_penalty_coef=kl_penalty_coef,
            kl_penalty_reference_step=kl_penalty_reference_step,
            kl_ref_adapter_path=kl_ref_adapter_path,
        )
        return await asyncio.shield(session.start_training(request))

    async def close(self) -> None:
        """Wait for training in progress, then stop the endpoints and release the folders."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    def _session_for(self, model: TrainableModel) -> "_ModelSession":
        session = self._sessions.get(model.name)
        if session is None or session.model is not model:
            raise KeelError(f'model "{model.name}" is not registered here: await backend.register(model) first')
        return session


class _ModelSession:
    """A model with its trainer, its server and its lock."""

    def __init__(self, backend: LocalBackend, model: TrainableModel) -> None:
        self.backend = backend
        self.model = model
        self.folder = backend.path / model.name
        self._lock = FileLock(self.folder / ".lock", timeout=0)
        # a single dedicated thread: torch keeps worker threads for each thread that calls it
        self._executor = OpenMPReleasingExecutor(1, thread_name_prefix=f"keel-train-{model.name}")
        self._train_lock = asyncio.Lock()
        self._in_flight: set[asyncio.Task[TrainResult]] = set()
        self.endpoint: ModelEndpoint | None = None
        self._trainer: CheckpointedTrainer | None = None
        self._recorder: RunRecorder | None = None

    @property
    def recorder(self) -> RunRecorder:
        assert self._recorder is not None
        return self._recorder

    @property
    def trainer(self) -> CheckpointedTrainer:
        if self._trainer is None:
            raise KeelError(f'model "{self.model.name}" is still being registered')
        return self._trainer

    # opening and closing

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._load)
        assert self.endpoint is not None and self._trainer is not None
        if self._trainer.step_number:
            await self._publish()
        self.model._endpoint = EndpointConnection(self.endpoint.base_url, self.endpoint.api_key)

    def _load(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise ModelError(
                f"{self.folder} is in use by another backend; close that one, or use another path or name"
            ) from None
        except OSError as error:
            raise ModelError(f"{self.folder} cannot be written: {error.strerror}") from error
        backend, settings = self.backend, self.model.settings
        tables = {"model": settings, "trainer": backend.trainer, "checkpoints": backend.checkpoints}
        tables |= {"engine": backend.engine, "renderer": backend.renderer, "metrics": backend.metrics}
        dumped = {name: table.model_dump(exclude_none=True) for name, table in tables.items()}
        self._recorder = RunRecorder(self.folder, {**dumped, "seed": backend.seed})
        self._trainer = CheckpointedTrainer(
            settings, backend.trainer, self.folder / "checkpoints", backend.checkpoints, backend.seed
        )
        self._recorder.set_tokenizer(self._trainer.model.tokenizer)
        self._recorder.discard_after(self._trainer.step_number)
        own = load_model(settings.model_copy(update={"lora": None, "gradient_checkpointing": False}), backend.seed)
        self.endpoint = ModelEndpoint(own, self.model.name, backend.engine, backend.renderer)
        self.endpoint.start()

    async def close(self) -> None:
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        endpoint, self.model._endpoint = self.model._endpoint, None
        for client in endpoint.clients.values() if endpoint is not None else ():
            await client.close()
        # in that thread: after its current work, and because the lock belongs to the thread that acquired it
        await asyncio.get_running_loop().run_in_executor(self._executor, self._unload)
        self._executor.shutdown()

    def _unload(self) -> None:
        try:
            if self.endpoint is not None:
                self.endpoint.stop()
            if self._recorder is not None:
                self._recorder.close(failed_start=self.endpoint is None)
        finally:
            self._lock.release()

    # training

    def start_training(self, request: TrainRequest) -> asyncio.Task[TrainResult]:
        task = asyncio.ensure_future(self._train(request))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    async def _train(self, request: TrainRequest) -> TrainResult:
        async with self._train_lock:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._executor, self._train_step, request)
            if not result.skip_reason:
                await self._publish()
            return result

    def _train_step(self, request: TrainRequest) -> TrainResult:
        trainer = self.trainer
        baseline = dict(trainer.moving_baseline.state)
        try:
            result = self._train_on_request(trainer, request)
        except BaseException:
            trainer.moving_baseline.state = baseline
            raise
        if result.skip_reason:
            trainer.moving_baseline.state = baseline
        return result

    def _train_on_request(self, trainer: CheckpointedTrainer, request: TrainRequest) -> TrainResult:
        start, step = time.monotonic(), trainer.step_number
        batch = build_batch(
            request.groups,
            model=self.model.name,
            step=step,
            estimator=request.estimator,
            moving_baseline=trainer.moving_baseline,
            first_group=self.recorder.next_group,
        )
        metrics, skip_reason = batch.metrics, batch.skip_reason
        if not skip_reason:
            metrics, skip_reason = self._train_samples(trainer, request, batch, start)
        if skip_reason:
            self.recorder.commit_skipped(step, batch.rows, skip_reason)
        else:
            self.recorder.deliver(trainer.step_number, metrics)
        return TrainResult(
            step=trainer.step_number, metrics=metrics, checkpoint_path=trainer.checkpoint_path, skip_reason=skip_reason
        )

    def _train_samples(
        self, trainer: CheckpointedTrainer, request: TrainRequest, batch: SampleBatch, start: float
    ) -> tuple[dict[str, float], str]:
        """Train and record a step; return its metrics, and why it was skipped if it was."""
        recorder, step = self.recorder, trainer.step_number + 1
        metrics = dict(batch.metrics)

        def commit(report: StepReport) -> None:
            metrics.update(step_metrics(batch.metrics | report.scalars(), start))
            recorder.write_settings(request, step)
            recorder.commit(step, batch.rows, report, metrics)

        try:
            report = trainer.train_step(
                batch.samples,
                request.objective,
                reference_source=request.reference_source,
                learning_rate=request.learning_rate,
                commit=commit,
            )
        except BaseException:
            recorder.discard_after(trainer.step_number)
            raise
        return metrics if report.stepped else metrics | report.scalars(), report.skip_reason

    async def _publish(self) -> None:
        """Load the last checkpoint into the engine, from its file: what is served is what was saved."""
        assert self.endpoint is not None
        path = self.trainer.checkpoint_path.resolve()
        source = WeightSource.folder(path) if self.trainer.model.peft is None else WeightSource.adapter(path)
        await self.endpoint.run_coroutine(self.endpoint.engine.load_weights(source, self.trainer.step_number))


def _settings(kind: type[SettingsT], value: SettingsT | Mapping[str, Any] | None, table: str) -> SettingsT:
    """Return settings that may be given as a dict."""
    try:
        return kind.model_validate(dict(value)) if isinstance(value, Mapping) else value or kind()
    except ValidationError as error:
        raise to_config_error(error, (table,)) from None


def _check_no_effect_settings(
    settings: EngineSettings | CheckpointSettings, names: tuple[str, ...], table: str
) -> None:
    """Raise for settings of a run without effect here: the engine is local, and every step has a checkpoint."""
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ConfigError(
                f"{table}.{name} = {getattr(settings, name)} has no effect in a LocalBackend; leave it out"
            )
