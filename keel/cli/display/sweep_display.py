"""What `keel sweep` and `keel compare --live` share: their flags, what is shown while trials run, and their table.

In a terminal there is a bar for all trials and one for each that runs; elsewhere a line for each that ended, and one
now and then meanwhile. The time left is an estimate from the steps of this session. Numbers come from
`keel.tools.sweep`.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import PLAIN_WIDTH, console, write_stdout
from keel.cli.display.progress import QUIET_SECONDS, escape_unprintable, format_duration
from keel.cli.modules import add_module_folders
from keel.cli.run.train import SIGNAL_DEBOUNCE_SECONDS
from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.tools.sweep import SweepPlan, SweepResults, Trial, TrialOutcome, Variant

FLAGS = ("--seeds", "--parallel", "--run", "--resume", "--html", "--parquet", "--json")


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """The flags that say how trials are run and where they are kept."""
    parser.add_argument("--seeds", metavar="K", type=int, help="runs of each variant, each with a seed of its own (1)")
    parser.add_argument("--parallel", metavar="N", type=int, help="trials that run at once, each in a process (1)")
    parser.add_argument("--run", dest="folder", metavar="DIR", type=Path, help=f"folder of the trials ({default})")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="go on with the trials of this folder")


def run_sweep(args: argparse.Namespace, recipe: str | None, variants: "Sequence[Variant]", kind: str) -> int:
    """Run, show, and write what was asked for; 0: every trial is finished."""
    from keel.run.folder import unused_path
    from keel.tools.sweep import SweepPlan, SweepRunner
    from keel.tools.sweep.results import read_results

    add_module_folders(recipe, args.resume)
    if args.resume is not None:
        plan = SweepPlan.read(args.resume)
    else:
        assert recipe is not None
        folder = args.folder or unused_path(Path("runs"), f"{Path(recipe).stem}-{kind}")
        plan = SweepPlan.create(folder, Path(recipe), args.overrides, variants, 1 if args.seeds is None else args.seeds)
    screen = _stderr_console() if args.json else console()
    parallel = 1 if args.parallel is None else args.parallel
    with SweepDisplay(screen, plan) as display:
        session = SweepRunner(plan, display, parallel=parallel)
        with _stop_on_signals(session):
            outcomes = session.run()
    found = read_results(plan, outcomes)
    _write_files(args, found)
    if args.json:
        write_stdout(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        print_results(screen, found)
        for path in (args.html, args.parquet):
            if path is not None:
                screen.print(Text(f"written: {path}"))
    done = all(trial.status == "finished" for trial in found.trials)
    if not done:
        screen.print(
            Text(f"not all trials are finished; go on with: keel {args.command} {_resume_flags(args)}{plan.folder}")
        )
    return 0 if done else 1


def check_resume_flags(args: argparse.Namespace, **flags: object) -> None:
    """Whatever says which trials there are cannot act on trials that are written down already."""
    for name, value in {**flags, "--seeds": args.seeds, "--run": args.folder}.items():
        if value:
            raise ConfigError(f"{name} cannot act with --resume: {args.resume} says which trials there are")
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]} cannot act with --resume: {args.resume} says which trials there are")


def _resume_flags(args: argparse.Namespace) -> str:
    return ("--live " if args.command == "compare" else "") + "--resume "


def _write_files(args: argparse.Namespace, results: "SweepResults") -> None:
    if args.html is not None:
        from keel.tools.compare.files import atomic_file
        from keel.tools.sweep.html import render_results

        with atomic_file(args.html) as temporary:
            temporary.write_text(render_results(results), encoding="utf-8")
    if args.parquet is not None:
        from keel.tools.sweep.long_table import write_table

        write_table(args.parquet, results)


@contextmanager
def _stop_on_signals(runner: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM as requests to stop: the first is patient, the second is not."""
    asked: float | None = None

    def interrupted(*_: object) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            runner.stop()
        elif time.monotonic() - asked > SIGNAL_DEBOUNCE_SECONDS:
            runner.kill()
            os._exit(130)

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- while they run ---------------------------------------------------------------------------------------------------


