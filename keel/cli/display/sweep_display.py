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

from keel.cli.display.console import PLAIN_WIDTH, console, write
from keel.cli.display.progress import QUIET, duration, plain
from keel.cli.modules import add_module_folders
from keel.cli.run.train import TWICE
from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.tools.sweep import Outcome, Plan, Results, Trial, Variant

FLAGS = ("--seeds", "--at-once", "--run", "--resume", "--html", "--parquet", "--json")


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """The flags that say how trials are run and where they are kept."""
    parser.add_argument("--seeds", metavar="K", type=int, help="runs of each variant, each with a seed of its own (1)")
    parser.add_argument("--at-once", metavar="N", type=int, help="trials that run at once, each in a process (1)")
    parser.add_argument("--run", dest="folder", metavar="DIR", type=Path, help=f"folder of the trials ({default})")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="go on with the trials of this folder")


def run_trials(args: argparse.Namespace, recipe: str | None, variants: "Sequence[Variant]", kind: str) -> int:
    """Run, show, and write what was asked for; 0: every trial is finished."""
    from keel.run.folder import free_name
    from keel.tools.sweep import Plan, Session
    from keel.tools.sweep.results import results

    add_module_folders(recipe, args.resume)
    if args.resume is not None:
        plan = Plan.read(args.resume)
    else:
        assert recipe is not None
        folder = args.folder or free_name(Path("runs"), f"{Path(recipe).stem}-{kind}")
        plan = Plan.create(folder, Path(recipe), args.overrides, variants, 1 if args.seeds is None else args.seeds)
    screen = _stderr() if args.json else console()
    at_once = 1 if args.at_once is None else args.at_once
    with Display(screen, plan) as display:
        session = Session(plan, display, at_once=at_once)
        with _interruptible(session):
            outcomes = session.run()
    found = results(plan, outcomes)
    _write_files(args, found)
    if args.json:
        write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        show(screen, found)
        for path in (args.html, args.parquet):
            if path is not None:
                screen.print(Text(f"written: {path}"))
    done = all(trial.status == "finished" for trial in found.trials)
    if not done:
        screen.print(Text(f"not all trials are finished; go on with: keel {args.command} {_again(args)}{plan.folder}"))
    return 0 if done else 1


def refuse_with_resume(args: argparse.Namespace, **given: object) -> None:
    """Whatever says which trials there are cannot act on trials that are written down already."""
    for name, value in {**given, "--seeds": args.seeds, "--run": args.folder}.items():
        if value:
            raise ConfigError(f"{name} cannot act with --resume: {args.resume} says which trials there are")
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]} cannot act with --resume: {args.resume} says which trials there are")


def _again(args: argparse.Namespace) -> str:
    return ("--live " if args.command == "compare" else "") + "--resume "


def _write_files(args: argparse.Namespace, found: "Results") -> None:
    if args.html is not None:
        from keel.tools.compare.files import replaced
        from keel.tools.sweep.html import page

        with replaced(args.html) as temporary:
            temporary.write_text(page(found), encoding="utf-8")
    if args.parquet is not None:
        from keel.tools.sweep.long_table import write_table

        write_table(args.parquet, found)


