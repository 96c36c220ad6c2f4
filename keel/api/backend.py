"""Train from your own loop: register a model, let agents talk to it, train on what they did.

Guarantees: when `train` returns, the endpoint samples from the new weights and stamps their step as the version; a step
is complete and on disk, or did not happen; only tokens that the endpoint recorded train; a folder has one writer.
Training runs in a thread while the endpoint keeps answering. The backend schedules nothing and keeps no ledger of
rollouts: the loop belongs to the caller.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from keel.api.checkpointed_trainer import CheckpointedTrainer
from keel.api.endpoint import ModelEndpoint
from keel.api.samples import build_batch
from keel.api.train_request import ObjectiveLike, TrainRequest
from keel.api.trainable_model import EndpointConnection, TrainableModel
from keel.api.trajectories import TrajectoryGroup
from keel.common.openmp import OpenMPReleasingExecutor
from keel.config import CheckpointSettings, EngineSettings, TrainerSettings
from keel.config.run import AdvantageSettings, ZeroVarianceGroups
from keel.errors import ConfigError, KeelError, ModelError
from keel.inference.protocol import WeightSource
from keel.training import load_model


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

    `path/NAME/checkpoints/step_N` is model NAME after N steps. The newest checkpoints are kept according to
    `checkpoints`; step 0, the model as registered, is always kept. `trainer`, `engine` and `seed` apply to every model.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        trainer: TrainerSettings | None = None,
        checkpoints: CheckpointSettings | None = None,
        engine: EngineSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.path = Path(path)
        self.trainer = trainer or TrainerSettings()
        self.checkpoints = checkpoints or CheckpointSettings()
        self.engine = engine or EngineSettings()
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
        self._trainer = CheckpointedTrainer(
            settings, backend.trainer, self.folder / "checkpoints", backend.checkpoints, backend.seed
        )
        own = load_model(settings.model_copy(update={"lora": None, "gradient_checkpointing": False}), backend.seed)
        self.endpoint = ModelEndpoint(own, self.model.name, backend.engine)
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
        batch = build_batch(
            request.groups,
            model=self.model.name,
            step=trainer.step_number,
            estimator=request.estimator,
            moving_baseline=trainer.moving_baseline,
        )
        metrics, skip_reason = batch.metrics, batch.skip_reason
        if not skip_reason:
            report = trainer.train_step(
                batch.samples,
                request.objective,
                reference_source=request.reference_source,
                learning_rate=request.learning_rate,
            )
            metrics, skip_reason = metrics | report.scalars(), report.skip_reason
        return TrainResult(
            step=trainer.step_number, metrics=metrics, checkpoint_path=trainer.checkpoint_path, skip_reason=skip_reason
        )

    async def _publish(self) -> None:
        """Load the last checkpoint into the engine, from its file: what is served is what was saved."""
        assert self.endpoint is not None
        path = self.trainer.checkpoint_path.resolve()
        source = WeightSource.folder(path) if self.trainer.model.peft is None else WeightSource.adapter(path)
        await self.endpoint.run_coroutine(self.endpoint.engine.load_weights(source, self.trainer.step_number))


def _check_no_effect_settings(
    settings: EngineSettings | CheckpointSettings, names: tuple[str, ...], table: str
) -> None:
    """Raise for settings of a run without effect here: the engine is local, and every step has a checkpoint."""
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ConfigError(
                f"{table}.{name} = {getattr(settings, name)} has no effect in a LocalBackend; leave it out"
            )
