"""Train a run from its start to its end: `keel train`, `keel sft` and `keel.train` all do it here.

They differ in how settings arrive, in the display and in what stops a run; everything else is the same.
"""

import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from keel.run.event_loop import run_to_completion
from keel.run.folder import RunFolder
from keel.run.monitor.callbacks import CallbackList, RunCallback
from keel.run.monitor.sinks import open_sinks
from keel.run.start.run_kind import RunKind, train_kind
from keel.training.distributed.world import RankInfo


class SessionResult(NamedTuple):
    """How a session ended."""

    status: str
    """finished, stopped or failed, as in the ledger."""
    problem: str | None
    """Why a run failed without an exception: every rollout did."""
    summary: str


def train_session(
    folder: RunFolder,
    display: RunCallback,
    drive: Callable[[Any], Coroutine[Any, Any, None]],
    *,
    kind: RunKind | None = None,
    callbacks: tuple[RunCallback, ...] = (),
    on_hang: Callable[[str], None] | None = None,
    rank_info: RankInfo | None = None,
) -> SessionResult:
    """Train until the run ends or is stopped. `drive` awaits the `train` of the run and may stop it."""
    kind, summary = kind or train_kind(), ""
    # the display comes last, so that it can still show notices of sinks that are closing
    listeners = CallbackList(open_sinks(folder, display.notice), *callbacks, display)
    if folder.settings.launch is not None and rank_info is None and "KEEL_LAUNCHED" not in os.environ:
        display.notice("the [launch] table has no effect with `keel train`: this run uses this machine only")
    try:
        training_run = kind.make_run(folder, listeners, on_hang=on_hang, rank_info=rank_info)
        run_to_completion(drive(training_run))
        summary = f"{kind.summarize(folder)}\nview       keel lens {folder.path}"
        status = folder.ledger.get_meta("status") or ""
        if status == "stopped":
            resume = f"keel {kind.command} --resume {folder.path}"
            summary += f"\nstopped    after step {training_run.step}; resume with: {resume}"
    finally:
        listeners.ended(summary)
    return SessionResult(status, folder.ledger.get_meta("why") if status == "failed" else None, summary)
