"""Train a run from its start to its end: `keel train` and `keel.train` both do it here.

They differ in how settings arrive, in the display and in what stops a run; everything else is the same.
"""

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from keel.config import LoadedSettings
from keel.rollout.episode_runner import build_environments
from keel.run.event_loop import run_to_completion
from keel.run.folder import RunFolder
from keel.run.loop import TrainingRun
from keel.run.monitor.callbacks import CallbackList, RunCallback
from keel.run.monitor.sinks import open_sinks, resolve_sinks
from keel.run.summary import summarize_run
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.distributed.world import RankInfo


class SessionResult(NamedTuple):
    """How a session ended."""

    status: str
    """finished, stopped or failed, as in the ledger."""
    problem: str | None
    """Why a run failed without an exception: every rollout did."""
    summary: str


def create_run(path: Path, loaded: LoadedSettings, rank_info: RankInfo | None = None) -> RunFolder:
    """Create the folder of a new run after checking that its parts can be loaded."""
    build_environments(loaded.settings)  # errors here leave no folder behind
    resolve_sinks(loaded.settings.metrics)
    RankProcesses(loaded.settings.trainer, rank_info)
    return RunFolder.create(path, loaded)


def train_session(
    folder: RunFolder,
    display: RunCallback,
    drive: Callable[[TrainingRun], Coroutine[Any, Any, None]],
    *,
    callbacks: tuple[RunCallback, ...] = (),
    on_hang: Callable[[str], None] | None = None,
    rank_info: RankInfo | None = None,
) -> SessionResult:
    """Train until the run ends or is stopped. `drive` awaits `TrainingRun.train` and may stop it."""
    summary = ""
    # the display comes last, so that it can still show notices of sinks that are closing
    listeners = CallbackList(open_sinks(folder, display.notice), *callbacks, display)
    if folder.settings.launch is not None and rank_info is None and "KEEL_LAUNCHED" not in os.environ:
        display.notice("the [launch] table has no effect with `keel train`: this run uses this machine only")
    try:
        training_run = TrainingRun(folder, listeners, on_hang=on_hang, rank_info=rank_info)
        run_to_completion(drive(training_run))
        summary = f"{summarize_run(folder)}\nview       keel lens {folder.path}"
        status = folder.ledger.get_meta("status") or ""
        if status == "stopped":
            summary += f"\nstopped    after step {training_run.step}; resume with: keel train --resume {folder.path}"
    finally:
        listeners.ended(summary)
    return SessionResult(status, folder.ledger.get_meta("why") if status == "failed" else None, summary)
