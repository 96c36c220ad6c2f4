"""Flags, progress display and result table shared by `keel sweep` and `keel compare --live`.

In a terminal there is a progress bar for all trials and one for each running trial; otherwise a line for each trial
that ended and occasional progress lines. The remaining time is estimated from the steps trained so far.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.cli.stop_signals import stop_on_signals
from keel.errors import ConfigError
from keel.run.monitor.console import PLAIN_WIDTH
from keel.run.monitor.progress import QUIET_SECONDS, escape_unprintable, format_duration
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.tools.sweep import SweepPlan, SweepResults, Trial, TrialOutcome, Variant

FLAGS = ("--seeds", "--parallel", "--run", "--resume", "--html", "--parquet", "--json")


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that control how trials run and where they are stored."""
    parser.add_argument(
        "--seeds", metavar="K", type=int, help="runs of each variant, with consecutive seeds (default: 1)"
    )
    parser.add_argument(
        "--parallel", metavar="N", type=int, help="number of concurrent trials, each in a process (default: 1)"
    )
    parser.add_argument(
        "--run", dest="folder", metavar="DIR", type=Path, help=f"folder of the trials (default: {default})"
    )
    parser.add_argument("--resume", metavar="DIR", type=Path, help="resume the trials of this folder")


def run_sweep(args: argparse.Namespace, recipe: str | None, variants: "Sequence[Variant]", kind: str) -> int:
    """Run the trials, print the results and write the requested files; return 0 if every trial is finished."""
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
        runner = SweepRunner(plan, display, parallel=parallel)

        def kill() -> None:
            runner.kill()
            os._exit(130)

        with stop_on_signals(runner.stop, kill):
            outcomes = runner.run()
    results = read_results(plan, outcomes)
    _write_files(args, results)
    if args.json:
        write_stdout(json.dumps(results.as_json(), indent=2) + "\n")
    else:
        print_results(screen, results)
        for path in (args.html, args.parquet):
            if path is not None:
                screen.print(Text(f"written: {path}"))
    all_finished = all(trial.status == "finished" for trial in results.trials)
    if not all_finished:
        screen.print(
            Text(f"not all trials are finished; resume with: keel {args.command} {_resume_flags(args)}{plan.folder}")
        )
    return 0 if all_finished else 1


def check_resume_flags(args: argparse.Namespace, **flags: object) -> None:
    """Reject flags that define trials, which have no effect on the stored trials of a folder."""
    for name, value in {**flags, "--seeds": args.seeds, "--run": args.folder}.items():
        if value:
            raise ConfigError(f"{name} has no effect with --resume: {args.resume} defines the trials; remove it")
    if args.overrides:
        raise ConfigError(
            f"{args.overrides[0]} has no effect with --resume: {args.resume} defines the trials; remove it"
        )


def _resume_flags(args: argparse.Namespace) -> str:
    return ("--live " if args.command == "compare" else "") + "--resume "


def _write_files(args: argparse.Namespace, results: "SweepResults") -> None:
    if args.html is not None:
        from keel.common.atomic_files import atomic_file
        from keel.tools.sweep.html import render_results

        with atomic_file(args.html) as temporary:
            temporary.write_text(render_results(results), encoding="utf-8")
    if args.parquet is not None:
        from keel.tools.sweep.long_table import write_table

        write_table(args.parquet, results)


# -- progress ---------------------------------------------------------------------------------------------------------