@contextmanager
def _interruptible(session: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM as requests to stop: the first is patient, the second is not."""
    asked: float | None = None

    def interrupted(*_: object) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            session.stop()
        elif time.monotonic() - asked > TWICE:
            session.kill()
            os._exit(130)

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- while they run ---------------------------------------------------------------------------------------------------


class Display:
    """Tells how far the trials are: a watcher of `keel.tools.sweep.Session`."""

    def __init__(self, screen: Console, plan: "Plan", clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._plan, self._clock = screen, plan, clock
        self._numbers = {trial.name: number for number, trial in enumerate(plan.trials, start=1)}
        self._left = dict(plan.steps)
        self._trained = 0
        self._began = self._said = clock()
        self._starts: dict[str, float] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(30),
            TextColumn("{task.fields[told]}", markup=False),
            console=screen,
            disable=not screen.is_terminal,
            transient=True,
        )

    def __enter__(self) -> "Display":
        self._say(f"{len(self._numbers)} trials in {self._plan.folder}")
        self._all = self._progress.add_task("all trials", total=sum(self._left.values()), told="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def skipped(self, trial: "Trial") -> None:
        self._left[trial.name] = 0
        self._say(f"{self._place(trial)}: was finished before")

    def began(self, trial: "Trial", first: int) -> None:
        steps = self._plan.steps[trial.name]
        self._left[trial.name] = steps - first
        self._starts[trial.name] = self._clock()
        if not self._trained:
            self._began = self._clock()  # what the first start took says nothing about the steps
        self._bars[trial.name] = self._progress.add_task(self._place(trial), total=steps, completed=first, told="")
        if first:
            self._say(f"{self._place(trial)}: goes on after step {first} of {steps}")

    def step(self, trial: "Trial", step: int, numbers: Mapping[str, float]) -> None:
        steps = self._plan.steps[trial.name]
        self._left[trial.name] = steps - step
        self._trained += 1
        told = f"step {step}/{steps}, reward {numbers['reward']:.3f}" if "reward" in numbers else f"step {step}/{steps}"
        if trial.name in self._bars:
            self._progress.update(self._bars[trial.name], completed=step, told=told)
        self._draw()
        if not self._console.is_terminal and self._clock() - self._said >= QUIET:
            self._say(f"{self._place(trial)}: {told}{self._time_left()}")

    def notice(self, trial: "Trial", text: str) -> None:
        self._say(f"{self._place(trial)}: {text}")

    def ended(self, trial: "Trial", outcome: "Outcome") -> None:
        took = duration(self._clock() - self._starts.get(trial.name, self._clock()))
        if outcome.status != "stopped":
            self._left[trial.name] = 0
        if trial.name in self._bars:
            self._progress.remove_task(self._bars.pop(trial.name))
        self._draw()
        told = {"finished": f"finished in {took}", "stopped": "stopped", "failed": f"failed: {outcome.error}"}
        left = self._time_left() if outcome.status != "stopped" else ""
        self._say(f"{self._place(trial)}: {told[outcome.status]}{left}")

    def _draw(self) -> None:
        total = sum(self._plan.steps.values())
        done = total - sum(self._left.values())
        self._progress.update(self._all, completed=done, told=self._time_left().removeprefix("; "))

    def _time_left(self) -> str:
        left = sum(self._left.values())
        if not left or not self._trained:
            return ""
        return f"; about {duration((self._clock() - self._began) / self._trained * left)} left"

    def _place(self, trial: "Trial") -> str:
        return f"{self._numbers[trial.name]}/{len(self._numbers)} {trial.name}"

    def _say(self, text: str) -> None:
        self._console.print(Text(plain(text)), soft_wrap=True)
        self._said = self._clock()


def _stderr() -> Console:
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, markup=False, highlight=False, emoji=False)


# -- the table --------------------------------------------------------------------------------------------------------


def show(out: Console, found: "Results") -> None:
    """Variants with mean and spread; with several seeds each run, too."""
    from keel.tools.sweep.html import HEADS, cells, interval, shown

    table = _table("variant", "runs", *HEADS)
    for variant in found.variants:
        table.add_row(
            Text(plain(variant.name)), f"{len(variant.finished)}/{len(variant.trials)}", *cells(variant, "\n")
        )
    out.print()
    out.print(table)
    spread = "one seed: the spread between runs is not known"
    if found.seeds > 1:
        spread = f"±: standard deviation over {found.seeds} seeds"
    out.print(
        "training: reward in the last fifth of the steps; evaluation: on held-out tasks, 95 % interval over tasks;\n"
        "mismatch: KL of sampler and policy; low, high: share of tokens dropped; tokens: that trained;\n" + spread,
        style="dim",
    )
    if found.seeds > 1:
        runs = _table("run", "status", "steps", "training", "evaluation", "95 %")
        for trial in found.trials:
            rewards = (shown(name, trial.measures[name]) for name in ("training", "evaluation"))
            runs.add_row(Text(trial.name), trial.status, f"{trial.steps:,}", *rewards, interval(trial.interval))
        out.print()
        out.print(runs)
    for trial in found.trials:
        if trial.status == "failed":
            out.print(Text(plain(f"{trial.name} failed: {trial.error}"), "yellow"), soft_wrap=True)


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", overflow="fold", no_wrap=place > 0)
    return table