class SweepDisplay:
    """Tells how far the trials are: a watcher of `keel.tools.sweep.Session`."""

    def __init__(self, screen: Console, plan: "SweepPlan", clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._plan, self._clock = screen, plan, clock
        self._trial_numbers = {trial.name: number for number, trial in enumerate(plan.trials, start=1)}
        self._steps_left = dict(plan.steps)
        self._steps_trained = 0
        self._start_time = self._last_line_time = clock()
        self._trial_start_times: dict[str, float] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(30),
            TextColumn("{task.fields[told]}", markup=False),
            console=screen,
            disable=not screen.is_terminal,
            transient=True,
        )

    def __enter__(self) -> "SweepDisplay":
        self._print(f"{len(self._trial_numbers)} trials in {self._plan.folder}")
        self._total_bar = self._progress.add_task("all trials", total=sum(self._steps_left.values()), told="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def skipped(self, trial: "Trial") -> None:
        self._steps_left[trial.name] = 0
        self._print(f"{self._trial_label(trial)}: was finished before")

    def started(self, trial: "Trial", start_step: int) -> None:
        steps = self._plan.steps[trial.name]
        self._steps_left[trial.name] = steps - start_step
        self._trial_start_times[trial.name] = self._clock()
        if not self._steps_trained:
            self._start_time = self._clock()  # what the first start took says nothing about the steps
        self._bars[trial.name] = self._progress.add_task(
            self._trial_label(trial), total=steps, completed=start_step, told=""
        )
        if start_step:
            self._print(f"{self._trial_label(trial)}: goes on after step {start_step} of {steps}")

    def step(self, trial: "Trial", step: int, metrics: Mapping[str, float]) -> None:
        steps = self._plan.steps[trial.name]
        self._steps_left[trial.name] = steps - step
        self._steps_trained += 1
        told = f"step {step}/{steps}, reward {metrics['reward']:.3f}" if "reward" in metrics else f"step {step}/{steps}"
        if trial.name in self._bars:
            self._progress.update(self._bars[trial.name], completed=step, told=told)
        self._update_total_bar()
        if not self._console.is_terminal and self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._print(f"{self._trial_label(trial)}: {told}{self._time_left()}")

    def notice(self, trial: "Trial", text: str) -> None:
        self._print(f"{self._trial_label(trial)}: {text}")

    def ended(self, trial: "Trial", outcome: "TrialOutcome") -> None:
        took = format_duration(self._clock() - self._trial_start_times.get(trial.name, self._clock()))
        if outcome.status != "stopped":
            self._steps_left[trial.name] = 0
        if trial.name in self._bars:
            self._progress.remove_task(self._bars.pop(trial.name))
        self._update_total_bar()
        told = {"finished": f"finished in {took}", "stopped": "stopped", "failed": f"failed: {outcome.error}"}
        left = self._time_left() if outcome.status != "stopped" else ""
        self._print(f"{self._trial_label(trial)}: {told[outcome.status]}{left}")

    def _update_total_bar(self) -> None:
        total = sum(self._plan.steps.values())
        done = total - sum(self._steps_left.values())
        self._progress.update(self._total_bar, completed=done, told=self._time_left().removeprefix("; "))

    def _time_left(self) -> str:
        left = sum(self._steps_left.values())
        if not left or not self._steps_trained:
            return ""
        return f"; about {format_duration((self._clock() - self._start_time) / self._steps_trained * left)} left"

    def _trial_label(self, trial: "Trial") -> str:
        return f"{self._trial_numbers[trial.name]}/{len(self._trial_numbers)} {trial.name}"

    def _print(self, text: str) -> None:
        self._console.print(Text(escape_unprintable(text)), soft_wrap=True)
        self._last_line_time = self._clock()


def _stderr_console() -> Console:
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, markup=False, highlight=False, emoji=False)


# -- the table --------------------------------------------------------------------------------------------------------


def print_results(out: Console, results: "SweepResults") -> None:
    """Variants with mean and spread; with several seeds each run, too."""
    from keel.tools.sweep.html import MEASURE_HEADERS, format_interval, format_measure, variant_cells

    table = _make_table("variant", "runs", *MEASURE_HEADERS)
    for variant in results.variants:
        table.add_row(
            Text(escape_unprintable(variant.name)),
            f"{len(variant.finished)}/{len(variant.trials)}",
            *variant_cells(variant, "\n"),
        )
    out.print()
    out.print(table)
    spread = "one seed: the spread between runs is not known"
    if results.seeds > 1:
        spread = f"±: standard deviation over {results.seeds} seeds"
    out.print(
        "training: reward in the last fifth of the steps; evaluation: on held-out tasks, 95 % interval over tasks;\n"
        "mismatch: KL of sampler and policy; low, high: share of tokens dropped; tokens: that trained;\n" + spread,
        style="dim",
    )
    if results.seeds > 1:
        runs = _make_table("run", "status", "steps", "training", "evaluation", "95 %")
        for trial in results.trials:
            rewards = (format_measure(name, trial.measures[name]) for name in ("training", "evaluation"))
            runs.add_row(Text(trial.name), trial.status, f"{trial.steps:,}", *rewards, format_interval(trial.interval))
        out.print()
        out.print(runs)
    for trial in results.trials:
        if trial.status == "failed":
            out.print(Text(escape_unprintable(f"{trial.name} failed: {trial.error}"), "yellow"), soft_wrap=True)


def _make_table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", overflow="fold", no_wrap=place > 0)
    return table
