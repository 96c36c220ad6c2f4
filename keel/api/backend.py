"""Training from a loop of one's own: register a model, let agents talk to it, train on what they did.

Guarantees: after `train` returns, the endpoint samples from the new weights and stamps their step as the version; a
step is whole and on disk, or did not happen; only tokens that the endpoint recorded train; a folder is written by one
backend at a time. Training runs in a thread, and the endpoint answers meanwhile. It schedules nothing and keeps no
ledger of rollouts: the loop is the caller's.
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
    """What a call of `train` did."""

    step: int
    """Of the weights that are live now; one more than before, unless nothing trained."""
    metrics: dict[str, float]
    """The trainer's numbers, and those about groups and trajectories."""
    checkpoint_path: Path
    """The weights of `step`, in the layout of Hugging Face or PEFT."""
    skip_reason: str = ""
    """Why the optimizer did not step; empty when it did."""


class LocalBackend:
    """Engines and trainers in this process, and their folder.

    `path/NAME/checkpoints/step_N` is model NAME after N steps. The newest checkpoints are kept as `checkpoints` says,
    and step 0, the model as it was registered, for good. `trainer`, `engine` and `seed` hold for every model.
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
        """Load the model and open its endpoint. Returns when it answers.

        A folder that has checkpoints is gone on with, from the last whole one; a broken one is a warning.
        """
        if model.name in self._sessions:
            raise ConfigError(f'a model of name "{model.name}" is registered; give this one another name')
        if model._endpoint is not None:
            raise ConfigError(f'model "{model.name}" is registered with another backend; close that first')
        registered = _ModelSession(self, model)
        self._sessions[model.name] = registered
        try:
            await registered.open()
        except BaseException:
            del self._sessions[model.name]
            await registered.close()
            raise

    async def step(self, model: TrainableModel) -> int:
        """How many steps the model has been trained for."""
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
        """One step on these groups; returns when its checkpoint is written and the endpoint samples from it.

        `learning_rate`: not given, the one in the backend's `trainer` settings. `zero_variance_groups`: whether
        groups whose advantages are all zero are dropped ("drop") or trained ("train": they count in means, and
        penalties act on them); not given, as in `advantages`, which drops them by default. `kl_penalty_coef` adds the
        centred drift from a reference to the advantages (docs/objectives.md); the reference is a checkpoint of this
        model, an adapter of its base, or the base itself when neither is given.

        What cannot act, and trajectories that were not recorded by the endpoint, are refused before anything changes.
        Calls for one model take turns. Cancelling the call does not undo the step: it goes on to its end.
        """
        registered = self._session_for(model)
        wish = TrainRequest.from_arguments(
            groups,
            objective=objective,
            learning_rate=learning_rate,
            advantages=advantages,
            zero_variance_groups=zero_variance_groups,
            kl_penalty_coef=kl_penalty_coef,
            kl_penalty_reference_step=kl_penalty_reference_step,
            kl_ref_adapter_path=kl_ref_adapter_path,
        )
        return await asyncio.shield(registered.start_training(wish))

    async def close(self) -> None:
        """Wait for training that is under way, then stop the endpoints and give the folders back."""
        while self._sessions:
            _, registered = self._sessions.popitem()
            await registered.close()

    def _session_for(self, model: TrainableModel) -> "_ModelSession":
        found = self._sessions.get(model.name)
        if found is None or found.model is not model:
            raise KeelError(f'model "{model.name}" is not registered here: await backend.register(model) first')
        return found


class _ModelSession:
    """A model with its trainer, its server and its lock."""

    def __init__(self, backend: LocalBackend, model: TrainableModel) -> None:
        self.backend = backend
        self.model = model
        self.folder = backend.path / model.name
        self._lock = FileLock(self.folder / ".lock", timeout=0)
        # a thread of its own: torch keeps its worker threads with the thread that calls it
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
                f"{self.folder} is in use by another backend; close that, or use another path or name"
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
        # after whatever that thread is still doing, and there because the lock belongs to the thread that took it
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
        learner = self.trainer
        baseline = dict(learner.moving_baseline.state)
        try:
            result = self._train_on_request(learner, request)
        except BaseException:
            learner.moving_baseline.state = baseline
            raise
        if result.skip_reason:
            learner.moving_baseline.state = baseline
        return result

    def _train_on_request(self, trainer: CheckpointedTrainer, request: TrainRequest) -> TrainResult:
        batch = build_batch(
            request.groups,
            model=self.model.name,
            step=trainer.step_number,
            estimator=request.estimator,
            moving_baseline=trainer.moving_baseline,
        )
        metrics, why_not = batch.metrics, batch.skip_reason
        if not why_not:
            report = trainer.train_step(
                batch.samples,
                request.objective,
                reference_source=request.reference_source,
                learning_rate=request.learning_rate,
            )
            metrics, why_not = metrics | report.scalars(), report.skip_reason
        return TrainResult(
            step=trainer.step_number, metrics=metrics, checkpoint_path=trainer.checkpoint_path, skip_reason=why_not
        )

    async def _publish(self) -> None:
        """Give the engine the weights of the last checkpoint, by the file: what is served is what was saved."""
        assert self.endpoint is not None
        path = self.trainer.checkpoint_path.resolve()
        source = WeightSource.folder(path) if self.trainer.model.peft is None else WeightSource.adapter(path)
        await self.endpoint.run_coroutine(self.endpoint.engine.load_weights(source, self.trainer.step_number))


def _check_no_effect_settings(
    settings: EngineSettings | CheckpointSettings, names: tuple[str, ...], table: str
) -> None:
    """Settings of a run that mean nothing here: the engine is in this process, and every step has a checkpoint."""
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ConfigError(f"{table}.{name} = {getattr(settings, name)} cannot act in a LocalBackend; leave it out")
