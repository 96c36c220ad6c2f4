"""SIGKILL of the trainer, of an engine server, or of both, at random and at critical points.

Half of the kills come after a random time, half while a write is in progress: a record that is written and not
committed, or a checkpoint or published weights under their temporary name. A run is killed several times, then left
undisturbed, and must end as if it had never been interrupted.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from . import checks
from .processes import ForkServer, KeelProcess, awake_seconds
from .target_run import RUN_TIMEOUT, Result, TargetRun

Victim = Literal["trainer", "engine", "both"]
MAX_LIFETIME = 2.5
"""Seconds after which a process is killed at the latest, unless it has to load an engine first."""


class Killer:
    """Kills one run repeatedly."""

    def __init__(
        self, target: TargetRun, rng: random.Random, victims: list[Victim], max_lifetime: float = MAX_LIFETIME
    ) -> None:
        self.target, self.rng, self.victims = target, rng, victims
        self.max_lifetime = max_lifetime
        self.result = Result("", runs=1)
        self._since: float | None = None
        self._steps = 0

    def run(self, kills: int) -> Result:
        """Kill the run this many times, then let it complete; return the result."""
        process = self.target.start()
        while self.result.injected < kills and not self._ended_before_kill(process):
            victim = self.rng.choice(self.victims)
            if victim != "trainer":
                self._kill_engine(process)
            if victim != "engine":
                process.kill()
                self.result.violations += checks.check_after_kill(self.target.run_folder)
            self.result.injected += 1
            self._since, self._steps = awake_seconds(), self.target.recorded_steps()
            if victim != "engine":
                process = self.target.start()
        self._wait_for_completion(process)
        return self.result

    def _ended_before_kill(self, process: KeelProcess) -> bool:
        """Wait for the time to kill; return whether the run ended before it."""
        should_kill = self._choose_moment()
        return process.wait(self.max_lifetime * 2, lambda: self._maintain() and should_kill())

    def _choose_moment(self) -> Callable[[], bool]:
        run, kind = self.target.run_folder, self.rng.choice(["time", "time", "record", "half"])
        if kind == "time":
            kill_time = awake_seconds() + self.rng.uniform(0.05, self.max_lifetime)
            return lambda: awake_seconds() > kill_time
        if kind == "record":
            target_steps = self.target.recorded_steps() + self.rng.randint(1, 3)
            return lambda: self.target.recorded_steps() >= target_steps
        folder = run / self.rng.choice(["checkpoints", "weights", "rollouts"])
        return lambda: _write_in_progress(folder)

    def _maintain(self) -> bool:
        """Restart engines and note the recovery time; always True."""
        for engine in self.target.engines:
            engine.ensure_running()
        if self._since is not None and self.target.recorded_steps() > self._steps:
            self.result.recovery = max(self.result.recovery, awake_seconds() - self._since)
            self._since = None
        return True

    def _kill_engine(self, process: KeelProcess) -> None:
        if self.target.engines:
            self.rng.choice(self.target.engines).kill()
        else:
            process.kill_child("serve")

    def _wait_for_completion(self, process: KeelProcess) -> None:
        ended = process.wait(RUN_TIMEOUT, lambda: not self._maintain())
        if not ended:
            process.kill()
            self.result.violations.append(f"hangs: {process.output()[-300:]}")
        elif process.code != 0:
            self.result.violations.append(f"ended with {process.code}: {process.output()[-500:]}")
        else:
            self.result.continued += 1
            self.result.violations += checks.check_finished_run(self.target.run_folder, self.target.steps)


def _write_in_progress(folder: Path) -> bool:
    try:
        return any(path.name.startswith(".keel-tmp-") for path in folder.iterdir())
    except OSError:
        return False


def uninterrupted(fork_server: ForkServer, folder: Path, steps: int) -> Path:
    """Return the folder of an uninterrupted synchronous run, to compare with."""
    target = TargetRun(fork_server, folder, steps=steps, scheduler__max_off_policy_steps=0)
    process = target.start()
    assert process.wait(RUN_TIMEOUT) and process.code == 0, process.output()
    return target.run_folder


def campaign(
    fork_server: ForkServer,
    folder: Path,
    *,
    kind: Literal["local", "process", "pool"],
    synchronous: bool,
    victims: list[Victim],
    kills: int,
    kills_per_run: int = 12,
    steps: int = 12,
    seed: int = 0,
    compare: Path | None = None,
) -> Result:
    """Kill runs of one kind until there were enough kills; check synchronous local runs for the bits of `compare`."""
    result, number = Result(""), 0
    while result.injected < kills:
        number += 1
        staleness = 0 if synchronous else 2
        target = TargetRun(fork_server, folder / str(number), steps=steps, scheduler__max_off_policy_steps=staleness)
        if kind == "pool":
            target.use_pool(target.with_engines(2))
        if kind == "process":
            target.args.append('--engine.kind="process"')
        max_lifetime = MAX_LIFETIME if kind != "process" else 14.0
        killer = Killer(target, random.Random(f"{seed}/{kind}/{victims}/{number}"), victims, max_lifetime)
        try:
            run_result = killer.run(min(kills_per_run, kills - result.injected))
        finally:
            target.close()
        if compare is not None and not run_result.violations:
            run_result.violations += checks.compare_checkpoints(target.run_folder, compare, steps)
        result.add(run_result)
    return result
