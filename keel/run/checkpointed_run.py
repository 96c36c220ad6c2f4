"""What every kind of training run shares: its status in the ledger, checkpoints, replay of recorded steps, waiting.

A step is committed by one ledger transaction after its samples are on disk. A run that resumes loads the last
checkpoint and trains the committed steps after it again from their records, on the same tokens, to the same weights.
Where samples come from is up to the subclasses: rollouts in `keel.run.loop`, conversations in `keel.run.sft`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import torch

from keel.common.openmp import OpenMPReleasingExecutor
from keel.errors import InvalidSignalError, KeelError, StepSkippedError, StorageError
from keel.inference.protocol import Engine
from keel.rollout.rendering.renderer import Renderer
from keel.run import records
from keel.run.folder import DISK_ERRNOS, RunFolder
from keel.run.live_status import LiveStatus
from keel.run.monitor.callbacks import NullCallback, RunCallback
from keel.run.records import SampleRecord
from keel.run.watchdog import Watchdog
from keel.signal import objective as make_objective
from keel.training import Checkpoints, StepReport, Trainer
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.distributed.world import RankInfo
from keel.training.step.malloc import retain_freed_memory

ResultT = TypeVar("ResultT")

POLL_SECONDS = 0.5
"""Seconds between two status updates while waiting."""


class CheckpointedRun(ABC):
    """One run in its folder. `train` continues from its current step to the last one."""

    def __init__(
        self,
        folder: RunFolder,
        callback: RunCallback | None,
        on_hang: Callable[[str], None] | None,
        rank_info: RankInfo | None,
        stall_timeout: float,
    ) -> None:
        """`on_hang` is called from a thread, with the reason, when the run hangs and cannot be ended; see `Watchdog`.

        `rank_info` is this process's position among the trainer's ranks if a launcher started it; None: the run starts
        the ranks.
        """
        self.folder, self.settings, self.ledger = folder, folder.settings, folder.ledger
        self.callback: RunCallback = callback or NullCallback()
        self.objective = make_objective(self.settings.objective.table)
        self.checkpoints = Checkpoints(folder.checkpoints, self.settings.checkpoints)
        self.step = self.version = self._saved_step = 0
        self._stopping = False
        self._rank_processes = RankProcesses(self.settings.trainer, rank_info)
        self._threads = torch.get_num_threads()
        self._live_status = LiveStatus(folder.path)
        self._watchdog = Watchdog(stall_timeout, self.callback.notice, on_hang)
        self._engine: Engine | None = None

    @abstractmethod
    def _load(self) -> None:
        """Load the model and the last checkpoint, and train the steps recorded after it again."""

    @abstractmethod
    async def _run(self) -> None:
        """Train the remaining steps, after `_load`."""

    @property
    def _staleness_version(self) -> int | None:
        """The version from which the staleness of tokens is counted; None if tokens have none."""
        return self.version

    def _failure(self) -> str | None:
        """Return why a complete run counts as failed; None if it does not."""
        return None

    def stop(self) -> None:
        """Finish the current step, save and end."""
        self._stopping = True
        self.callback.notice(f"finishing step {self.step + 1}; interrupt again to stop immediately")

    async def train(self) -> None:
        """Train from the current step to the end, or until `stop` is called; the ledger has the status afterwards."""
        self.ledger.set_status("running")
        try:
            retain_freed_memory(self.settings.trainer.retain_freed_memory)
            asyncio.get_running_loop().set_default_executor(OpenMPReleasingExecutor())
            with self._watchdog, self._rank_processes:
                await asyncio.to_thread(self._load)
                await self._run()
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
        if self._is_complete and (problem := self._failure()):
            self.ledger.set_status("failed", problem)
        else:
            self.ledger.set_status("finished" if self._is_complete else "stopped")

    @property
    def _is_complete(self) -> bool:
        """Whether there is nothing left to resume."""
        return self.step >= self.settings.steps or not self._stopping

    # -- training -----------------------------------------------------------------------------------------------------

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
        report = self.trainer.step(records.trained_samples(rows), self.objective, version=self._staleness_version)
        records.attach_token_report(rows, report)
        return report

    def _save(self) -> None:
        """Write a checkpoint of the committed step unless it exists, and the metrics of all steps as a table."""
        if self.step != self._saved_step:
            self.trainer.save(self.checkpoints, self.step, {"version": self.version})
            self._saved_step = self.step
        records.write_metrics(self.folder.metrics, [{"step": row.step, **row.metrics} for row in self.ledger.steps()])

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _create_trainer(self) -> None:
        """Load the model and its tokenizer, on all ranks."""
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

    def _restore(self) -> None:
        """Load the last checkpoint, and train the steps recorded after it again."""
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
                report = self.trainer.step(
                    records.trained_samples(rows), self.objective, version=self._staleness_version
                )
                if not report.stepped:
                    raise KeelError(f"step {row.step} was trained before and now cannot be: {report.skip_reason}")
            self.version += row.stepped

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
