"""Faults other than kills: each function injects one kind into runs and returns the result.

A scenario ends with a completed run that passes all checks, or with an error that names the expected cause.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

from . import checks
from .processes import ForkServer, KeelProcess, awake_seconds
from .proxy import Proxy
from .target_run import RUN_TIMEOUT, Result, TargetRun

MISMATCH, MISMATCH_WARNING = "log-probs that do not match", "the sampler's log-probs differ from the policy's"


def expect_completion(target: TargetRun, process: KeelProcess, result: Result) -> bool:
    """Wait for the run to complete and check its folder; return whether it completed."""
    result.runs += 1
    steps, last = target.recorded_steps(), awake_seconds()

    def note_recovery() -> bool:
        nonlocal steps, last
        if (now := target.recorded_steps()) > steps:
            result.recovery = max(result.recovery, awake_seconds() - last)
            steps, last = now, awake_seconds()
        return False

    if not process.wait(RUN_TIMEOUT, note_recovery):
        process.kill()
        result.violations.append(f"hangs: {process.output()[-300:]}")
    elif process.code != 0:
        result.violations.append(f"ended with {process.code}: {process.output()[-500:]}")
    else:
        result.continued += 1
        result.violations += checks.check_finished_run(target.run_folder, target.steps)
        return True
    return False


def expect_error(process: KeelProcess, result: Result, cause: str) -> bool:
    """Wait for the run to stop with an error that matches `cause`, without a traceback; return whether it did."""
    result.runs += 1
    if not process.wait(RUN_TIMEOUT):
        process.kill()
        result.violations.append(f"hangs: {process.output()[-300:]}")
        return False
    errors = [line for line in process.output().splitlines() if line.startswith("keel: ")]
    named = process.code == 2 and re.search(cause, " ".join(errors)) and "Traceback" not in process.output()
    result.stopped += bool(named)
    if not named:
        result.violations.append(f"ended with {process.code}, and {cause!r} is not named in: {process.output()[-500:]}")
    return bool(named)


def engine_faults(
    fork_server: ForkServer, folder: Path, *faults: str, share: float = 0.3, steps: int = 6, stall: float = 60
) -> Result:
    """Run with an engine server behind a proxy that injects faults."""
    result, mismatch = Result(", ".join(faults)), MISMATCH in faults
    target = TargetRun(fork_server, folder, steps=steps, scheduler__max_off_policy_steps=1, stall_timeout=stall)
    target.args.append("--environments.tokens.limits.timeout=4")
    if share >= 1:  # retried for as long as the watchdog allows, instead of ending with empty batches
        target.args.append("--scheduler.max_error_reschedule_attempts=1000000")
    upstream = target.with_engines(1)[0]
    try:
        with Proxy(upstream, faults, share) as proxy:
            target.use_pool([proxy.url])
            process = target.start()
            if share >= 1 and not mismatch:
                expect_error(process, result, r"for \d+ s.* sampling: .*the last error: .*")
            elif expect_completion(target, process, result) and mismatch and MISMATCH_WARNING not in process.output():
                result.violations.append("there was no warning about log-probs that do not match")
            result.injected = proxy.injected
    finally:
        target.close()
    if not result.injected:
        result.violations.append("nothing was injected")
    return result


def weights_never_load(fork_server: ForkServer, folder: Path) -> Result:
    """Run with an engine that samples and never loads new weights."""
    result = Result("")
    target = TargetRun(fork_server, folder, steps=6, scheduler__max_off_policy_steps=1)
    try:
        with Proxy(target.with_engines(1)[0], ["hang"], 1.0, "/v1/load_weights") as proxy:
            target.use_pool([proxy.url], load_timeout=3.0)
            expect_error(target.start(), result, r"no member loaded version 0 .* longer than pool\.load_timeout = 3 s")
            result.injected = proxy.injected
    finally:
        target.close()
    return result


def episodes(
    fork_server: ForkServer, folder: Path, fault: str, options: dict[str, object], seconds: float = 2.0
) -> Result:
    """Run an environment in which a fraction of the episodes fails."""
    result = Result(fault)
    target = TargetRun(fork_server, folder, steps=6, scheduler__max_off_policy_steps=1)
    options_args = [f"--environments.tokens.options.{name}={json.dumps(value)}" for name, value in options.items()]
    target.args += [
        *options_args,
        f"--environments.tokens.limits.timeout={seconds}",
        f"--scheduler.rollout_timeout={seconds + 1}",
    ]
    expect_completion(target, target.start(), result)
    result.injected = count_dropped(target.run_folder, ("exception", "timeout", "empty", "engine"))
    return result


def blocked_event_loop(fork_server: ForkServer, folder: Path) -> Result:
    """Run an environment that blocks the event loop, which only a watchdog thread can detect."""
    result = Result("an episode that blocks the event loop", injected=1)
    target = TargetRun(fork_server, folder, steps=6, stall_timeout=6)
    target.args += ["--environments.tokens.options.share=0.2", '--environments.tokens.options.failure="block"']
    expect_error(target.start(), result, r"for \d+ s.* environments\.py:\d+ in _fail")
    return result


def ranks(fork_server: ForkServer, folder: Path, kills: int) -> Result:
    """Kill a rank of the trainer: the run stops with an error that names the rank, and can be resumed."""
    result = Result("")
    target = TargetRun(fork_server, folder, steps=8, scheduler__max_off_policy_steps=0, trainer__ranks=2)
    for _ in range(kills):
        process, before = target.start(), target.recorded_steps()
        process.wait(RUN_TIMEOUT, lambda process=process, before=before: target.recorded_steps() > before)  # type: ignore[misc]
        result.injected += process.kill_child("train")
        expect_error(process, result, r"rank 1 of the trainer exited .*--resume")
    expect_completion(target, target.start(), result)
    return result


def count_dropped(run: Path, reasons: Iterable[str]) -> int:
    """Return how many rollouts were dropped for these reasons."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        counts = dict(db.execute("SELECT reason, count(*) FROM rollouts GROUP BY 1").fetchall())
    db.close()
    return sum(counts.get(reason, 0) for reason in reasons)


