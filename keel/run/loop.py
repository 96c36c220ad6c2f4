"""The training loop: take groups, score them, train, record, publish, evaluate; and resume after any interruption.

A step is committed by one ledger transaction, after its rollouts are on disk and before its weights are published.
Therefore a killed run resumes after the last committed step; committed steps newer than the last checkpoint are
trained again from their records, on the same tokens, to the same weights; and no rollout has two outcomes. With
`scheduler.max_off_policy_steps` = 0 a run is synchronous, and bit-identical however often it was interrupted.
Groups, gates and tokens are decided elsewhere: by the scheduler, the objective and the trainer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from keel.common.atomic_files import hash_file
from keel.config import ReferenceSettings
from keel.errors import KeelError
from keel.rollout.environments.environment import close_environments
from keel.rollout.episode_runner import EpisodeRunner, build_environments, check_prompt_lengths
from keel.rollout.policy_client import derive_seed
from keel.rollout.scheduler.accounts import NothingToTrain, RolloutBatch, RolloutFailures, TasksExhausted
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskChanges
from keel.run import records, scoring
from keel.run.checkpointed_run import CheckpointedRun
from keel.run.engine_factory import PublishingEngine, open_engine
from keel.run.evaluation.evaluate import EvaluationResult, evaluate
from keel.run.evaluation.evaluation_records import write_evaluation
from keel.run.folder import RunFolder
from keel.run.monitor.callbacks import RunCallback
from keel.run.records import SampleRecord
from keel.run.watchdog import DEFAULT_STALL_TIMEOUT
from keel.signal import MovingBaseline
from keel.signal.audit.loss_function_check import check_loss_function
from keel.signal.function_objective import FunctionObjective
from keel.training import StepReport
from keel.training.distributed.world import RankInfo

OVERRUN_GRACE = 60.0
"""Seconds after its timeout at which an episode that ignores it is dropped."""
STOP_GRACE = 5.0
"""Seconds without a successful rollout after which a run that is stopping no longer waits for rollouts that fail."""


class _SamplingAbandoned(KeelError):
    """Raised while a run is stopping and its batch may never be complete."""


class TrainingRun(CheckpointedRun):
    """Reinforcement learning: sample groups, score them, train on them, publish the weights.

    If no optimizer step was taken because every rollout failed, the run's status in the ledger is "failed".
    """

    def __init__(
        self,
        folder: RunFolder,
        callback: RunCallback | None = None,
        on_hang: Callable[[str], None] | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        self.environments = build_environments(folder.settings)
        self._max_episode_seconds = max((env.limits.timeout for env in self.environments.values()), default=0.0)
        stall_timeout = folder.settings.stall_timeout or max(DEFAULT_STALL_TIMEOUT, 3 * self._max_episode_seconds)
        super().__init__(folder, callback, on_hang, rank_info, stall_timeout)
        if isinstance(self.objective, FunctionObjective):
            self._check_loss_function(self.objective)
        self._mismatch_count = 0
        self._failures_shown = RolloutFailures()
        uses_moving_baseline = self.settings.advantages.name == "moving_baseline"
        self._moving_baseline = MovingBaseline() if uses_moving_baseline else None

    def _check_loss_function(self, function: FunctionObjective) -> None:
        """Audit a loss function, and record its source, which must not change while the run can be resumed."""
        setting, source_hash = f'objective.name = "{function.name}"', function.source_hash
        if self.folder.is_new_source(setting, source_hash):
            check_loss_function(function, self.callback.notice)
            self.folder.record_source(setting, source_hash)

    @property
    def synchronous(self) -> bool:
        return self.settings.scheduler.max_off_policy_steps == 0

    def _failure(self) -> str | None:
        return scoring.all_rollouts_failed(self.ledger)

    async def _run(self) -> None:
        self._watchdog.set_activity("starting the engine")
        async with open_engine(self.settings, self.trainer.model, self.folder.weights) as engine:
            self._engine = engine.engine
            try:
                await self._train(engine)
            finally:
                await close_environments(table.environment for table in self.environments.values())

    async def _train(self, engine: PublishingEngine) -> None:
        self.callback.started(self.folder.path.name, self.folder.path, self.settings.steps, self.step)
        if self.version or self.settings.engine.kind == "pool":
            # servers that ran before may hold any weights
            await engine.publish(self.version)
            await self._await_with_status("publishing", engine.wait_live())
        async with self._open_scheduler(engine) as scheduler:
            await self._evaluate(engine)
            while self.step < self.settings.steps and not self._stopping:
                try:
                    await self._run_step(scheduler, engine)
                except TasksExhausted as end:
                    self.callback.notice(str(end))
                    break
        await self._await_with_status("publishing", engine.wait_live())
        await asyncio.to_thread(self._save)
        if self._is_complete:
            await self._evaluate(engine, final=True)

    async def _run_step(self, scheduler: Scheduler, engine: PublishingEngine) -> None:
        """Run the stages of a step, in order."""
        start = time.monotonic()
        if self.synchronous:
            await engine.clear_prefix_cache()
        try:
            batch = await self._next_batch(scheduler, engine)
        except _SamplingAbandoned as abandoned:
            self.callback.notice(str(abandoned))
            return
        self.folder.sampled = True
        scheduler_state, tasks = (
            scheduler.snapshot(),
            scheduler.drain_task_changes(),
        )  # before the next batch is sampled
        sampled = time.monotonic()
        rows = scoring.score_batch(batch, self.settings.advantages, self._moving_baseline)
        if engine.snapshotting:
            await self._await_with_status("publishing", engine.snapshot_done())
        report = await self._train_batch(rows)
        trained = time.monotonic()
        times = {"sampling_seconds": sampled - start, "training_seconds": trained - sampled}
        times["publishing_seconds"] = engine.seconds  # of the last publication, until it was live
        metrics = await asyncio.to_thread(self._commit_step, batch, rows, report, scheduler_state, tasks, times, start)
        self.callback.step(self.step, metrics)
        if warning := scoring.mismatch_warning(metrics):
            if self._mismatch_count % scoring.WARN_EVERY == 0:
                self.callback.notice(f"step {self.step}: {warning}")
            self._mismatch_count += 1
        if self.step == scoring.CONSTANT_STEPS:
            warning = scoring.constant_reward_warning([row.metrics for row in self.ledger.steps()])
            if warning is not None:
                self.callback.notice(f"WARNING: {warning}")
        scoring.stop_if_nothing_trains(self.ledger, self.step, self.settings.scheduler.max_empty_steps)
        if report is not None and report.stepped and self.version % self.settings.publish.every == 0:
            await self._await_with_status("publishing", engine.publish(self.version))
        if self.step % self.settings.checkpoints.every == 0:
            await engine.snapshot_done()
            await self._await_with_status("saving", asyncio.to_thread(self._save))
        evaluation = self.settings.evaluation
        if evaluation.when == "always" and self.step % evaluation.every == 0 and self.step < self.settings.steps:
            await self._evaluate(engine)

    # -- stages -------------------------------------------------------------------------------------------------------

    async def _next_batch(self, scheduler: Scheduler, engine: PublishingEngine) -> RolloutBatch:
        """Return the next batch; a publication may be in flight meanwhile."""
        check_stopping = self._stopping_check(scheduler)

        def status() -> str:
            check_stopping()
            self._show_failures(scheduler.failures)
            return f"sampling: {scheduler.status()}"

        try:
            return await self._await_with_status(
                status,
                engine.run_alongside(scheduler.next_batch(self.version)),
                progress_mark=lambda: ("completed", scheduler.completed),
            )
        except NothingToTrain as halt:
            rows = scoring.dropped_rows(halt.batch.dropped)
            self.ledger.write_dropped(
                self.step,
                scoring.outcomes(rows),
                self._resume_state(scheduler.snapshot()),
                scheduler.drain_task_changes().records,
            )
            raise
        finally:
            self._show_failures(scheduler.failures)

    def _show_failures(self, failures: RolloutFailures) -> None:
        """Report failed rollouts to the callback, if there are new ones."""
        if failures != self._failures_shown:
            self._failures_shown = failures
            self.callback.rollouts_failed(failures.total, failures.last_error)

    def _stopping_check(self, scheduler: Scheduler) -> Callable[[], None]:
        """Return a function that raises once the run is stopping and its rollouts only fail or wait for a retry.

        The step is then not part of the run: as after a kill, it is sampled again when the run resumes.
        """
        completed, failed, since = -1, 0, 0.0

        def check() -> None:
            nonlocal completed, failed, since
            if not self._stopping:
                return
            if completed != scheduler.completed:
                completed, failed, since = scheduler.completed, scheduler.failed, time.monotonic()
            status = scheduler.status()
            fails = scheduler.failed > failed or not (status.in_flight or status.scoring)
            if fails and time.monotonic() - since >= STOP_GRACE:
                raise _SamplingAbandoned(
                    f"stopping without step {self.step + 1}: no rollout succeeded for {STOP_GRACE:g} s; the last error:"
                    f" {status.last_error}"
                )

        return check

    def _commit_step(
        self,
        batch: RolloutBatch,
        rows: list[SampleRecord],
        report: StepReport | None,
        scheduler_state: Mapping[str, Any],
        tasks: TaskChanges,
        timings: Mapping[str, float],
        start_time: float,
    ) -> dict[str, float]:
        """Commit the step and return its metrics."""
        step, stepped = self.step + 1, report is not None and report.stepped
        record = records.write_step(self.folder.rollouts, step, self.version, rows, self._token_texts.lookup(rows))
        metrics = report.scalars() if report is not None else {}
        metrics |= (
            scoring.batch_metrics(batch, rows, self.version)
            | tasks.metrics
            | dict(timings)
            | {"seconds": time.monotonic() - start_time}
        )
        metrics["tokens_per_second"] = metrics.get("trainable_tokens", 0.0) / metrics["seconds"]
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
        version = self.version + stepped
        self.ledger.write_step(
            step,
            version=version,
            stepped=stepped,
            metrics=metrics,
            outcomes=scoring.outcomes(rows),
            state=self._resume_state(scheduler_state),
            record_hash=hash_file(record),
            tasks=tasks.records,
        )
        self.step, self.version = step, version
        return metrics

    async def _evaluate(self, engine: PublishingEngine, *, final: bool = False) -> None:
        """Evaluate the current policy on held-out tasks, at most once per step."""
        evaluation = self.settings.evaluation
        done = {(step, name) for step, name, _ in self.ledger.evaluations()}
        if evaluation.when == "never" or (self.step > 0 and not final and evaluation.when == "start_and_end"):
            return
        for name, environment in self.environments.items():
            if (self.step, name) in done:
                continue
            await self._await_with_status("publishing", engine.wait_live())
            result: EvaluationResult = await evaluate(
                engine.engine,
                self.renderer,
                environment.environment,
                num_tasks=evaluation.num_tasks,
                samples_per_task=evaluation.samples_per_task,
                sampling=evaluation.sampling or environment.sampling,
                limits=environment.limits,
                seed=derive_seed(self.settings.seed, "evaluation"),
                max_in_flight=self.settings.scheduler.max_in_flight,
                progress=partial(self._on_evaluation_progress, name),
                name=name,
            )
            # before the ledger: an evaluation that is recorded has its file, and a repeated one replaces it
            await asyncio.to_thread(write_evaluation, self.folder.evaluations, self.step, name, result.episodes)
            self.ledger.write_evaluation(self.step, name, result.scalars())
            self.callback.evaluated(self.step, result)

    def _on_evaluation_progress(self, name: str, done: int, total: int) -> None:
        status = f"evaluating {name}: {done}/{total}"
        self.callback.waiting(status)
        self._watchdog.set_activity(status)
        self._watchdog.progress(status)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the model, its references and the last checkpoint, and train the steps recorded after it again."""
        self._create_trainer()
        if not self.ledger.last_step:
            config = self.trainer.model.network.config.get_text_config()
            check_prompt_lengths(self.environments, self.renderer, getattr(config, "max_position_embeddings", None))
        if self.objective.composition.reads("reference"):
            self._load_references()
        self._restore()

    def _load_references(self) -> None:
        """Load the frozen policies; the base model if none is named."""
        named = self.settings.references or {"base": ReferenceSettings()}
        sources = {reference.source for reference in named.values()}
        for source in sources:
            if source.startswith("step:"):
                self.checkpoints.pin(int(source.removeprefix("step:")))
        if "step:0" in sources and 0 not in self.checkpoints.steps():
            self.trainer.save(self.checkpoints, 0, {"version": 0})
        self.trainer.set_references(named, self.checkpoints)

    @asynccontextmanager
    async def _open_scheduler(self, engine: PublishingEngine) -> AsyncIterator[Scheduler]:
        """Open the scheduler in its last state; when the run is over, record rollouts that never reached a batch."""
        # a synchronous run samples an interrupted batch again: completions depend on the batch they are decoded in
        store = None if self.synchronous else self.ledger
        vocabulary = self.trainer.model.head.out_features
        episodes = EpisodeRunner(self.environments, engine.engine, self.renderer, self.settings.seed, store, vocabulary)
        sources = [environment.task_source(name, self.settings.seed) for name, environment in self.environments.items()]
        settings, state = self.settings.scheduler, self.ledger.state()
        if settings.rollout_timeout is None:
            settings = settings.model_copy(update={"rollout_timeout": self._max_episode_seconds + OVERRUN_GRACE})
        is_zero_variance = scoring.has_equal_rewards if self.settings.advantages.drops_equal_rewards else None
        if state is None:
            scheduler = Scheduler(
                episodes, sources, settings, is_zero_variance=is_zero_variance, score_group=episodes.score_group
            )
        else:
            scheduler = Scheduler.restore(
                state["scheduler"],
                episodes,
                sources,
                settings,
                lookup=episodes.load_finished,
                task_records=self.ledger.task_records(),
                is_zero_variance=is_zero_variance,
                score_group=episodes.score_group,
            )
            if self._moving_baseline is not None:
                self._moving_baseline.state = {int(agent): value for agent, value in state["moving"].items()}
        scheduler.set_engine_version(self.version)
        engine.on_live = scheduler.set_engine_version  # rollouts started during a publication are one version older
        try:
            yield scheduler
        finally:
            remaining = await scheduler.close()
        if self._is_complete:
            # finished before an interruption, and dispatched again under another key since
            lost = [
                SampleRecord(
                    group,
                    group.rpartition("#")[0],
                    rollout.task_id,
                    member,
                    attempt,
                    reason="interrupted",
                    reward=rollout.reward,
                )
                for group, member, attempt, rollout in self.ledger.unresolved()
            ]
            dropped = (*scoring.outcomes(lost), *scoring.outcomes(scoring.dropped_rows(remaining)))
            outcomes = {outcome[:3]: outcome for outcome in dropped}
            self.ledger.write_dropped(self.step, outcomes.values(), self._resume_state(scheduler.snapshot()))

    def _resume_state(self, scheduler_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state from which the run resumes."""
        moving = (
            {}
            if self._moving_baseline is None
            else {"moving": {str(key): v for key, v in self._moving_baseline.state.items()}}
        )
        return {"scheduler": scheduler_state, **moving}
