"""The parts of a launch over time: started in order, looked at, started again by policy, ended in order.

Invariants:
- the file of members names engines that answered since they were started last, and is replaced as a whole;
- all ranks of the trainer live and die together: one that is lost ends the others, and all go on from the run's folder;
- whichever way `run` ends, no part is left.

What places processes is a `Cluster`; the clock is given. It knows nothing of Ray, terminals or what a part computes.
"""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from keel.common.atomic_files import atomic_file
from keel.errors import KeelError
from keel.tools.launch.node_agent import Command, Probe
from keel.tools.launch.plan import Component, LaunchPlan
from keel.tools.launch.process_guard import SIGNAL_EXIT_BASE

POLL_INTERVAL = 0.5
"""Seconds between two looks at all parts."""
MAX_BACKOFF = 60.0
"""Seconds before a part is started again, at most."""
EXIT_GRACE = 15.0
"""Seconds that engines, and ranks whose first has ended, have to end by themselves."""
SUSPEND_THRESHOLD = 10.0
"""Seconds between two looks that only a launcher which was itself stopped lets pass."""
LOG_TAIL_LINES = 15
"""Lines of a part's log that an error shows."""

ComponentStatus = Literal["placed", "starting", "up", "down", "ended"]
LaunchOutcome = Literal["finished", "stopped", "killed"]


class ComponentFailed(KeelError):
    """A part that died more often than it may."""


class NodeLost(KeelError):
    """A node that a part cannot be started on any more."""


class Cluster(Protocol):
    """What places parts. A part that was lost gets a new place when it is started again."""

    def allocate_address(self, name: str) -> tuple[str, int]:
        """An address of the part's node that the other parts reach, and a free port there."""

    def start(self, name: str, command: Command) -> None:
        """Start the part where it is placed."""

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        """How these parts are."""

    def terminate(self, names: Iterable[str]) -> None:
        """Ask parts to end."""

    def kill(self, names: Iterable[str]) -> None:
        """End parts; returns when they are gone."""


@dataclass
class ComponentState:
    """What became of a part so far."""

    component: Component
    status: ComponentStatus = "placed"
    status_since: float = 0.0
    url: str = ""
    restarts_used: int = 0
    """Restarts since it was last forgiven."""
    restarts: int = 0
    """In all."""
    restart_at: float = 0.0
    """When it is started again, while it is down."""
    last_healthy: float = 0.0
    last_error: str = ""
    """Why it died last."""

    def set_status(self, status: ComponentStatus, now: float) -> None:
        self.status, self.status_since = status, now


class LaunchWatcher(Protocol):
    """Is told what happens."""

    def on_event(self, text: str) -> None:
        """A line for people."""

    def on_status(self, states: list[ComponentState]) -> None:
        """How all parts are; many times a minute."""