def settings(fork_server: ForkServer, folder: Path) -> Result:
    """Change settings between a kill and the resume, in the file or on the command line."""
    result = Result("settings changed between kill and resume")

    def killed(name: str) -> TargetRun:
        target = TargetRun(fork_server, folder / name, steps=8)
        process = target.start()
        process.wait(RUN_TIMEOUT, lambda: target.recorded_steps() >= 5)
        process.kill()
        result.injected += 1
        return target

    def edited(name: str, change: Callable[[str], str]) -> TargetRun:
        target = killed(name)
        file = target.run_folder / "config.toml"
        file.write_text(change(file.read_text()))
        return target

    faster = edited("edited", lambda text: text.replace("lr = 0.001", "lr = 0.002"))
    expect_error(faster.start(), result, r"settings are not those .*lr = 0\.001 .*lr = 0\.002 .*--allow-changes")
    expect_completion(faster, faster.start("--allow-changes"), result)
    broken = edited("broken", lambda text: text[: len(text) // 2] + "\n[[")
    expect_completion(broken, broken.start(), result)
    gone = edited("gone", lambda text: text)
    (gone.run_folder / "config.toml").unlink()
    expect_completion(gone, gone.start(), result)
    command = killed("command")
    expect_error(command.start("--seed=7"), result, r"settings are not those .* seed = 7")
    smaller = ("--scheduler.group_size=4", "--scheduler.groups_per_step=3", "--allow-changes")
    expect_completion(command, command.start(*smaller), result)
    other = killed("model")
    lora = ("--model.lora.rank=4", "--allow-changes")
    expect_error(other.start(*lora), result, r"checkpoints/step_3")
    task = killed("environment")
    more = ("--environments.larger_number={}", "--allow-changes")
    expect_error(task.start(*more), result, r"environments \['tokens'\], but the run has \['larger_number', 'tokens'\]")
    return result
