"""The loop of supervised fine-tuning: take conversations, train, record, evaluate the loss; and resume.

A step is committed as in reinforcement learning (`keel.run.checkpointed_run`): its samples, with the log-prob of every
trained token, are on disk first, then one transaction holds its metrics. Which rows a step trains on depends on the
settings and its number alone, so a run that was stopped or killed equals, bit for bit, one that was not. The loss is
the mean cross-entropy over the trained tokens of the step, however they are packed into micro-batches and ranks.
"""

import asyncio
import math
import time
from collections.abc import Callable

import torch

from keel.common.atomic_files import hash_file
from keel.common.sample import Sample
from keel.errors import KeelError
from keel.run import records, scoring
from keel.run.checkpointed_run import CheckpointedRun
from keel.run.folder import RunFolder
from keel.run.monitor.callbacks import RunCallback
from keel.run.records import SampleRecord
from keel.run.sft.batches import ENVIRONMENT, RowOrder, SampleRenderer
from keel.run.sft.conversations import open_data
from keel.run.watchdog import DEFAULT_STALL_TIMEOUT
from keel.training import StepReport
from keel.training.distributed.world import RankInfo

MAX_EMPTY_STEPS = 10
"""Consecutive steps without a usable row after which the run stops."""


class SftRun(CheckpointedRun):
    """Supervised fine-tuning in a run folder. `train` continues from its current step to the last one."""

    def __init__(
        self,
        folder: RunFolder,
        callback: RunCallback | None = None,
        on_hang: Callable[[str], None] | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        self.data = open_data(folder.settings)
        assert folder.settings.sft is not None
        self.sft = folder.settings.sft
        super().__init__(folder, callback, on_hang, rank_info, folder.settings.stall_timeout or DEFAULT_STALL_TIMEOUT)
        self.order = RowOrder(self.settings, self.data)
        self._empty_steps = 0

    @property
    def _staleness_version(self) -> None:
        return None

    def _load(self) -> None:
        self._check_data()
        self._create_trainer()
        self._samples = SampleRenderer(self.renderer, self.sft)
        if not self.ledger.last_step:
            self.callback.waiting("checking the conversations")
            self._samples.check(self.data)
        self._held_out = self._samples.held_out_samples(self.data.held_out, self.sft.eval_rows)
        self._restore()

    def _check_data(self) -> None:
        state = self.ledger.state()
        if state is not None and state.get("data") != self.data.fingerprint and not self.folder.settings_changed:
            raise KeelError(
                f"{self.data.source} has changed since {self.folder.path} was started, and its steps would train on"
                f" other rows; restore the data, or start a new run from its result: model.name = {self.folder.path}"
            )

    async def _run(self) -> None:
        self.callback.started(self.folder.path.name, self.folder.path, self.settings.steps, self.step)
        await self._evaluate()
        while self.step < self.settings.steps and not self._stopping:
            await self._run_step()
        await asyncio.to_thread(self._save)
        if self._is_complete:
            await self._evaluate(final=True)

    async def _run_step(self) -> None:
        start = time.monotonic()
        self.folder.sampled = True
        rows = await asyncio.to_thread(self._samples.step_records, self.data.train, self.order.step_rows(self.step + 1))
        report = await self._train_batch(rows)
        metrics = await asyncio.to_thread(self._commit_step, rows, report, start)
        self.callback.step(self.step, metrics)
        self._stop_if_nothing_trains(rows, report)
        if self.step % self.settings.checkpoints.every == 0:
            await self._await_with_status("saving", asyncio.to_thread(self._save))
        await self._evaluate()

    def _commit_step(self, rows: list[SampleRecord], report: StepReport | None, start: float) -> dict[str, float]:
        """Commit the step and return its metrics."""
        step, stepped = self.step + 1, report is not None and report.stepped
        record = records.write_step(self.folder.rollouts, step, self.version, rows, self._token_texts.lookup(rows))
        metrics = _step_metrics(report) if report is not None else {}
        samples = records.trained_samples(rows)
        metrics |= {
            "rows": float(len({row.group for row in rows})),
            "epoch": self.order.epoch_after(step),
            "tokens": float(sum(map(len, samples))),
            "trainable_tokens": float(sum(sample.trainable_count for sample in samples)),
            "dropped": float(len({row.group for row in rows if row.outcome == "dropped"})),
            "seconds": time.monotonic() - start,
        }
        metrics["tokens_per_second"] = metrics["tokens"] / metrics["seconds"]
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
        self.ledger.write_step(
            step,
            version=self.version + stepped,
            stepped=stepped,
            metrics=metrics,
            outcomes=scoring.outcomes(rows),
            state={"data": self.data.fingerprint},
            record_hash=hash_file(record),
        )
        self.step, self.version = step, self.version + stepped
        return metrics

    def _stop_if_nothing_trains(self, rows: list[SampleRecord], report: StepReport | None) -> None:
        self._empty_steps = 0 if report is not None and report.stepped else self._empty_steps + 1
        if self._empty_steps >= MAX_EMPTY_STEPS:
            errors = [row.error for row in rows if row.error]
            raise KeelError(
                f"{MAX_EMPTY_STEPS} steps in a row trained nothing; the last conversation was dropped:"
                f" {errors[-1] if errors else 'it has no trainable token'}"
            )

    # -- evaluation ---------------------------------------------------------------------------------------------------

    async def _evaluate(self, *, final: bool = False) -> None:
        """Measure the loss of the held-out conversations if it is time to, at most once per step."""
        evaluation = self.settings.evaluation
        due = {"never": False, "start_and_end": self.step == 0, "always": self.step % evaluation.every == 0}
        if not self._held_out or not (due[evaluation.when] or (final and evaluation.when != "never")):
            return
        if any(step == self.step for step, _, _ in self.ledger.evaluations()):
            return
        metrics = await self._await_with_status("evaluating", asyncio.to_thread(self._held_out_loss))
        self.ledger.write_evaluation(self.step, ENVIRONMENT, metrics)
        self.callback.loss_evaluated(self.step, ENVIRONMENT, metrics)

    def _held_out_loss(self) -> dict[str, float]:
        start = time.monotonic()
        torch.set_num_threads(self._threads)
        loss, tokens = mean_loss(self._held_out, self.trainer.logprobs(self._held_out))
        metrics = {"loss": loss, "tokens": float(tokens), "rows": float(len(self._held_out))}
        metrics["seconds"] = time.monotonic() - start
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _step_metrics(report: StepReport) -> dict[str, float]:
    """Return the metrics of a step without those of gates, which cross-entropy does not have."""
    metrics = {
        name: value
        for name, value in report.scalars().items()
        if not name.startswith(("is_masked", "masked_", "signal/"))
    }
    if report.tokens.entropy is not None and len(report.tokens.entropy):
        metrics["entropy"] = float(report.tokens.entropy.mean(dtype=torch.float64))
    return metrics


def mean_loss(samples: list[Sample], logprobs: list[torch.Tensor]) -> tuple[float, int]:
    """Return the mean cross-entropy over the trainable tokens, and their number."""
    values = torch.cat(
        [row[torch.as_tensor(sample.trainable)].double() for row, sample in zip(logprobs, samples, strict=True)]
    )
    return -float(values.mean()), len(values)