class Supervisor:
    """Carries a plan out. `run` may be called once; `stop` and `kill` from anywhere, also from a signal's handler."""

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
        self.ranks = [ComponentState(part) for part in plan.trainers]
        self.engines = [ComponentState(part) for part in plan.engines]
        self.stopping = self._killing = self._stop_sent = False
        self._written_urls: list[str] = []
        self._last_poll = clock()

    def stop(self) -> None:
        """Let the trainer finish its step, then end everything."""
        self.stopping = True

    def kill(self) -> None:
        """End everything now; what is on the disk is as good as after a crash."""
        self.stopping = self._killing = True

    def run(self) -> LaunchOutcome:
        """To the end of the run, or to where it was told to stop."""
        try:
            for life in self.engines:
                self._start_engine(life)
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
        lives = {
            life.component.name: life for life in (*self.ranks, *self.engines) if life.status in ("starting", "up")
        }
        looks = self._cluster.probe_all(lives)
        asleep, self._last_poll = self._clock() - self._last_poll, self._clock()
        for life in self.engines:
            if asleep > SUSPEND_THRESHOLD:
                life.last_healthy += asleep  # nobody listened, so that nobody was silent
            if life.component.name in looks:
                self._check_engine(life, looks[life.component.name])
            if life.status == "down" and self._clock() >= life.restart_at:
                self._start_engine(life)
        self._write_engines_file()
        self._check_trainer({name: look for name, look in looks.items() if lives[name].component.role == "trainer"})

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
                    f"{state.component.name} serves at {state.url} after {now - state.status_since:.0f} s"
                )
                state.set_status("up", now)
            self._reset_restarts_if_due(state)
        else:
            starting = state.status == "starting"
            limit, name = (launch.startup_timeout, "start") if starting else (launch.health_timeout, "silence")
            if now - state.last_healthy > limit:
                self._cluster.kill([state.component.name])
                self._on_death(state, f"did not answer for launch.{name} = {limit:g} s")

    def _write_engines_file(self) -> None:
        """Only what answers; the last engine's address stays, since an empty list is a damaged one for a pool."""
        members = [life.url for life in self.engines if life.status == "up"]
        if members and members != self._written_urls:
            with atomic_file(self.plan.engines_file) as temporary:
                temporary.write_text("".join(f"{url}\n" for url in members))
            self._written_urls = members

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _check_trainer(self, probes: dict[str, Probe]) -> None:
        first = self.ranks[0]
        if first.status == "placed":
            if not self.engines or any(life.status == "up" for life in self.engines):
                self._start_trainer()
        elif first.status == "down":
            if self._clock() >= first.restart_at:
                self._start_trainer()
        elif first.status == "up":
            if self.stopping and not self._stop_sent:
                self._stop_sent = True
                self._watcher.on_event("the trainer finishes its step; once more to stop at once")
                self._cluster.terminate([first.component.name])
            self._check_ranks(probes)

    def _start_trainer(self) -> None:
        name, attempt = self.ranks[0].component.name, self.ranks[0].restarts
        try:
            address, port = self._cluster.allocate_address(name)
            for rank, life in enumerate(self.ranks):
                self._cluster.start(life.component.name, self.plan.trainer_command(rank, address, port, attempt))
                life.set_status("up", self._clock())
        except NodeLost as error:
            self._on_trainer_death(self.ranks[0], str(error))
            return
        ranks = f" on {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        self._watcher.on_event(f"the trainer is started{ranks}" + (" again" if attempt else ""))

    def _check_ranks(self, probes: dict[str, Probe]) -> None:
        """What the ranks' exit codes mean: the first one's good end is the run's, any bad end is everyone's."""
        if probes[self.ranks[0].component.name].exit_code == 0:
            self._wait_for_exit([life.component.name for life in self.ranks[1:]], EXIT_GRACE)
            for life in self.ranks:
                life.set_status("ended", self._clock())
            return
        bad = [
            life
            for life in self.ranks
            if probes[life.component.name].lost_reason or probes[life.component.name].exit_code
        ]
        if not bad:
            self._reset_restarts_if_due(self.ranks[0])
            return
        # where one was killed and others gave up because of it, the one that was killed is the one to name
        life = max(
            bad,
            key=lambda one: (
                bool(probes[one.component.name].lost_reason)
                or (probes[one.component.name].exit_code or 0) > SIGNAL_EXIT_BASE
            ),
        )
        look = probes[life.component.name]
        self._on_trainer_death(life, look.lost_reason or _describe_exit(look.exit_code))

    def _on_trainer_death(self, state: ComponentState, reason: str) -> None:
        """All ranks go down with one; the first one's count is everyone's."""
        self._cluster.kill([one.component.name for one in self.ranks])
        for one in self.ranks:
            one.set_status("down", self._clock())
        if self.stopping:
            self._stop_sent = True
            self._watcher.on_event(f"{state.component.name} {reason} before its step was finished")
            return
        self._on_death(self.ranks[0], reason, state)
        for one in self.ranks[1:]:
            one.restarts, one.restart_at, one.last_error = (
                self.ranks[0].restarts,
                self.ranks[0].restart_at,
                self.ranks[0].last_error,
            )

    # -- policy -------------------------------------------------------------------------------------------------------

    def _on_death(self, state: ComponentState, reason: str, culprit: ComponentState | None = None) -> None:
        """Start it again later, or give up."""
        now, name = self._clock(), (culprit or state).component.name
        state.set_status("down", now)
        state.last_error = reason
        allowed = state.component.max_restarts
        if state.restarts_used >= allowed:
            raise ComponentFailed(
                f"{name} {reason}, and launch.{state.component.role}.restarts = {allowed} are used up. Its last lines"
                f" ({self.plan.log_path(name)}):\n{_log_tail(self.plan.log_path(name))}"
            )
        state.restarts_used += 1
        state.restarts += 1
        pause = min(MAX_BACKOFF, self.plan.launch.backoff * 2.0 ** (state.restarts_used - 1))
        state.restart_at = now + pause
        self._watcher.on_event(f"{name} {reason}; restart {state.restarts_used} of {allowed} in {pause:g} s")

    def _reset_restarts_if_due(self, state: ComponentState) -> None:
        if state.restarts_used and self._clock() - state.status_since >= self.plan.launch.restart_reset_after:
            state.restarts_used = 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """The launch has failed; what the trainer has in hand is still worth finishing."""
        first = self.ranks[0]
        if first.status == "up" and not self._killing:
            self._cluster.terminate([first.component.name])
            self._wait_for_exit([first.component.name], self.plan.launch.shutdown_timeout)

    def _shutdown(self) -> None:
        """Trainer first, so that it never waits for engines that are gone; then the engines."""
        with suppress(KeyboardInterrupt):  # the second of two signals may fall here: there is nothing to do but this
            self._cluster.kill([life.component.name for life in self.ranks])
            engines = [life.component.name for life in self.engines]
            if not self._killing:
                self._cluster.terminate(engines)
                self._wait_for_exit(engines, EXIT_GRACE)
            self._cluster.kill(engines)
        for life in (*self.ranks, *self.engines):
            life.set_status("ended", self._clock())
        self._watcher.on_status([*self.ranks, *self.engines])

    def _wait_for_exit(self, names: list[str], seconds: float) -> None:
        """Until these parts have ended, or the time is up."""
        deadline = self._clock() + seconds
        while names and self._clock() < deadline and not self._killing:
            looks = self._cluster.probe_all(names)
            if all(look.lost_reason or look.exit_code is not None for look in looks.values()):
                return
            self._sleep(POLL_INTERVAL / 2)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code > SIGNAL_EXIT_BASE:
        with suppress(ValueError):
            name = signal.Signals(exit_code - SIGNAL_EXIT_BASE).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {exit_code}"


def _log_tail(log: Path) -> str:
    """The end of a log, on lines of their own."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"
