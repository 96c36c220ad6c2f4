"""Faults other than kills: each function puts one kind into runs and says what came of it.

A scene ends with a run that came to its end and is accounted for, or with an error that names what the scene expects.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

from . import checks
from .lives import Life, Lives, awake
from .proxy import Proxy
from .world import ENDS, Result, World

MISMATCH, SEEN = "log-probs that do not match", "the sampler's log-probs differ from the policy's"


def ends(world: World, life: Life, result: Result) -> bool:
    """The run comes to its end, and everything is accounted for."""
    result.runs += 1
    steps, last = world.recorded(), awake()

    def watched() -> bool:
        nonlocal steps, last
        if (now := world.recorded()) > steps:
            result.recovery = max(result.recovery, awake() - last)
            steps, last = now, awake()
        return False

    if not life.wait(ENDS, watched):
        life.kill()
        result.violations.append(f"hangs: {life.said()[-300:]}")
    elif life.code != 0:
        result.violations.append(f"ended with {life.code}: {life.said()[-500:]}")
    else:
        result.continued += 1
        result.violations += checks.at_the_end(world.run, world.steps)
        return True
    return False


def stops(life: Life, result: Result, cause: str) -> bool:
    """The run stops with an error that names its cause, and not with a traceback."""
    result.runs += 1
    if not life.wait(ENDS):
        life.kill()
        result.violations.append(f"hangs: {life.said()[-300:]}")
        return False
    told = [line for line in life.said().splitlines() if line.startswith("keel: ")]
    named = life.code == 2 and re.search(cause, " ".join(told)) and "Traceback" not in life.said()
    result.stopped += bool(named)
    if not named:
        result.violations.append(f"ended with {life.code}, and {cause!r} is not named in: {life.said()[-500:]}")
    return bool(named)


def wire(lives: Lives, folder: Path, *faults: str, share: float = 0.3, steps: int = 6, stall: float = 60) -> Result:
    """An engine server behind a wire that goes wrong."""
    result, mismatch = Result(", ".join(faults)), MISMATCH in faults
    world = World(lives, folder, steps=steps, scheduler__max_off_policy_steps=1, stall_timeout=stall)
    world.words.append("--environments.tokens.limits.timeout=4")
    upstream = world.with_engines(1)[0]
    try:
        with Proxy(upstream, faults, share) as proxy:
            world.use_pool([proxy.url])
            life = world.start()
            if share >= 1 and not mismatch:
                stops(life, result, r"No progress for \d+ s .* while sampling: .*the last error: .*")
            elif ends(world, life, result) and mismatch and SEEN not in life.said():
                result.violations.append("nothing was said of log-probs that do not match")
            result.injected = proxy.injected
    finally:
        world.close()
    if not result.injected:
        result.violations.append("nothing was injected")
    return result


def deaf_to_weights(lives: Lives, folder: Path) -> Result:
    """An engine that answers and never takes new weights."""
    result = Result("")
    world = World(lives, folder, steps=6, scheduler__max_off_policy_steps=1)
    try:
        with Proxy(world.with_engines(1)[0], ["hang"], 1.0, "/v1/load_weights") as proxy:
            world.use_pool([proxy.url], load_timeout=3.0)
            stops(world.start(), result, r"no member loaded version 0 .* longer than pool\.load_timeout = 3 s")
            result.injected = proxy.injected
    finally:
        world.close()
    return result


def episodes(lives: Lives, folder: Path, fault: str, options: dict[str, object], seconds: float = 2.0) -> Result:
    """An environment in which a share of the episodes goes wrong."""
    result = Result(fault)
    world = World(lives, folder, steps=6, scheduler__max_off_policy_steps=1)
    words = [f"--environments.tokens.options.{name}={json.dumps(value)}" for name, value in options.items()]
    world.words += [
        *words,
        f"--environments.tokens.limits.timeout={seconds}",
        f"--scheduler.rollout_timeout={seconds + 1}",
    ]
    ends(world, world.start(), result)
    result.injected = refused(world.run, ("exception", "timeout", "empty", "engine"))
    return result


def held(lives: Lives, folder: Path) -> Result:
    """An environment that never lets the event loop go on: only a thread can see it."""
    result = Result("an episode that holds the event loop", injected=1)
    world = World(lives, folder, steps=6, stall_timeout=6)
    world.words += ["--environments.tokens.options.share=0.2", '--environments.tokens.options.way="hold"']
    stops(world.start(), result, r"No progress for .* the process is blocked in environments\.py:\d+ in _wrong")
    return result


def ranks(lives: Lives, folder: Path, kills: int) -> Result:
    """A rank of the trainer is killed: the run names it and stops, and goes on when it is resumed."""
    result = Result("")
    world = World(lives, folder, steps=8, scheduler__max_off_policy_steps=0, trainer__ranks=2)
    for _ in range(kills):
        life, before = world.start(), world.recorded()
        life.wait(ENDS, lambda life=life, before=before: world.recorded() > before)  # type: ignore[misc]
        result.injected += life.kill_child("train")
        stops(life, result, r"rank 1 of the trainer ended .*go on with --resume")
    ends(world, world.start(), result)
    return result


def refused(run: Path, reasons: Iterable[str]) -> int:
    """How many rollouts were refused for these reasons."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        counts = dict(db.execute("SELECT reason, count(*) FROM rollouts GROUP BY 1").fetchall())
    db.close()
    return sum(counts.get(reason, 0) for reason in reasons)


def settings(lives: Lives, folder: Path) -> Result:
    """Settings that are changed between a kill and the resume, by hand or by the command."""
    result = Result("settings changed between kill and resume")

    def killed(name: str) -> World:
        world = World(lives, folder / name, steps=8)
        life = world.start()
        life.wait(ENDS, lambda: world.recorded() >= 5)
        life.kill()
        result.injected += 1
        return world

    def edited(name: str, change: Callable[[str], str]) -> World:
        world = killed(name)
        file = world.run / "config.toml"
        file.write_text(change(file.read_text()))
        return world

    faster = edited("edited", lambda text: text.replace("lr = 0.001", "lr = 0.002"))
    stops(faster.start(), result, r"settings are not those .*lr = 0\.001 .*lr = 0\.002 .*--allow-changes")
    ends(faster, faster.start("--allow-changes"), result)
    broken = edited("broken", lambda text: text[: len(text) // 2] + "\n[[")
    ends(broken, broken.start(), result)
    gone = edited("gone", lambda text: text)
    (gone.run / "config.toml").unlink()
    ends(gone, gone.start(), result)
    command = killed("command")
    stops(command.start("--seed=7"), result, r"settings are not those .* seed = 7")
    smaller = ("--scheduler.group_size=4", "--scheduler.groups_per_step=3", "--allow-changes")
    ends(command, command.start(*smaller), result)
    other = killed("model")
    lora = ("--model.lora.rank=4", "--allow-changes")
    stops(other.start(*lora), result, r"checkpoints/step_3")
    task = killed("environment")
    more = ("--environments.larger_number={}", "--allow-changes")
    stops(task.start(*more), result, r"environments \['tokens'\], and these are \['larger_number', 'tokens'\]")
    return result
