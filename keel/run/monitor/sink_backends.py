"""TensorBoard, Weights & Biases and trackio as metric sinks.

Each package is imported when its sink is opened. Their messages are kept off standard output, which belongs to the
display; what they collect besides the metrics (machine load, git state) is left to their own settings. Nothing leaves
the machine unless `metrics.wandb` = "online" or trackio's environment variables say so.
"""

import contextlib
import contextvars
import importlib
import io
import secrets
import time
from collections.abc import Mapping
from typing import Any

from keel.run.monitor.sinks import RunInfo

DEFAULT_PROJECT = "keel"
"""Project of a run whose settings name none."""


def _project(run_info: RunInfo) -> str:
    return run_info.settings.metrics.project or DEFAULT_PROJECT


def _evaluation_metrics(environment: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation under names that differ from those of steps."""
    return {f"evaluation/{environment}/{name}": value for name, value in metrics.items()}


class TensorBoard:
    """Event files in RUN/tensorboard, one per start of the run; a step is on disk when `step` returns.

    Uses the package's plain writer: its `SummaryWriter` hands events to a thread and waits indefinitely if a full disk
    killed that thread.
    """

    def __init__(self, run_info: RunInfo) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._scalar = importlib.import_module("tensorboardX.summary").scalar
        folder = run_info.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # file names contain the time in whole seconds; the suffix prevents overwriting a file of the same second
        self._file = files.EventsWriter(str(folder / "events"), f".{secrets.token_hex(4)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        event = self._event(step=step, wall_time=time.time())
        for name, value in metrics.items():
            event.summary.value.extend(self._scalar(name, value).value)
        self._file.write_event(event)
        self._file.flush()

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        self.step(step, _evaluation_metrics(environment, metrics))

    def close(self) -> None:
        self._file.close()


class Wandb:
    """A W&B run in RUN/wandb, and online if the settings say so.

    All metrics have `step` as their axis. W&B's own counter would discard late metrics of an earlier step, such as an
    evaluation.
    """

    def __init__(self, run_info: RunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=_project(run_info),
            name=run_info.folder.name,
            id=run_info.run_id,
            # offline, each start of the run writes a separate file; syncing joins them
            resume="allow" if run_info.settings.metrics.wandb == "online" else None,
            mode=run_info.settings.metrics.wandb,
            dir=str(run_info.folder),
            config=run_info.settings.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        self._run.log({**_evaluation_metrics(environment, metrics), "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in trackio's own folder, where `trackio show` finds it."""

    def __init__(self, run_info: RunInfo) -> None:
        trackio: Any = importlib.import_module("trackio")
        settings = run_info.settings.model_dump(mode="json")
        # in a separate context the run is not trackio's "current" run, which trackio would finish again, with a
        # message, at exit; its hint on how to open the dashboard would break --json output
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = contextvars.copy_context().run(
                trackio.init,
                _project(run_info),
                name=run_info.unique_name,
                config=settings,
                resume="allow",
                embed=False,
            )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        self._run.log(_evaluation_metrics(environment, metrics), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
