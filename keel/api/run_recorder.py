"""The run folder of a model in the Python API, so that `keel lens`, `keel report` and `keel compare` read it.

A step is recorded as the training loop records it: rollouts in `rollouts/step_N.parquet`, then the ledger in one
transaction, then the checkpoint, then the sinks. The checkpoint decides: records of a step whose checkpoint is missing
are removed, so a step is complete or did not happen. `config.toml` holds the settings of the backend and the model, and
the objective and the advantages of the last call of `train`.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.api.train_request import TrainRequest, objective_table
from keel.common.atomic_files import hash_file
from keel.config import load_settings
from keel.run import records, scoring
from keel.run.folder import RunFolder
from keel.run.monitor.sinks import finite_metrics, open_sinks
from keel.run.records import SampleRecord
from keel.training import StepReport


class RunRecorder:
    """Records the steps of one model. Used from one thread."""

    def __init__(self, path: Path, tables: Mapping[str, Any]) -> None:
        """Open the run in this folder, or create it. `tables` are its settings, which may differ from those before."""
        values = [*tables.items(), ("steps", 1)]
        if (path / "run.db").is_file():
            self.folder = RunFolder.open(path, values=values, allow_changes=True)
        else:
            self.folder = RunFolder.create(path, load_settings(values=values))
        try:
            self._sinks = open_sinks(self.folder, lambda text: warnings.warn(text, stacklevel=2))
        except BaseException:
            self.folder.discard_if_unused()
            raise
        state = self.folder.ledger.state()
        self._group_count = 0 if state is None else int(state["groups"])
        self._token_texts: records.TokenTexts | None = None
        self.folder.ledger.set_status("running")

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Set the tokenizer whose texts are recorded with the tokens."""
        self._token_texts = records.TokenTexts(tokenizer)

    @property
    def next_group(self) -> int:
        """Number of the next group; every group of the run has its own."""
        return self._group_count

    def write_settings(self, request: TrainRequest, step: int) -> None:
        """Write the objective and the advantages of a call, and the step it leads to, into the settings of the run."""
        settings, optimizer = self.folder.settings, self.folder.settings.trainer.optimizer
        if optimizer.lr_schedule != "constant" and optimizer.total_steps is not None:
            # settings whose schedule ends before the run are not valid
            step = min(step, max(optimizer.total_steps // settings.trainer.optimizer_steps, 1))
        table = objective_table(request.objective)
        values = [
            ("objective", table),
            ("advantages", request.estimator.model_dump(exclude_none=True)),
            ("steps", step),
        ]
        self.folder.update_settings(values)

    def commit(self, step: int, rows: Sequence[SampleRecord], report: StepReport, metrics: Mapping[str, float]) -> None:
        """Record a trained step; its checkpoint is written next."""
        assert self._token_texts is not None
        records.attach_token_report(rows, report)
        file = records.write_step(self.folder.rollouts, step, step - 1, rows, self._token_texts.lookup(rows))
        self._count_groups(rows)
        self.folder.ledger.write_step(
            step,
            version=step,
            stepped=True,
            metrics=finite_metrics(metrics),
            outcomes=scoring.outcomes(rows),
            state={"groups": self._group_count},
            record_hash=hash_file(file),
        )

    def deliver(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the table of metrics and send those of a complete step to the sinks."""
        steps = self.folder.ledger.steps()
        records.write_metrics(self.folder.metrics, [{"step": row.step, **row.metrics} for row in steps])
        self._sinks.step(step, finite_metrics(metrics))

    def commit_skipped(self, step: int, rows: Sequence[SampleRecord], reason: str) -> None:
        """Record the rollouts of a call that trained nothing."""
        for row in rows:
            if row.outcome == "trained":
                row.outcome, row.reason, row.error = "dropped", "step_skipped", reason
        self._count_groups(rows)
        self.folder.ledger.write_dropped(step, scoring.outcomes(rows), {"groups": self._group_count})

    def discard_after(self, step: int) -> None:
        """Remove the records of later steps: their checkpoints are not intact."""
        if self.folder.ledger.last_step > step:
            self.folder.ledger.discard_steps(step)
        for file in self.folder.rollouts.glob("step_*.parquet"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()

    def close(self, *, failed_start: bool = False) -> None:
        """Close the run; after a failed start, remove what it created."""
        self._sinks.ended("")
        if failed_start:
            self.folder.discard_if_unused()
            return
        self.folder.ledger.set_status("finished")
        self.folder.close()

    def _count_groups(self, rows: Sequence[SampleRecord]) -> None:
        self._group_count += len({row.group for row in rows})


def step_metrics(metrics: Mapping[str, float], start: float) -> dict[str, float]:
    """Return the metrics of a step with those that the training loop adds."""
    seconds = time.monotonic() - start
    own = {"rollouts": metrics["trajectories"], "seconds": seconds}
    return {**metrics, **own, "tokens_per_second": metrics.get("trainable_tokens", 0.0) / seconds}
