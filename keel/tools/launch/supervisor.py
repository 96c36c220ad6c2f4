"""Supervise the components of a launch: start them in order, probe them, restart them, and shut them down in order.

Invariants:
- the engines file lists only engines that were healthy since their last start, and is replaced atomically;
- all trainer ranks start and stop together: if one is lost the others are killed, and all resume from the run's folder;
- however `run` ends, no component is left running.

Processes are placed by a `Cluster`, and the clock is a parameter. It does not depend on Ray or a terminal, nor on what
a component computes.
"""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from keel.common.atomic_files import atomic_file
from keel.common.suspend_clock import SuspendClock
from keel.errors import KeelError
from keel.tools.launch.node_agent import Command, Probe
from keel.tools.launch.plan import Component, LaunchPlan
from keel.tools.launch.process_guard import RUN_FAILED_EXIT, SIGNAL_EXIT_BASE

POLL_INTERVAL = 0.5
"""Seconds between two probes of all components."""
MAX_BACKOFF = 60.0
"""Longest delay in seconds before a component is restarted."""
EXIT_GRACE = 15.0
"""Seconds for engines to shut down, and for the other ranks to exit after rank 0."""
SUSPEND_THRESHOLD = 10.0
"""More seconds than this between two probes mean that the launcher itself was suspended."""
LOG_TAIL_LINES = 15
"""Lines of a component's log that an error shows."""

ComponentStatus = Literal["placed", "starting", "up", "down", "ended"]
LaunchOutcome = Literal["finished", "stopped", "killed"]


class ComponentFailed(KeelError):
    """Raised when a component has used up its restarts, or a restart cannot help."""


class NodeLost(KeelError):
    """Raised when a component cannot be started because its node is gone."""


class Cluster(Protocol):
    """Places components. A component that was lost is placed again when it is restarted."""

    def allocate_address(self, name: str) -> tuple[str, int]:
        """Return an address of the component's node that other components can reach, and a free port."""

    def start(self, name: str, command: Command) -> None:
        """Start the component on its node."""

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        """Return the state of these components."""

    def terminate(self, names: Iterable[str]) -> None:
        """Ask components to shut down."""

    def kill(self, names: Iterable[str]) -> None:
        """Kill components; returns when they are gone."""


@dataclass
class ComponentState:
    """The state of a component."""

    component: Component
    status: ComponentStatus = "placed"
    status_since: float = 0.0
    url: str = ""
    restarts_used: int = 0
    """Restarts since the count was last reset."""
    restarts: int = 0
    """Restarts in total."""
    restart_at: float = 0.0
    """Time of the next restart, while it is down."""
    last_healthy: float = 0.0
    last_error: str = ""
    """Reason of the last failure."""

    def set_status(self, status: ComponentStatus, now: float) -> None:
        self.status, self.status_since = status, now


class LaunchWatcher(Protocol):
    """Receives the events of a launch."""

    def on_event(self, text: str) -> None:
        """Handle one event, described in a line of text."""

    def on_status(self, states: list[ComponentState]) -> None:
        """Handle the state of all components; called after every probe."""


