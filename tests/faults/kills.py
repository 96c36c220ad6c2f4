"""SIGKILL of the trainer, of an engine's server, and of both, at random points and at the points that hurt most.

Half of the kills come after a random time, half the moment something is half done: a record that is written and not yet
committed, a checkpoint or published weights under their temporary name. A run is killed a dozen times, then left alone,
and must end as if nothing had been.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from . import checks
from .lives import Life, Lives, awake
from .world import ENDS, Result, World

Victim = Literal["trainer", "engine", "both"]
LONGEST = 2.5
"""Seconds that a life has at most before it is killed, unless it has to load an engine first."""


class Killer:
    """Kills one run again and again."""

    def __init__(self, world: World, chance: random.Random, victims: list[Victim], longest: float = LONGEST) -> None:
        self.world, self.chance, self.victims, self.longest = world, chance, victims, longest
        self.result = Result("", runs=1)
        self._since: float | None = None
        self._steps = 0

    def go(self, kills: int) -> Result:
        """Until the run has ended; so many kills on the way."""
        life = self.world.start()
        while self.result.injected < kills and not self._waited(life):
            victim = self.chance.choice(self.victims)
            if victim != "trainer":
                self._kill_engine(life)
            if victim != "engine":
                life.kill()
                self.result.violations += checks.after_a_kill(self.world.run)
            self.result.injected += 1
            self._since, self._steps = awake(), self.world.recorded()
            if victim != "engine":
                life = self.world.start()
        self._to_the_end(life)
        return self.result

    def _waited(self, life: Life) -> bool:
        """Wait for the moment to kill; True if the run ended before it."""
        moment = self._moment()
        return life.wait(self.longest * 2, lambda: self._tended() and moment())

    def _moment(self) -> Callable[[], bool]:
        run, kind = self.world.run, self.chance.choice(["time", "time", "record", "half"])
        if kind == "time":
            at = awake() + self.chance.uniform(0.05, self.longest)
            return lambda: awake() > at
        if kind == "record":
            more = self.world.recorded() + self.chance.randint(1, 3)
            return lambda: self.world.recorded() >= more
        place = run / self.chance.choice(["checkpoints", "weights", "rollouts"])
        return lambda: _half_done(place)

    def _tended(self) -> bool:
        """Engines are started again, and what came back is noted; always True."""
        for engine in self.world.engines:
            engine.keep()
        if self._since is not None and self.world.recorded() > self._steps:
            self.result.recovery = max(self.result.recovery, awake() - self._since)
            self._since = None
        return True

    def _kill_engine(self, life: Life) -> None:
        if self.world.engines:
            self.chance.choice(self.world.engines).kill()
        else:
            life.kill_child("serve")

    def _to_the_end(self, life: Life) -> None:
        ended = life.wait(ENDS, lambda: not self._tended())
        if not ended:
            life.kill()
            self.result.violations.append(f"hangs: {life.said()[-300:]}")
        elif life.code != 0:
            self.result.violations.append(f"ended with {life.code}: {life.said()[-500:]}")
        else:
            self.result.continued += 1
            self.result.violations += checks.at_the_end(self.world.run, self.world.steps)


def _half_done(place: Path) -> bool:
    try:
        return any(path.name.startswith(".keel-tmp-") for path in place.iterdir())
    except OSError:
        return False


def straight(lives: Lives, folder: Path, steps: int) -> Path:
    """A synchronous run that nobody interrupted, to compare with."""
    world = World(lives, folder, steps=steps, scheduler__max_off_policy_steps=0)
    life = world.start()
    assert life.wait(ENDS) and life.code == 0, life.said()
    return world.run


def campaign(
    lives: Lives,
    folder: Path,
    *,
    kind: Literal["local", "process", "pool"],
    synchronous: bool,
    victims: list[Victim],
    kills: int,
    each: int = 12,
    steps: int = 12,
    seed: int = 0,
    compare: Path | None = None,
) -> Result:
    """Runs of one kind until there were enough kills; a synchronous local one ends with the bits of `compare`."""
    result, number = Result(""), 0
    while result.injected < kills:
        number += 1
        age = 0 if synchronous else 2
        world = World(lives, folder / str(number), steps=steps, scheduler__max_off_policy_steps=age)
        if kind == "pool":
            world.use_pool(world.with_engines(2))
        if kind == "process":
            world.words.append('--engine.kind="process"')
        longest = LONGEST if kind != "process" else 14.0
        killer = Killer(world, random.Random(f"{seed}/{kind}/{victims}/{number}"), victims, longest)
        try:
            one = killer.go(min(each, kills - result.injected))
        finally:
            world.close()
        if compare is not None and not one.violations:
            one.violations += checks.same_bits(world.run, compare, steps)
        result.add(one)
    return result
