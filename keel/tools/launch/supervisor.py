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

from keel.common.atomic_files import replace_file
from keel.errors import KeelError
from keel.tools.launch.node_agent import Command, Look
from keel.tools.launch.plan import Part, Plan
from keel.tools.launch.process_guard import KILLED

TICK = 0.5
"""Seconds between two looks at all parts."""
SLOWEST = 60.0
"""Seconds before a part is started again, at most."""
LEAVE = 15.0
"""Seconds that engines, and ranks whose first has ended, have to end by themselves."""
ASLEEP = 10.0
"""Seconds between two looks that only a launcher which was itself stopped lets pass."""
TAIL = 15
"""Lines of a part's log that an error shows."""

State = Literal["placed", "starting", "up", "down", "ended"]
Outcome = Literal["finished", "stopped", "killed"]


class PartFailed(KeelError):
    """A part that died more often than it may."""


class Lost(KeelError):
    """A node that a part cannot be started on any more."""


class Cluster(Protocol):
    """What places parts. A part that was lost gets a new place when it is started again."""

    def address(self, name: str) -> tuple[str, int]:
        """An address of the part's node that the other parts reach, and a free port there."""

    def start(self, name: str, command: Command) -> None:
        """Start the part where it is placed."""

    def looks(self, names: Iterable[str]) -> dict[str, Look]:
        """How these parts are."""

    def end(self, names: Iterable[str]) -> None:
        """Ask parts to end."""

    def kill(self, names: Iterable[str]) -> None:
        """End parts; returns when they are gone."""


@dataclass
class Life:
    """What became of a part so far."""

    part: Part
    state: State = "placed"
    since: float = 0.0
    url: str = ""
    used: int = 0
    """Restarts since it was last forgiven."""
    restarts: int = 0
    """In all."""
    due: float = 0.0
    """When it is started again, while it is down."""
    answered: float = 0.0
    last: str = ""
    """Why it died last."""

    def enter(self, state: State, now: float) -> None:
        self.state, self.since = state, now


class Watcher(Protocol):
    """Is told what happens."""

    def happened(self, text: str) -> None:
        """A line for people."""

    def now(self, lives: list[Life]) -> None:
        """How all parts are; many times a minute."""