class Supervisor:
    """Executes a plan. `run` may be called once; `stop` and `kill` may be called from a signal handler."""

    def __init__(
        self,
        plan: LaunchPlan,
        cluster: Cluster,
        watcher: LaunchWatcher,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.plan, self._cluster, self._watcher = plan, cluster, watcher
        self._clock, self._sleep = clock, sleep
        self.ranks = [ComponentState(component) for component in plan.trainers]
        self.engines = [ComponentState(component) for component in plan.engines]
        self.stopping = self._killing = self._stop_sent = False
        self._written_urls: list[str] = []
        self._suspend_clock = SuspendClock(SUSPEND_THRESHOLD, clock)

    def stop(self) -> None:
        """Let the trainer finish its step, then shut everything down."""
        self.stopping = True

    def kill(self) -> None:
        """Kill everything now; the run can be resumed as after a crash."""
        self.stopping = self._killing = True

    def run(self) -> LaunchOutcome:
        """Supervise until the run ends or `stop` or `kill` was called."""
        try:
            for engine in self.engines:
                self._start_engine(engine)
            while not self._is_over():
                self._poll()
                self._watcher.on_status([*self.ranks, *self.engines])
                self._sleep(POLL_INTERVAL)
            if self._killing:
                return "killed"
            return "stopped" if self._stop_sent or self.ranks[0].status != "ended" else "finished"
        except ComponentFailed:
            self._finish_step()
            raise
        finally:
            self._shutdown()

    def _is_over(self) -> bool:
        trainer = self.ranks[0].status
        return self._killing or trainer == "ended" or (self.stopping and trainer in ("placed", "down"))

    def _poll(self) -> None:
        running = {
            state.component.name: state for state in (*self.ranks, *self.engines) if state.status in ("starting", "up")
        }
        probes = self._cluster.probe_all(running)
        suspended = self._suspend_clock.poll()
        for engine in self.engines:
            engine.last_healthy += suspended  # nothing is known about that time
            if engine.component.name in probes:
                self._check_engine(engine, probes[engine.component.name])
            if engine.status == "down" and self._clock() >= engine.restart_at:
                self._start_engine(engine)
        self._write_engines_file()
        self._check_trainer({name: probes[name] for name in probes if running[name].component.role == "trainer"})

    # -- engines ------------------------------------------------------------------------------------------------------

    def _start_engine(self, state: ComponentState) -> None:
        now = self._clock()
        try:
            host, port = self._cluster.allocate_address(state.component.name)
            self._cluster.start(state.component.name, self.plan.engine_command(host, port))
        except NodeLost as error:
            self._on_death(state, str(error))
            return
        state.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        state.last_healthy = now
        state.set_status("starting", now)

    def _check_engine(self, state: ComponentState, probe: Probe) -> None:
        now, launch = self._clock(), self.plan.launch
        if probe.lost_reason or probe.exit_code is not None:
            self._on_death(state, probe.lost_reason or _describe_exit(probe.exit_code))
        elif probe.healthy:
            state.last_healthy = now
            if state.status == "starting":
                self._watcher.on_event(
                    f"{state.component.name} is up at {state.url} after {now - state.status_since:.0f} s"
                )
                state.set_status("up", now)
            self._reset_restarts_if_due(state)
        else:
            starting = state.status == "starting"
            setting = "startup_timeout" if starting else "health_timeout"
            limit = launch.startup_timeout if starting else launch.health_timeout
            if now - state.last_healthy > limit:
                self._cluster.kill([state.component.name])
                self._on_death(state, f"did not answer for launch.{setting} = {limit:g} s")

    def _write_engines_file(self) -> None:
        """List the healthy engines; the last URL stays, since the pool treats an empty file as damaged."""
        urls = [engine.url for engine in self.engines if engine.status == "up"]
        if urls and urls != self._written_urls:
            with atomic_file(self.plan.engines_file) as temporary:
                temporary.write_text("".join(f"{url}\n" for url in urls))
            self._written_urls = urls

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _check_trainer(self, probes: dict[str, Probe]) -> None:
        first = self.ranks[0]
        if first.status == "placed":
            if not self.engines or any(engine.status == "up" for engine in self.engines):
                self._start_trainer()
        elif first.status == "down":
            if self._clock() >= first.restart_at:
                self._start_trainer()
        elif first.status == "up":
            if self.stopping and not self._stop_sent:
                self._stop_sent = True
                self._watcher.on_event("the trainer finishes its step; press Ctrl-C again to stop now")
                self._cluster.terminate([first.component.name])
            self._check_ranks(probes)

    def _start_trainer(self) -> None:
        name, attempt = self.ranks[0].component.name, self.ranks[0].restarts
        try:
            address, port = self._cluster.allocate_address(name)
            for rank, state in enumerate(self.ranks):
                self._cluster.start(state.component.name, self.plan.trainer_command(rank, address, port, attempt))
                state.set_status("up", self._clock())
        except NodeLost as error:
            self._on_trainer_death(self.ranks[0], str(error))
            return
        ranks = f" on {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        self._watcher.on_event(("restarted" if attempt else "started") + f" the trainer{ranks}")

    def _check_ranks(self, probes: dict[str, Probe]) -> None:
        """Handle the ranks' exit codes: if rank 0 succeeds the run has ended; if any rank fails all are restarted."""
        if probes[self.ranks[0].component.name].exit_code == 0:
            self._wait_for_exit([state.component.name for state in self.ranks[1:]], EXIT_GRACE)
            for state in self.ranks:
                state.set_status("ended", self._clock())
            return
        if probes[self.ranks[0].component.name].exit_code == RUN_FAILED_EXIT:
            self._fail_run()
        failed = [
            state
            for state in self.ranks
            if probes[state.component.name].lost_reason or probes[state.component.name].exit_code
        ]
        if not failed:
            self._reset_restarts_if_due(self.ranks[0])
            return

        def was_killed(state: ComponentState) -> bool:
            probe = probes[state.component.name]
            return bool(probe.lost_reason) or (probe.exit_code or 0) > SIGNAL_EXIT_BASE

        # if one rank was killed and others exited because of it, report the one that was killed
        culprit = max(failed, key=was_killed)
        probe = probes[culprit.component.name]
        self._on_trainer_death(culprit, probe.lost_reason or _describe_exit(probe.exit_code))

    def _fail_run(self) -> NoReturn:
        """Raise because the run itself failed: a restart would resume it after its last step and fail again."""
        name = self.ranks[0].component.name
        log = self.plan.log_path(name)
        for rank in self.ranks:
            rank.set_status("down", self._clock())
        raise ComponentFailed(
            f"{name} trained nothing because every rollout failed; it is not restarted. End of its log ({log}):\n"
            f"{_log_tail(log)}"
        )

    def _on_trainer_death(self, state: ComponentState, reason: str) -> None:
        """Kill all ranks because one failed; restarts are counted on rank 0."""
        self._cluster.kill([rank.component.name for rank in self.ranks])
        for rank in self.ranks:
            rank.set_status("down", self._clock())
        if self.stopping:
            self._stop_sent = True
            self._watcher.on_event(f"{state.component.name} {reason} before its step was finished")
            return
        self._on_death(self.ranks[0], reason, state)
        for rank in self.ranks[1:]:
            rank.restarts, rank.restart_at, rank.last_error = (
                self.ranks[0].restarts,
                self.ranks[0].restart_at,
                self.ranks[0].last_error,
            )

    # -- restart policy -----------------------------------------------------------------------------------------------

    def _on_death(self, state: ComponentState, reason: str, culprit: ComponentState | None = None) -> None:
        """Schedule a restart, or raise if all restarts are used up."""
        now, name = self._clock(), (culprit or state).component.name
        state.set_status("down", now)
        state.last_error = reason
        allowed = state.component.max_restarts
        if state.restarts_used >= allowed:
            raise ComponentFailed(
                f"{name} {reason}, and all launch.{state.component.role}.restarts = {allowed} are used up. End of its"
                f" log ({self.plan.log_path(name)}):\n{_log_tail(self.plan.log_path(name))}"
            )
        state.restarts_used += 1
        state.restarts += 1
        pause = min(MAX_BACKOFF, self.plan.launch.backoff * 2.0 ** (state.restarts_used - 1))
        state.restart_at = now + pause
        self._watcher.on_event(f"{name} {reason}; restart {state.restarts_used} of {allowed} in {pause:g} s")

    def _reset_restarts_if_due(self, state: ComponentState) -> None:
        if state.restarts_used and self._clock() - state.status_since >= self.plan.launch.restart_reset_after:
            state.restarts_used = 0

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """Let the trainer finish its step after the launch has failed."""
        first = self.ranks[0]
        if first.status == "up" and not self._killing:
            self._cluster.terminate([first.component.name])
            self._wait_for_exit([first.component.name], self.plan.launch.shutdown_timeout)

    def _shutdown(self) -> None:
        """Stop the trainer first, so that it never waits for stopped engines, then the engines."""
        with suppress(KeyboardInterrupt):  # a second signal may arrive here, and shutting down must still finish
            self._cluster.kill([state.component.name for state in self.ranks])
            engines = [state.component.name for state in self.engines]
            if not self._killing:
                self._cluster.terminate(engines)
                self._wait_for_exit(engines, EXIT_GRACE)
            self._cluster.kill(engines)
        for state in (*self.ranks, *self.engines):
            state.set_status("ended", self._clock())
        self._watcher.on_status([*self.ranks, *self.engines])

    def _wait_for_exit(self, names: list[str], seconds: float) -> None:
        """Wait until these components have exited, or the time is up."""
        deadline = self._clock() + seconds
        while names and self._clock() < deadline and not self._killing:
            probes = self._cluster.probe_all(names)
            if all(probe.lost_reason or probe.exit_code is not None for probe in probes.values()):
                return
            self._sleep(POLL_INTERVAL / 2)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code > SIGNAL_EXIT_BASE:
        with suppress(ValueError):
            name = signal.Signals(exit_code - SIGNAL_EXIT_BASE).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {exit_code}"


def _log_tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
