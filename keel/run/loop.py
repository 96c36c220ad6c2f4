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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from keel.common.atomic_files import hash_file
from keel.common.openmp import OpenMPReleasingExecutor
from keel.config import ReferenceSettings
from keel.errors import InvalidSignalError, KeelError, StepSkippedError, StorageError
from keel.inference.protocol import Engine
from keel.rollout.environments.environment import close_environments
from keel.rollout.episode_runner import EpisodeRunner, build_environments
from keel.rollout.policy_client import derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.scheduler.accounts import NothingToTrain, RolloutBatch, RolloutFailures, TasksExhausted
from keel.rollout.scheduler.scheduler import Scheduler
from keel.run import records, scoring
from keel.run.engine_factory import PublishingEngine, open_engine
from keel.run.evaluate import EvaluationResult, evaluate
from keel.run.folder import DISK_ERRNOS, RunFolder
from keel.run.live_status import LiveStatus
from keel.run.monitor.callbacks import NullCallback, RunCallback
from keel.run.records import SampleRecord
from keel.run.watchdog import DEFAULT_STALL_TIMEOUT, Watchdog
from keel.signal import MovingBaseline
from keel.signal import objective as make_objective
from keel.training import Checkpoints, StepReport, Trainer
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.distributed.world import RankInfo
from keel.training.step.malloc import retain_freed_memory

ResultT = TypeVar("ResultT")

POLL_SECONDS = 0.5
"""Seconds between two status updates while waiting."""
OVERRUN_GRACE = 60.0
"""Seconds after its timeout at which an episode that ignores it is dropped."""
STOP_GRACE = 5.0
"""Seconds without a successful rollout after which a run that is stopping no longer waits for rollouts that fail."""


class _SamplingAbandoned(KeelError):
    """Raised while a run is stopping and its batch may never be complete."""


