"""Run the trials of a plan: one after another in this process, or several concurrently in separate processes.

Guarantees: a finished trial is not run again, and a started one is resumed. A trial that fails, even because its
process was killed, is an outcome with an error, and the others continue. After `stop` the current steps are finished,
no trial is started, and the remaining ones can be resumed later.
"""

import asyncio
import gc
import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from keel.errors import ConfigError, KeelError
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger
from keel.run.loop import TrainingRun
from keel.run.monitor.callbacks import CallbackList, NullCallback
from keel.run.monitor.sinks import open_sinks
from keel.tools.sweep.plan import SweepPlan, Trial


class TrialOutcome(NamedTuple):
    """How a trial ended."""

    status: Literal["finished", "stopped", "failed"]
    error: str = ""


class SweepCallback(Protocol):
    """Receives events of trials. Calls are serialised but may come from any thread."""

    def skipped(self, trial: Trial) -> None:
        """The trial was finished by an earlier sweep run."""

    def started(self, trial: Trial, start_step: int) -> None:
        """The model is loaded; training starts after step `start_step`."""

    def step(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> None:
        """A step was recorded."""

    def notice(self, trial: Trial, text: str) -> None:
        """A message for the user."""

    def ended(self, trial: Trial, outcome: TrialOutcome) -> None:
        """The trial finished, was stopped, or failed."""


class SweepRunner:
    """Runs the trials of a plan once."""

    def __init__(self, plan: SweepPlan, callback: SweepCallback, *, parallel: int = 1) -> None:
        if parallel < 1:
            raise ConfigError(f"--parallel {parallel} must be at least 1")
        self.plan, self._callback, self._parallel = plan, callback, parallel
        self.stopping = False
        self._stop_functions: dict[str, Callable[[], None]] = {}
        # reentrant, because a signal handler may interrupt the thread that is calling the callback
        self._lock = threading.RLock()
        self._children: set[Any] = set()

    def stop(self) -> None:
        """Finish the current steps and start no further trials."""
        self.stopping = True
        for stop in list(self._stop_functions.values()):
            stop()

    def kill(self) -> None:
        """Kill the processes of all trials; their folders can be resumed as after a crash."""
        for child in list(self._children):
            child.kill()

    def run(self) -> dict[str, TrialOutcome]:
        """Run every unfinished trial; return the outcomes by name, without trials that were not started."""
        outcomes, pending = dict[str, TrialOutcome](), list[Trial]()
        for trial in self.plan.trials:
            if is_finished(self.plan.path(trial)):
                outcomes[trial.name] = TrialOutcome("finished")
                self._callback.skipped(trial)
            else:
                pending.append(trial)
        if self._parallel == 1:
            results = [self._run_trial(trial, self._run_in_process) for trial in pending]
        else:
            with ThreadPoolExecutor(self._parallel) as executor:
                results = list(executor.map(lambda trial: self._run_trial(trial, self._run_in_subprocess), pending))
        started = {trial.name: outcome for trial, outcome in zip(pending, results, strict=True) if outcome is not None}
        return outcomes | started

    def _run_trial(self, trial: Trial, execute: Callable[[Trial], TrialOutcome]) -> TrialOutcome | None:
        if self.stopping:
            return None
        outcome = execute(trial)
        with self._lock:
            self._callback.ended(trial, outcome)
        return outcome

    def _notify(self, trial: Trial, event: str, *args: Any) -> None:
        with self._lock:
            getattr(self._callback, event)(trial, *args)

    def _register_stop(self, trial: Trial, stop: Callable[[], None]) -> None:
        self._stop_functions[trial.name] = stop
        if self.stopping:  # stop was called while the trial was starting
            stop()

    def _run_in_process(self, trial: Trial) -> TrialOutcome:
        try:
            return run_trial(
                self.plan,
                trial,
                lambda *event: self._notify(trial, *event),
                lambda run: self._register_stop(trial, run.stop),
            )
        finally:
            self._stop_functions.pop(trial.name, None)
            gc.collect()  # a run has reference cycles; free its model before the next one is loaded

    def _run_in_subprocess(self, trial: Trial) -> TrialOutcome:
        """Run a trial in a separate process, spawned because torch's threads do not survive a fork."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // self._parallel)
        child = context.Process(
            target=_child_main, name=trial.name, args=(sender, self.plan.folder, trial.name, threads)
        )
        child.start()
        sender.close()
        self._children.add(child)
        self._register_stop(trial, child.terminate)
        outcome = None
        try:
            with suppress(EOFError):
                while outcome is None:
                    event, *args = receiver.recv()
                    if event == "ended":
                        outcome = TrialOutcome(*args)
                    else:
                        self._notify(trial, event, *args)
            child.join()
        finally:
            self._stop_functions.pop(trial.name, None)
            self._children.discard(child)
            receiver.close()
        if outcome is None and self.stopping and child.exitcode == -signal.SIGTERM:
            return TrialOutcome("stopped")  # terminated before it installed its signal handler; nothing was started
        exit_status = _describe_exit(child.exitcode)
        return outcome or TrialOutcome("failed", f"its process ended without reporting an outcome, {exit_status}")


def is_finished(path: Path) -> bool:
    """Return whether the run in this folder is finished."""
    if not (path / "run.db").is_file():
        return False
    ledger = Ledger(path / "run.db")
    try:
        return ledger.get_meta("status") == "finished"
    finally:
        ledger.close()


def run_trial(
    plan: SweepPlan, trial: Trial, notify: Callable[..., None], register_run: Callable[[TrainingRun], None]
) -> TrialOutcome:
    """Run or resume one trial. `notify` is called with the name of an event and its arguments."""
    path = plan.path(trial)
    try:
        started = (path / "run.db").is_file()
        folder = RunFolder.open(path) if started else RunFolder.create(path, plan.load_trial_settings(trial))
        try:
            forwarding = _ForwardingCallback(notify)
            callback = CallbackList(open_sinks(folder, forwarding.notice), forwarding)
            try:
                run = TrainingRun(folder, callback)
                register_run(run)
                asyncio.run(run.train())
            finally:
                callback.ended("")
            status = folder.ledger.get_meta("status")
            if status == "failed":
                return TrialOutcome("failed", folder.ledger.get_meta("why") or "")
            return TrialOutcome("finished" if status == "finished" else "stopped")
        finally:
            folder.close()
    except Exception as error:  # noqa: BLE001 - an error in one trial must not stop the others
        return TrialOutcome("failed", _error_text(error))


class _ForwardingCallback(NullCallback):
    """A run callback that forwards events to the callback of the sweep."""

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:  # noqa: ARG002
        self._notify("started", start_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._notify("step", step, dict(metrics))

    def notice(self, text: str) -> None:
        self._notify("notice", text)


def _child_main(pipe: Connection, folder: Path, name: str, threads: int) -> None:
    """Run one trial in its own process. It stops after a step on SIGTERM, or when the parent has gone."""
    running: list[TrainingRun] = []
    stop_requested = False

    def stop(*_: object) -> None:
        nonlocal stop_requested
        if not stop_requested:
            stop_requested = True
            for run in running:
                run.stop()

    def register_run(run: TrainingRun) -> None:
        running.append(run)
        if stop_requested:
            run.stop()

    def notify(*event: Any) -> None:
        try:
            pipe.send(event)
        except OSError:
            stop()

    # Ctrl-C reaches every process of a terminal; only the parent handles it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(threads)
    plan = SweepPlan.read(folder)
    (trial,) = (trial for trial in plan.trials if trial.name == name)
    notify("ended", *run_trial(plan, trial, notify, register_run))


def _error_text(error: BaseException) -> str:
    """Return the message of an error, with its type unless it is a `KeelError`."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, KeelError) else f"{type(error).__name__}: {error}"


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
    return f"exit code {code}"