class Supervisor:
    """Carries a plan out. `run` may be called once; `stop` and `kill` from anywhere, also from a signal's handler."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        watcher: Watcher,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.plan, self._cluster, self._watcher = plan, cluster, watcher
        self._clock, self._sleep = clock, sleep
        self.ranks = [Life(part) for part in plan.trainers]
        self.engines = [Life(part) for part in plan.engines]
        self.stopping = self._killing = self._asked = False
        self._members: list[str] = []
        self._looked = clock()

    def stop(self) -> None:
        """Let the trainer finish its step, then end everything."""
        self.stopping = True

    def kill(self) -> None:
        """End everything now; what is on the disk is as good as after a crash."""
        self.stopping = self._killing = True

    def run(self) -> Outcome:
        """To the end of the run, or to where it was told to stop."""
        try:
            for life in self.engines:
                self._start_engine(life)
            while not self._over():
                self._look()
                self._watcher.now([*self.ranks, *self.engines])
                self._sleep(TICK)
            if self._killing:
                return "killed"
            return "stopped" if self._asked or self.ranks[0].state != "ended" else "finished"
        except PartFailed:
            self._finish_step()
            raise
        finally:
            self._end()

    def _over(self) -> bool:
        trainer = self.ranks[0].state
        return self._killing or trainer == "ended" or (self.stopping and trainer in ("placed", "down"))

    def _look(self) -> None:
        lives = {life.part.name: life for life in (*self.ranks, *self.engines) if life.state in ("starting", "up")}
        looks = self._cluster.looks(lives)
        asleep, self._looked = self._clock() - self._looked, self._clock()
        for life in self.engines:
            if asleep > ASLEEP:
                life.answered += asleep  # nobody listened, so that nobody was silent
            if life.part.name in looks:
                self._engine(life, looks[life.part.name])
            if life.state == "down" and self._clock() >= life.due:
                self._start_engine(life)
        self._write_members()
        self._trainer({name: look for name, look in looks.items() if lives[name].part.role == "trainer"})

    # -- engines ------------------------------------------------------------------------------------------------------

    def _start_engine(self, life: Life) -> None:
        now = self._clock()
        try:
            host, port = self._cluster.address(life.part.name)
            self._cluster.start(life.part.name, self.plan.engine_command(host, port))
        except Lost as error:
            self._died(life, str(error))
            return
        life.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        life.answered = now
        life.enter("starting", now)

    def _engine(self, life: Life, look: Look) -> None:
        now, launch = self._clock(), self.plan.launch
        if look.lost or look.code is not None:
            self._died(life, look.lost or _ended(look.code))
        elif look.answers:
            life.answered = now
            if life.state == "starting":
                self._watcher.happened(f"{life.part.name} serves at {life.url} after {now - life.since:.0f} s")
                life.enter("up", now)
            self._forgive(life)
        else:
            starting = life.state == "starting"
            limit, name = (launch.start, "start") if starting else (launch.silence, "silence")
            if now - life.answered > limit:
                self._cluster.kill([life.part.name])
                self._died(life, f"did not answer for launch.{name} = {limit:g} s")

    def _write_members(self) -> None:
        """Only what answers; the last engine's address stays, since an empty list is a damaged one for a pool."""
        members = [life.url for life in self.engines if life.state == "up"]
        if members and members != self._members:
            with replace_file(self.plan.members) as temporary:
                temporary.write_text("".join(f"{url}\n" for url in members))
            self._members = members

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _trainer(self, looks: dict[str, Look]) -> None:
        first = self.ranks[0]
        if first.state == "placed":
            if not self.engines or any(life.state == "up" for life in self.engines):
                self._start_trainer()
        elif first.state == "down":
            if self._clock() >= first.due:
                self._start_trainer()
        elif first.state == "up":
            if self.stopping and not self._asked:
                self._asked = True
                self._watcher.happened("the trainer finishes its step; once more to stop at once")
                self._cluster.end([first.part.name])
            self._ranks(looks)

    def _start_trainer(self) -> None:
        name, attempt = self.ranks[0].part.name, self.ranks[0].restarts
        try:
            address, port = self._cluster.address(name)
            for rank, life in enumerate(self.ranks):
                self._cluster.start(life.part.name, self.plan.trainer_command(rank, address, port, attempt))
                life.enter("up", self._clock())
        except Lost as error:
            self._trainer_died(self.ranks[0], str(error))
            return
        ranks = f" on {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        self._watcher.happened(f"the trainer is started{ranks}" + (" again" if attempt else ""))

    def _ranks(self, looks: dict[str, Look]) -> None:
        """What the ranks' exit codes mean: the first one's good end is the run's, any bad end is everyone's."""
        if looks[self.ranks[0].part.name].code == 0:
            self._wait([life.part.name for life in self.ranks[1:]], LEAVE)
            for life in self.ranks:
                life.enter("ended", self._clock())
            return
        bad = [life for life in self.ranks if looks[life.part.name].lost or looks[life.part.name].code]
        if not bad:
            self._forgive(self.ranks[0])
            return
        # where one was killed and others gave up because of it, the one that was killed is the one to name
        life = max(bad, key=lambda one: bool(looks[one.part.name].lost) or (looks[one.part.name].code or 0) > KILLED)
        look = looks[life.part.name]
        self._trainer_died(life, look.lost or _ended(look.code))

    def _trainer_died(self, life: Life, why: str) -> None:
        """All ranks go down with one; the first one's count is everyone's."""
        self._cluster.kill([one.part.name for one in self.ranks])
        for one in self.ranks:
            one.enter("down", self._clock())
        if self.stopping:
            self._asked = True
            self._watcher.happened(f"{life.part.name} {why} before its step was finished")
            return
        self._died(self.ranks[0], why, life)
        for one in self.ranks[1:]:
            one.restarts, one.due, one.last = self.ranks[0].restarts, self.ranks[0].due, self.ranks[0].last

    # -- policy -------------------------------------------------------------------------------------------------------

    def _died(self, life: Life, why: str, culprit: Life | None = None) -> None:
        """Start it again later, or give up."""
        now, name = self._clock(), (culprit or life).part.name
        life.enter("down", now)
        life.last = why
        allowed = life.part.restarts
        if life.used >= allowed:
            raise PartFailed(
                f"{name} {why}, and launch.{life.part.role}.restarts = {allowed} are used up. Its last lines"
                f" ({self.plan.log(name)}):\n{_tail(self.plan.log(name))}"
            )
        life.used += 1
        life.restarts += 1
        pause = min(SLOWEST, self.plan.launch.backoff * 2.0 ** (life.used - 1))
        life.due = now + pause
        self._watcher.happened(f"{name} {why}; restart {life.used} of {allowed} in {pause:g} s")

    def _forgive(self, life: Life) -> None:
        if life.used and self._clock() - life.since >= self.plan.launch.forgive:
            life.used = 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """The launch has failed; what the trainer has in hand is still worth finishing."""
        first = self.ranks[0]
        if first.state == "up" and not self._killing:
            self._cluster.end([first.part.name])
            self._wait([first.part.name], self.plan.launch.grace)

    def _end(self) -> None:
        """Trainer first, so that it never waits for engines that are gone; then the engines."""
        with suppress(KeyboardInterrupt):  # the second of two signals may fall here: there is nothing to do but this
            self._cluster.kill([life.part.name for life in self.ranks])
            engines = [life.part.name for life in self.engines]
            if not self._killing:
                self._cluster.end(engines)
                self._wait(engines, LEAVE)
            self._cluster.kill(engines)
        for life in (*self.ranks, *self.engines):
            life.enter("ended", self._clock())
        self._watcher.now([*self.ranks, *self.engines])

    def _wait(self, names: list[str], seconds: float) -> None:
        """Until these parts have ended, or the time is up."""
        deadline = self._clock() + seconds
        while names and self._clock() < deadline and not self._killing:
            looks = self._cluster.looks(names)
            if all(look.lost or look.code is not None for look in looks.values()):
                return
            self._sleep(TICK / 2)


def _ended(code: int | None) -> str:
    if code is not None and code > KILLED:
        with suppress(ValueError):
            name = signal.Signals(code - KILLED).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def _tail(log: Path) -> str:
    """The end of a log, on lines of their own."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"
