"""The training loop: take groups, score them, train, record, publish, evaluate; and go on after anything.

A step is committed by one transaction of the ledger, after its rollouts are on the disk and before its weights are
published. Guarantees that follow: a run that was killed goes on after the last committed step; committed steps that no
checkpoint holds are trained again from their record, on the same tokens, to the same weights; no rollout has two fates.
With `scheduler.max_off_policy_steps` = 0 a run is synchronous, and equal bit for bit however often it was interrupted.
The loop decides nothing about groups, gates or tokens: those are the scheduler's, the objective's and the trainer's.
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
from keel.common.openmp import Workers
from keel.config import ReferenceSettings
from keel.errors import KeelError, SignalRefused, StepRefused, StorageError
from keel.inference.protocol import Engine
from keel.rollout.episode_runner import Episodes, arenas
from keel.rollout.policy_client import derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.scheduler.accounts import Batch, Exhausted, NothingToTrain
from keel.rollout.scheduler.scheduler import Scheduler
from keel.run import records, scoring
from keel.run.engine_factory import Sampler, sampler
from keel.run.evaluate import Evaluation, evaluate
from keel.run.folder import DISK, RunFolder
from keel.run.live_status import Live
from keel.run.monitor.callbacks import Observer, Silent
from keel.run.records import Row
from keel.run.watchdog import STALL, Watchdog
from keel.signal import MovingBaseline
from keel.signal import objective as make_objective
from keel.training import Checkpoints, StepReport, Trainer
from keel.training.distributed.rank_processes import Crew
from keel.training.distributed.world import Place
from keel.training.step.malloc import keep_memory

Done = TypeVar("Done")

LOOK = 0.5
"""Seconds between two looks at what is being waited for."""
LATE = 60.0
"""Seconds after its time limit at which an episode that ignores it is given up."""


class Run:
    """One run in its folder. `train` goes from wherever it is to its last step."""

    def __init__(
        self,
        folder: RunFolder,
        observer: Observer | None = None,
        abandon: Callable[[str], None] | None = None,
        place: Place | None = None,
    ) -> None:
        """`abandon`: called from a thread, with the reason, when the run hangs and cannot be ended; see `Watchdog`.

        `place`: where a launcher has put this process among the trainer's ranks; None: they are started here.
        """
        self.folder, self.settings, self.ledger = folder, folder.settings, folder.ledger
        self.observer: Observer = observer or Silent()
        settings = self.settings
        self.arenas = arenas(settings)
        self.objective = make_objective(settings.objective.table)
        self.checkpoints = Checkpoints(folder.checkpoints, settings.checkpoints)
        self.step = self.version = self._saved = 0
        self._stopping, self._strange = False, 0
        self._crew = Crew(settings.trainer, place)
        self._threads = torch.get_num_threads()
        self._live = Live(folder.path)
        self._longest = max((arena.limits.seconds for arena in self.arenas.values()), default=0.0)
        limit = settings.stall_after or max(STALL, 3 * self._longest)
        self._watchdog = Watchdog(limit, self.observer.notice, abandon)
        self._engine: Engine | None = None
        self._moving = MovingBaseline() if settings.advantages.name == "moving_baseline" else None

    @property
    def synchronous(self) -> bool:
        return self.settings.scheduler.max_off_policy_steps == 0

    def stop(self) -> None:
        """Finish the step that is under way, save, and end."""
        self._stopping = True
        self.observer.notice(f"finishing step {self.step + 1}; once more to stop at once")

    async def train(self) -> None:
        """From where the run is to its end, or to where it was told to stop."""
        self.ledger.set_status("running")
        try:
            keep_memory(self.settings.trainer.keep_memory)
            asyncio.get_running_loop().set_default_executor(Workers())
            with self._watchdog, self._crew:
                await asyncio.to_thread(self._prepare)
                self._watchdog.say("starting the engine")
                async with sampler(self.settings, self.trainer.model, self.folder.weights) as engine:
                    self._engine = engine.engine
                    await self._train(engine)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            with suppress(StorageError):  # a disk that is full has no room for this either, and is the error already
                self.ledger.set_status("stopped" if stopped else "failed", f"{type(error).__name__}: {error}")
            if isinstance(error, OSError) and error.errno in DISK:
                raise StorageError(f"{error}; make room or mend the disk, then go on with --resume") from error
            raise
        finally:
            self._live.end()
            torch.set_num_threads(self._threads)
        self.ledger.set_status("finished" if self._over else "stopped")

    @property
    def _over(self) -> bool:
        """Whether there is nothing to go on with."""
        return self.step >= self.settings.steps or not self._stopping

    async def _train(self, engine: Sampler) -> None:
        self.observer.started(self.folder.path.name, self.folder.path, self.settings.steps, self.step)
        if self.version or self.settings.engine.kind == "pool":
            # servers that were there before may hold anything
            await engine.publish(self.version)
            await self._telling("publishing", engine.live())
        async with self._scheduler(engine) as scheduler:
            await self._evaluate(engine)
            while self.step < self.settings.steps and not self._stopping:
                try:
                    await self._one_step(scheduler, engine)
                except Exhausted as end:
                    self.observer.notice(str(end))
                    break
        await self._telling("publishing", engine.live())
        await asyncio.to_thread(self._save)
        if self._over:
            await self._evaluate(engine, last=True)

    async def _one_step(self, scheduler: Scheduler, engine: Sampler) -> None:
        """The stages of a step, in order."""
        began = time.monotonic()
        if self.synchronous:
            await engine.forget()
        batch = await self._take(scheduler, engine)
        schedule = scheduler.snapshot()  # of all that is not in the batch
        sampled = time.monotonic()
        rows = scoring.score(batch, self.settings.advantages, self._moving)
        if engine.reading:
            await self._telling("publishing", engine.taken())
        report = await self._update(rows)
        trained = time.monotonic()
        times = {"sampling_seconds": sampled - began, "training_seconds": trained - sampled}
        times["publishing_seconds"] = engine.seconds  # of the last one, until it was live
        numbers = await asyncio.to_thread(self._record, batch, rows, report, schedule, times, began)
        self.observer.step(self.step, numbers)
        if strange := scoring.mismatch(numbers):
            if self._strange % scoring.SELDOM == 0:
                self.observer.notice(f"step {self.step}: {strange}")
            self._strange += 1
        scoring.halt_if_barren(self.ledger, self.step, self.settings.scheduler.halt_after)
        if report is not None and report.stepped and self.version % self.settings.engine.publish_every == 0:
            await self._telling("publishing", engine.publish(self.version))
        if self.step % self.settings.checkpoints.every == 0:
            await engine.taken()
            await self._telling("saving", asyncio.to_thread(self._save))
        evaluation = self.settings.evaluation
        if evaluation.when == "always" and self.step % evaluation.every == 0 and self.step < self.settings.steps:
            await self._evaluate(engine)

    # -- the stages ---------------------------------------------------------------------------------------------------

    async def _take(self, scheduler: Scheduler, engine: Sampler) -> Batch:
        """The next batch, with its state right after it was cut. New weights may be on their way meanwhile."""
        try:
            return await self._telling(
                lambda: f"sampling: {scheduler.status()}",
                engine.beside(scheduler.next_batch(self.version)),
                mark=lambda: ("landed", scheduler.landed),
            )
        except NothingToTrain as halt:
            rows = scoring.refused(halt.batch.refused)
            self.ledger.write_refused(self.step, scoring.fates(rows), self._state(scheduler.snapshot()))
            raise

    async def _update(self, rows: list[Row]) -> StepReport | None:
        """Train on what the batch has to train on; none when that is nothing.

        Samples whose gradient is not finite are refused, and the rest of the batch trains without them.
        """
        before = self.trainer.steps
        while left := records.trained(rows):
            try:
                return await self._telling("training", asyncio.to_thread(self._trained, rows))
            except SignalRefused as error:
                reason, said, bad = "damaged", str(error), left
            except StepRefused as error:
                reason, said = "not_finite", str(error)
                if self.trainer.steps != before:
                    raise  # some of several updates were taken: the committed state is the one to go on from
                bad = [left[number] for number in error.samples] or left
            self.observer.notice(f"step {self.step + 1}: {len(bad)} of {len(left)} samples are refused: {said}")
            names = {(row.group, row.member) for row in bad}
            for row in left:
                if (row.group, row.member) in names:
                    row.fate, row.reason, row.error = "refused", reason, said
        return None

    def _trained(self, rows: list[Row]) -> StepReport:
        torch.set_num_threads(self._threads)  # an engine in this process may have changed it for new threads
        report = self.trainer.step(records.samples_of(rows), self.objective, version=self.version)
        records.account_for(rows, report)
        return report

    def _record(
        self,
        batch: Batch,
        rows: list[Row],
        report: StepReport | None,
        schedule: Mapping[str, Any],
        times: Mapping[str, float],
        began: float,
    ) -> dict[str, float]:
        """Commit the step; its numbers."""
        step, stepped = self.step + 1, report is not None and report.stepped
        record = records.write(self.folder.rollouts, step, self.version, rows, self._pieces.of(rows))
        numbers = report.numbers() if report is not None else {}
        numbers |= scoring.numbers(batch, rows, self.version) | dict(times) | {"seconds": time.monotonic() - began}
        numbers["tokens_per_second"] = numbers.get("tokens", 0.0) / numbers["seconds"]
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no word for NaN
        version = self.version + stepped
        self.ledger.write_step(
            step,
            version=version,
            stepped=stepped,
            numbers=numbers,
            fates=scoring.fates(rows),
            state=self._state(schedule),
            record=hash_file(record),
        )
        self.step, self.version = step, version
        return numbers

    def _save(self) -> None:
        """A checkpoint of the committed step, unless there is one; and the numbers so far as a table."""
        if self.step != self._saved:
            self.trainer.save(self.checkpoints, self.step, {"version": self.version})
            self._saved = self.step
        records.write_metrics(self.folder.metrics, [{"step": row.step, **row.numbers} for row in self.ledger.steps()])

    async def _evaluate(self, engine: Sampler, *, last: bool = False) -> None:
        """The policy as it is on held-out tasks, once a step."""
        chosen = self.settings.evaluation
        done = {(step, name) for step, name, _ in self.ledger.evaluations()}
        if chosen.when == "never" or (self.step > 0 and not last and chosen.when == "ends"):
            return
        for name, arena in self.arenas.items():
            if (self.step, name) in done:
                continue
            await self._telling("publishing", engine.live())
            found: Evaluation = await evaluate(
                engine.engine,
                self.renderer,
                arena.environment,
                tasks=chosen.tasks,
                samples=chosen.samples,
                sampling=chosen.sampling or arena.sampling,
                limits=arena.limits,
                seed=derive_seed(self.settings.seed, "evaluation"),
                in_flight=self.settings.scheduler.max_in_flight,
                progress=partial(self._evaluating, name),
                name=name,
            )
            self.ledger.write_evaluation(self.step, name, found.numbers())
            self.observer.evaluated(self.step, found)

    def _evaluating(self, name: str, ended: int, of: int) -> None:
        doing = f"evaluating {name}: {ended}/{of}"
        self.observer.waiting(doing)
        self._watchdog.say(doing)
        self._watchdog.progress(doing)

    # -- going on -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Load the model, its references and the last checkpoint, and train again what was recorded after it."""
        settings = self.settings
        self.observer.waiting(f"loading {settings.model.name}")
        self._watchdog.say(f"loading {settings.model.name}")
        self.trainer = Trainer(
            settings.model, settings.trainer, teacher=settings.teacher, seed=settings.seed, world=self._crew.join()
        )
        self._threads = torch.get_num_threads()  # fewer, where ranks share a machine
        self._pieces = records.Pieces(self.trainer.model.tokenizer)
        self.renderer = Renderer(self.trainer.model.tokenizer, settings.renderer)
        if self.objective.composition.reads("reference"):
            self._reference()
        last, saved = self.ledger.last_step, self.checkpoints.latest() or 0
        if saved > last:
            raise KeelError(
                f"{self.checkpoints.path(saved)} is newer than the ledger, which ends with step {last}; remove that"
                " folder, or restore run.db"
            )
        if saved:
            self.version = int(self.trainer.load(self.checkpoints, saved)["version"])
        self._replay(saved)
        self.step, self._saved = last, saved

    def _reference(self) -> None:
        """The frozen policies; the base model where none is named."""
        named = self.settings.references or {"base": ReferenceSettings()}
        for one in named.values():
            if one.source.startswith("step:"):
                self.checkpoints.pin(int(one.source.removeprefix("step:")))
        if "step:0" in {one.source for one in named.values()} and 0 not in self.checkpoints.steps():
            self.trainer.save(self.checkpoints, 0, {"version": 0})
        self.trainer.refer(named, self.checkpoints)

    def _replay(self, saved: int) -> None:
        """Train the committed steps after a checkpoint again, on the tokens that they were trained on."""
        for row in self.ledger.steps(after=saved):
            how = ", with the settings as they are now" if self.folder.changed else ""
            self.observer.notice(f"step {row.step} is trained again from its record{how}")
            self._watchdog.say(f"training step {row.step} again")
            self._watchdog.progress()
            rows = records.read(records.path_of(self.folder.rollouts, row.step), self.ledger.record_of(row.step))
            if row.stepped:
                report = self.trainer.step(records.samples_of(rows), self.objective, version=self.version)
                if not report.stepped:
                    raise KeelError(f"step {row.step} was trained and cannot be again: {report.why_not}")
            self.version += row.stepped

    @asynccontextmanager
    async def _scheduler(self, engine: Sampler) -> AsyncIterator[Scheduler]:
        """The schedule where it was left; what never came to a batch is written down when the run is over."""
        # a synchronous run samples an interrupted batch again, whole: answers depend on what is decoded beside them
        kept = None if self.synchronous else self.ledger
        vocabulary = self.trainer.model.head.out_features
        episodes = Episodes(self.arenas, engine.engine, self.renderer, self.settings.seed, kept, vocabulary)
        sources = [arena.source(name) for name, arena in self.arenas.items()]
        settings, state = self.settings.scheduler, self.ledger.state()
        if settings.watchdog is None:
            settings = settings.model_copy(update={"watchdog": self._longest + LATE})
        if state is None:
            scheduler = Scheduler(episodes, sources, settings)
        else:
            scheduler = Scheduler.restore(state["scheduler"], episodes, sources, settings, recall=episodes.recall)
            if self._moving is not None:
                self._moving.state = {int(agent): value for agent, value in state["moving"].items()}
        scheduler.live(self.version)
        engine.told = scheduler.live  # while weights travel, what is begun is a version older
        try:
            yield scheduler
        finally:
            left = await scheduler.close()
        if self._over:
            # what had ended in an earlier life, and was dispatched under another name in this one
            lost = [
                Row(group, group.rpartition("#")[0], one.task_id, member, attempt, reason="restart", reward=one.reward)
                for group, member, attempt, one in self.ledger.left_over()
            ]
            fates = {fate[:3]: fate for fate in (*scoring.fates(lost), *scoring.fates(scoring.refused(left)))}
            self.ledger.write_refused(self.step, fates.values(), self._state(scheduler.snapshot()))

    def _state(self, schedule: Mapping[str, Any]) -> dict[str, Any]:
        """From where the run goes on."""
        moving = {} if self._moving is None else {"moving": {str(key): v for key, v in self._moving.state.items()}}
        return {"scheduler": schedule, **moving}

    # -- small things -------------------------------------------------------------------------------------------------

    async def _telling(
        self, what: str | Callable[[], str], work: Awaitable[Done], mark: Callable[[], object] = lambda: "none"
    ) -> Done:
        """Await something, and say now and then what is being waited for. `mark` changes as it makes progress."""
        task: asyncio.Future[Done] = asyncio.ensure_future(work)
        self._watchdog.progress()
        try:
            while not task.done():
                self._crew.check()
                doing = what() if callable(what) else what
                self.observer.waiting(doing)
                self._watchdog.say(f"{doing}; engines: {self._live.engines or 'unknown'}")
                self._watchdog.progress(mark())
                await self._live.say(doing, self._engine)
                await asyncio.wait({task}, timeout=LOOK)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