class SweepDisplay:
    """A `SweepCallback` that shows the progress of trials."""

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
            TextColumn("{task.fields[status]}", markup=False),
            console=screen,
            disable=not screen.is_terminal,
            transient=True,
        )

    def __enter__(self) -> "SweepDisplay":
        self._print(f"{len(self._trial_numbers)} trials in {self._plan.folder}")
        self._total_bar = self._progress.add_task("all trials", total=sum(self._steps_left.values()), status="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def skipped(self, trial: "Trial") -> None:
        self._steps_left[trial.name] = 0
        self._print(f"{self._trial_label(trial)}: already finished")

    def started(self, trial: "Trial", start_step: int) -> None:
        steps = self._plan.steps[trial.name]
        self._steps_left[trial.name] = steps - start_step
        self._trial_start_times[trial.name] = self._clock()
        if not self._steps_trained:
            self._start_time = self._clock()  # loading the first model does not count as training time
        self._bars[trial.name] = self._progress.add_task(
            self._trial_label(trial), total=steps, completed=start_step, status=""
        )
        if start_step:
            self._print(f"{self._trial_label(trial)}: resumed after step {start_step} of {steps}")

    def step(self, trial: "Trial", step: int, metrics: Mapping[str, float]) -> None:
        steps = self._plan.steps[trial.name]
        self._steps_left[trial.name] = steps - step
        self._steps_trained += 1
        reward = f", reward {metrics['reward']:.3f}" if "reward" in metrics else ""
        status = f"step {step}/{steps}{reward}"
        if trial.name in self._bars:
            self._progress.update(self._bars[trial.name], completed=step, status=status)
        self._update_total_bar()
        if not self._console.is_terminal and self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._print(f"{self._trial_label(trial)}: {status}{self._time_left()}")

    def notice(self, trial: "Trial", text: str) -> None:
        self._print(f"{self._trial_label(trial)}: {text}")

    def ended(self, trial: "Trial", outcome: "TrialOutcome") -> None:
        duration = format_duration(self._clock() - self._trial_start_times.get(trial.name, self._clock()))
        if outcome.status != "stopped":
            self._steps_left[trial.name] = 0
        if trial.name in self._bars:
            self._progress.remove_task(self._bars.pop(trial.name))
        self._update_total_bar()
        messages = {"finished": f"finished in {duration}", "stopped": "stopped", "failed": f"failed: {outcome.error}"}
        left = self._time_left() if outcome.status != "stopped" else ""
        self._print(f"{self._trial_label(trial)}: {messages[outcome.status]}{left}")

    def _update_total_bar(self) -> None:
        total = sum(self._plan.steps.values())
        done = total - sum(self._steps_left.values())
        self._progress.update(self._total_bar, completed=done, status=self._time_left().removeprefix("; "))

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


# -- result table -----------------------------------------------------------------------------------------------------


def print_results(out: Console, results: "SweepResults") -> None:
    """Print the variants with mean and spread and, with several seeds, each run."""
    from keel.tools.sweep.html import MEASURE_HEADERS, MEASURE_NOTES, format_interval, format_measure, variant_cells

    table = _make_table("variant", "runs", *MEASURE_HEADERS)
    for variant in results.variants:
        table.add_row(
            Text(escape_unprintable(variant.name)),
            f"{len(variant.finished)}/{len(variant.trials)}",
            *variant_cells(variant, "\n"),
        )
    out.print()
    out.print(table)
    spread = "one seed: the variation between runs is unknown"
    if results.seeds > 1:
        spread = f"±: standard deviation over {results.seeds} seeds"
    for note in (*MEASURE_NOTES, spread):
        out.print(note, style="dim")
    if results.seeds > 1:
        runs = _make_table("run", "status", "steps", *MEASURE_HEADERS[:3])
        for trial in results.trials:
            rewards = (format_measure(name, trial.measures[name]) for name in ("training", "evaluation"))
            runs.add_row(Text(trial.name), trial.status, f"{trial.steps:,}", *rewards, format_interval(trial.interval))
        out.print()
        out.print(runs)
    for trial in results.trials:
        if trial.status == "failed":
            out.print(Text(escape_unprintable(f"{trial.name} failed: {trial.error}"), "yellow"), soft_wrap=True)


def _make_table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for index, header in enumerate(headers):
        # headers of two words take two lines
        lines = header if header.endswith("%") else header.replace(" ", "\n", 1)
        table.add_column(lines, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index > 0)
    return table
