"""Runs the trials of a plan: one after another in this process, or several at once in processes of their own.

Guarantees. A trial that is finished is not run again; one that was begun goes on from where it was. A trial that fails
is an outcome with its error, also when its process was killed, and the others go on. After `stop` the steps under way
are finished, nothing new begins, and the rest can be gone on with later.
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
    """What became of a trial."""

    status: Literal["finished", "stopped", "failed"]
    error: str = ""


class SweepCallback(Protocol):
    """Is told, one call at a time, from any thread."""

    def skipped(self, trial: Trial) -> None:
        """It was finished before."""

    def started(self, trial: Trial, start_step: int) -> None:
        """Its model is loaded; `first`: the step that it goes on from."""

    def step(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> None:
        """A step is written down."""

    def notice(self, trial: Trial, text: str) -> None:
        """A line for people."""

    def ended(self, trial: Trial, outcome: TrialOutcome) -> None:
        """Whatever way it ended."""


class SweepRunner:
    """Goes through a plan, once."""

    def __init__(self, plan: SweepPlan, callback: SweepCallback, *, parallel: int = 1) -> None:
        if parallel < 1:
            raise ConfigError(f"--parallel {parallel} must be at least 1")
        self.plan, self._callback, self._parallel = plan, callback, parallel
        self.stopping = False
        self._stop_functions: dict[str, Callable[[], None]] = {}
        # a signal handler may interrupt the very thread that is telling the watcher something
        self._lock = threading.RLock()
        self._children: set[Any] = set()

    def stop(self) -> None:
        """Finish the steps that are under way, and begin nothing more."""
        self.stopping = True
        for stop in list(self._stop_functions.values()):
            stop()

    def kill(self) -> None:
        """End the processes of all trials now; what is on the disk is as good as after a crash."""
        for child in list(self._children):
            child.kill()

    def run(self) -> dict[str, TrialOutcome]:
        """Every trial that is not finished; the outcomes by name, without those that never began."""
        outcomes, pending = dict[str, TrialOutcome](), list[Trial]()
        for trial in self.plan.trials:
            if is_finished(self.plan.path(trial)):
                outcomes[trial.name] = TrialOutcome("finished")
                self._callback.skipped(trial)
            else:
                pending.append(trial)
        if self._parallel == 1:
            found = [self._run_trial(trial, self._run_in_process) for trial in pending]
        else:
            with ThreadPoolExecutor(self._parallel) as slots:
                found = list(slots.map(lambda trial: self._run_trial(trial, self._run_in_subprocess), pending))
        return outcomes | {trial.name: one for trial, one in zip(pending, found, strict=True) if one is not None}

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
        if self.stopping:  # asked for while the trial was being started
            stop()

    def _run_in_process(self, trial: Trial) -> TrialOutcome:
        try:
            return run_trial(
                self.plan,
                trial,
                lambda *told: self._notify(trial, *told),
                lambda run: self._register_stop(trial, run.stop),
            )
        finally:
            self._stop_functions.pop(trial.name, None)
            gc.collect()  # a run has cycles, and its model should not wait beside the next one

    def _run_in_subprocess(self, trial: Trial) -> TrialOutcome:
        """In a process of its own. It is spawned: torch's threads do not survive a fork."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        threads = max(1, torch.get_num_threads() // self._parallel)
        child = context.Process(
            target=_child_main, name=trial.name, args=(there, self.plan.folder, trial.name, threads)
        )
        child.start()
        there.close()
        self._children.add(child)
        self._register_stop(trial, child.terminate)
        outcome = None
        try:
            with suppress(EOFError):
                while outcome is None:
                    event, *told = here.recv()
                    if event == "ended":
                        outcome = TrialOutcome(*told)
                    else:
                        self._notify(trial, event, *told)
            child.join()
        finally:
            self._stop_functions.pop(trial.name, None)
            self._children.discard(child)
            here.close()
        if outcome is None and self.stopping and child.exitcode == -signal.SIGTERM:
            return TrialOutcome("stopped")  # asked before it could listen; nothing of it had begun
        return outcome or TrialOutcome("failed", f"its process ended without a word, {_describe_exit(child.exitcode)}")


def is_finished(path: Path) -> bool:
    """Whether the run in this folder has come to its end."""
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
    """Run one trial, or go on with it. `tell` gets the name of an event and what belongs to it."""
    path = plan.path(trial)
    try:
        begun = (path / "run.db").is_file()
        folder = RunFolder.open(path) if begun else RunFolder.create(path, plan.load_trial_settings(trial))
        try:
            teller = _ForwardingCallback(notify)
            observer = CallbackList(open_sinks(folder, teller.notice), teller)
            try:
                run = TrainingRun(folder, observer)
                register_run(run)
                asyncio.run(run.train())
            finally:
                observer.ended("")
            return TrialOutcome("finished" if folder.ledger.get_meta("status") == "finished" else "stopped")
        finally:
            folder.close()
    except Exception as error:  # noqa: BLE001 - whatever breaks one trial must not break the others
        return TrialOutcome("failed", _error_text(error))


class _ForwardingCallback(NullCallback):
    """An observer of a run that passes on what a watcher of trials is told."""

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:  # noqa: ARG002
        self._notify("started", start_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._notify("step", step, dict(metrics))

    def notice(self, text: str) -> None:
        self._notify("notice", text)


def _child_main(pipe: Connection, folder: Path, name: str, threads: int) -> None:
    """The whole life of a trial's process. It stops after a step when told to, or when nobody listens any more."""
    running: list[TrainingRun] = []
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            for run in running:
                run.stop()

    def hold(run: TrainingRun) -> None:
        running.append(run)
        if asked:
            run.stop()

    def tell(*told: Any) -> None:
        try:
            pipe.send(told)
        except OSError:
            stop()

    # Ctrl-C reaches every process of a terminal; it is for the parent to say what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(threads)
    plan = SweepPlan.read(folder)
    (trial,) = (one for one in plan.trials if one.name == name)
    tell("ended", *run_trial(plan, trial, tell, hold))


def _error_text(error: BaseException) -> str:
    """An error for people: Keel's own as they are, others with their kind."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, KeelError) else f"{type(error).__name__}: {error}"


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
    return f"exit code {code}"