class TrainingRun:
    """One run in its folder. `train` continues from its current step to the last one."""

    def __init__(
        self,
        folder: RunFolder,
        callback: RunCallback | None = None,
        on_hang: Callable[[str], None] | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        """`on_hang` is called from a thread, with the reason, when the run hangs and cannot be ended; see `Watchdog`.

        `rank_info` is this process's position among the trainer's ranks if a launcher started it; None: the run starts
        the ranks.
        """
        self.folder, self.settings, self.ledger = folder, folder.settings, folder.ledger
        self.callback: RunCallback = callback or NullCallback()
        settings = self.settings
        self.environments = build_environments(settings)
        self.objective = make_objective(settings.objective.table)
        self.checkpoints = Checkpoints(folder.checkpoints, settings.checkpoints)
        self.step = self.version = self._saved_step = 0
        self._stopping, self._mismatch_count = False, 0
        self._failures_shown = RolloutFailures()
        self._rank_processes = RankProcesses(settings.trainer, rank_info)
        self._threads = torch.get_num_threads()
        self._live_status = LiveStatus(folder.path)
        self._max_episode_seconds = max((env.limits.timeout for env in self.environments.values()), default=0.0)
        limit = settings.stall_timeout or max(DEFAULT_STALL_TIMEOUT, 3 * self._max_episode_seconds)
        self._watchdog = Watchdog(limit, self.callback.notice, on_hang)
        self._engine: Engine | None = None
        self._moving_baseline = MovingBaseline() if settings.advantages.name == "moving_baseline" else None

    @property
    def synchronous(self) -> bool:
        return self.settings.scheduler.max_off_policy_steps == 0

    def stop(self) -> None:
        """Finish the current step, save and end."""
        self._stopping = True
        self.callback.notice(f"finishing step {self.step + 1}; interrupt again to stop immediately")

    async def train(self) -> None:
        """Train from the current step to the end, or until `stop` is called.

        If no optimizer step was taken because every rollout failed, the status in the ledger is "failed".
        """
        self.ledger.set_status("running")
        try:
            retain_freed_memory(self.settings.trainer.retain_freed_memory)
            asyncio.get_running_loop().set_default_executor(OpenMPReleasingExecutor())
            with self._watchdog, self._rank_processes:
                await asyncio.to_thread(self._load)
                self._watchdog.set_activity("starting the engine")
                async with open_engine(self.settings, self.trainer.model, self.folder.weights) as engine:
                    self._engine = engine.engine
                    try:
                        await self._train(engine)
                    finally:
                        await close_environments(table.environment for table in self.environments.values())
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            with suppress(StorageError):  # a full disk is already the error being raised
                self.ledger.set_status("stopped" if stopped else "failed", f"{type(error).__name__}: {error}")
            if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
                raise StorageError(f"{error}; free space or fix the disk, then rerun with --resume") from error
            raise
        finally:
            self._live_status.remove()
            torch.set_num_threads(self._threads)
        if self._is_complete and (problem := scoring.all_rollouts_failed(self.ledger)):
            self.ledger.set_status("failed", problem)
        else:
            self.ledger.set_status("finished" if self._is_complete else "stopped")

    @property
    def _is_complete(self) -> bool:
        """Whether there is nothing left to resume."""
        return self.step >= self.settings.steps or not self._stopping

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
        scheduler_state = scheduler.snapshot()  # of everything outside the batch
        sampled = time.monotonic()
        rows = scoring.score_batch(batch, self.settings.advantages, self._moving_baseline)
        if engine.snapshotting:
            await self._await_with_status("publishing", engine.snapshot_done())
        report = await self._train_batch(rows)
        trained = time.monotonic()
        times = {"sampling_seconds": sampled - start, "training_seconds": trained - sampled}
        times["publishing_seconds"] = engine.seconds  # of the last publication, until it was live
        metrics = await asyncio.to_thread(self._commit_step, batch, rows, report, scheduler_state, times, start)
        self.callback.step(self.step, metrics)
        if warning := scoring.mismatch_warning(metrics):
            if self._mismatch_count % scoring.WARN_EVERY == 0:
                self.callback.notice(f"step {self.step}: {warning}")
            self._mismatch_count += 1
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
            self.ledger.write_dropped(self.step, scoring.outcomes(rows), self._resume_state(scheduler.snapshot()))
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

    async def _train_batch(self, rows: list[SampleRecord]) -> StepReport | None:
        """Train on the batch and return the report; None if nothing is left to train on.

        Samples whose gradient is not finite are dropped, and the rest of the batch trains without them.
        """
        before = self.trainer.steps
        while left := records.trained_rows(rows):
            try:
                return await self._await_with_status("training", asyncio.to_thread(self._train_once, rows))
            except InvalidSignalError as error:
                reason, message, bad = "invalid_logprobs", str(error), left
            except StepSkippedError as error:
                reason, message = "non_finite_gradient", str(error)
                if self.trainer.steps != before:
                    raise  # some of several optimizer steps were taken: resume from the committed state
                bad = [left[index] for index in error.samples] or left
            self.callback.notice(f"step {self.step + 1}: {len(bad)} of {len(left)} samples are dropped: {message}")
            dropped = {(row.group, row.member) for row in bad}
            for row in left:
                if (row.group, row.member) in dropped:
                    row.outcome, row.reason, row.error = "dropped", reason, message
        return None

    def _train_once(self, rows: list[SampleRecord]) -> StepReport:
        torch.set_num_threads(self._threads)  # an engine in this process may have changed it for new threads
        report = self.trainer.step(records.trained_samples(rows), self.objective, version=self.version)
        records.attach_token_report(rows, report)
        return report

    def _commit_step(
        self,
        batch: RolloutBatch,
        rows: list[SampleRecord],
        report: StepReport | None,
        scheduler_state: Mapping[str, Any],
        timings: Mapping[str, float],
        start_time: float,
    ) -> dict[str, float]:
        """Commit the step and return its metrics."""
        step, stepped = self.step + 1, report is not None and report.stepped
        record = records.write_step(self.folder.rollouts, step, self.version, rows, self._token_texts.lookup(rows))
        metrics = report.scalars() if report is not None else {}
        metrics |= (
            scoring.batch_metrics(batch, rows, self.version)
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
        )
        self.step, self.version = step, version
        return metrics

    def _save(self) -> None:
        """Write a checkpoint of the committed step unless it exists, and the metrics of all steps as a table."""
        if self.step != self._saved_step:
            self.trainer.save(self.checkpoints, self.step, {"version": self.version})
            self._saved_step = self.step
        records.write_metrics(self.folder.metrics, [{"step": row.step, **row.metrics} for row in self.ledger.steps()])

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
        settings = self.settings
        self.callback.waiting(f"loading {settings.model.name}")
        self._watchdog.set_activity(f"loading {settings.model.name}")
        self.trainer = Trainer(
            settings.model,
            settings.trainer_with_schedule,
            teacher=settings.teacher,
            seed=settings.seed,
            world=self._rank_processes.join(),
        )
        self._threads = torch.get_num_threads()  # fewer, where ranks share a machine
        self._token_texts = records.TokenTexts(self.trainer.model.tokenizer)
        self.renderer = Renderer(self.trainer.model.tokenizer, settings.renderer)
        if self.objective.composition.reads("reference"):
            self._load_references()
        last, saved = self.ledger.last_step, self.checkpoints.latest() or 0
        if saved > last:
            raise KeelError(
                f"{self.checkpoints.path(saved)} is newer than the ledger, whose last step is {last}; remove that"
                " folder, or restore run.db"
            )
        if saved:
            self.version = int(self.trainer.load(self.checkpoints, saved)["version"])
        self._replay(saved)
        self.step, self._saved_step = last, saved

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

    def _replay(self, saved_step: int) -> None:
        """Train the committed steps after a checkpoint again, on the same tokens."""
        for row in self.ledger.steps(after=saved_step):
            suffix = ", with the changed settings" if self.folder.settings_changed else ""
            self.callback.notice(f"step {row.step} is trained again from its record{suffix}")
            self._watchdog.set_activity(f"training step {row.step} again")
            self._watchdog.progress()
            rows = records.read_step(
                records.step_path(self.folder.rollouts, row.step), self.ledger.record_hash(row.step)
            )
            if row.stepped:
                report = self.trainer.step(records.trained_samples(rows), self.objective, version=self.version)
                if not report.stepped:
                    raise KeelError(f"step {row.step} was trained before and now cannot be: {report.skip_reason}")
            self.version += row.stepped

    @asynccontextmanager
    async def _open_scheduler(self, engine: PublishingEngine) -> AsyncIterator[Scheduler]:
        """Open the scheduler in its last state; when the run is over, record rollouts that never reached a batch."""
        # a synchronous run samples an interrupted batch again: completions depend on the batch they are decoded in
        store = None if self.synchronous else self.ledger
        vocabulary = self.trainer.model.head.out_features
        episodes = EpisodeRunner(self.environments, engine.engine, self.renderer, self.settings.seed, store, vocabulary)
        sources = [environment.task_source(name) for name, environment in self.environments.items()]
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

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _await_with_status(
        self,
        status: str | Callable[[], str],
        awaitable: Awaitable[ResultT],
        progress_mark: Callable[[], object] = lambda: "none",
    ) -> ResultT:
        """Await and report the status meanwhile. `progress_mark` returns a value that changes with progress."""
        task: asyncio.Future[ResultT] = asyncio.ensure_future(awaitable)
        self._watchdog.progress()
        try:
            while not task.done():
                self._rank_processes.check_alive()
                activity = status() if callable(status) else status
                self.callback.waiting(activity)
                self._watchdog.set_activity(f"{activity}; engines: {self._live_status.engine_status or 'unknown'}")
                self._watchdog.progress(progress_mark())
                await self._live_status.write(activity, self._engine)
                await asyncio.wait({task}, timeout=POLL_SECONDS)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
