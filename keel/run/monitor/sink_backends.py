"""TensorBoard, Weights & Biases and trackio as sinks.

Each is imported when it is opened. Their own words are kept off standard output, which belongs to the display; what
they collect beside the run's numbers (the machine's load, the git state) is left to their own settings. Nothing leaves
the machine unless `metrics.wandb` = "online" or trackio's own environment variables say so.
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
"""Under which a run is listed where no project is given."""


def _project(run_info: RunInfo) -> str:
    return run_info.settings.metrics.project or DEFAULT_PROJECT


def _evaluation_metrics(environment: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an evaluation, apart from those of steps."""
    return {f"evaluation/{environment}/{name}": value for name, value in metrics.items()}


class TensorBoard:
    """Event files in RUN/tensorboard, one for each life of the run; a step is on the disk when `step` returns.

    The file is written by the package's plain writer: its `SummaryWriter` hands events to a thread, and waits for ever
    for one that has died of a full disk.
    """

    def __init__(self, run_info: RunInfo) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._scalar = importlib.import_module("tensorboardX.summary").scalar
        folder = run_info.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # file names hold a time in whole seconds, and an old file of the same name would be written over
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
    """A W&B run, in RUN/wandb and online where that was asked for.

    All numbers have `step` as their axis. W&B's own counter would lose what is told late about an earlier step, as an
    evaluation is.
    """

    def __init__(self, run_info: RunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=_project(run_info),
            name=run_info.folder.name,
            id=run_info.run_id,
            # offline, each life of the run is a file of its own, and they meet when they are synced
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
    """A run in trackio's own folder, where `trackio show` finds all of them."""

    def __init__(self, run_info: RunInfo) -> None:
        trackio: Any = importlib.import_module("trackio")
        settings = run_info.settings.model_dump(mode="json")
        # in a context of its own the run is not trackio's "current" one, which it would finish again, with a message,
        # when the process ends; and how to open its page would be noise in the middle of --json
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
