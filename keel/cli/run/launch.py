"""`keel launch`: a recipe on a Ray cluster, its trainer ranks and engine servers as processes that are watched.

Shows what happens to the parts and what the trainer says. Ctrl-C finishes the step, saves and ends all parts in order;
a second one ends them at once. What is refused leaves no folder behind.
"""

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.cli.modules import add_module_folders
from keel.errors import ConfigError, KeelError

if TYPE_CHECKING:
    from keel.tools.launch.plan import LaunchPlan
    from keel.tools.launch.supervisor import Supervisor

FLAGS = ("--run", "--resume", "--allow-changes", "--cluster", "--engines")
SIGNAL_DEBOUNCE_SECONDS = 1.0
"""Seconds within which a second signal is the same request: wrappers pass on what the terminal has sent already."""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "launch",
        help="train by a recipe on a cluster: engines and trainer ranks placed by Ray",
        description="Train by RECIPE with engine servers and trainer ranks as processes of a Ray cluster, placed by"
        " resources and\nstarted again when they die. The table `launch` of the recipe says how many there are and what"
        " each needs.",
        epilog="examples:\n  keel launch recipes/larger_number.toml --engines 2\n"
        "  keel launch recipes/gpu_pool.toml --cluster 10.0.0.1:6379 --engines 8 --launch.engine.gpus 1\n"
        "  keel launch --resume runs/larger_number",
        usage="keel launch [-h] [--run DIR | --resume RUN] [--allow-changes] [--cluster WHERE]"
        " [--engines N]\n                   [RECIPE] [--a.b VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run",
        dest="folder",
        metavar="DIR",
        type=Path,
        help="folder of the run, seen by all nodes (default: runs/NAME)",
    )
    where.add_argument("--resume", metavar="RUN", type=Path, help="go on with this run, by its own settings")
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: go on with other settings")
    parser.add_argument(
        "--cluster",
        metavar="WHERE",
        default="auto",
        help="local: a Ray of this machine alone, which ends with the launch; ADDRESS: of the head of a cluster, such"
        " as 10.0.0.1:6379; auto: the cluster that this machine belongs to, else local (default: auto)",
    )
    parser.add_argument("--engines", metavar="N", type=int, help="engine servers to start (launch.engines)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Launch, and stay until the run has ended or was told to stop."""
    from keel.cli.display.launch_display import make_launch_display
    from keel.tools.launch.launch_folder import prepared_run_folder
    from keel.tools.launch.ray_cluster import RayCluster, require_ray
    from keel.tools.launch.supervisor import Supervisor

    if (args.recipe is None) == (args.resume is None):
        raise ConfigError("give a RECIPE, or --resume RUN; recipes/larger_number.toml is one to begin with")
    if args.allow_changes and args.resume is None:
        raise ConfigError("--allow-changes cannot act without --resume")
    require_ray()
    add_module_folders(args.recipe, args.resume)
    plan = _make_launch_plan(args)
    try:
        with _sigterm_as_interrupt(), RayCluster(args.cluster, plan) as cluster:
            cluster.reserve_resources()
            with prepared_run_folder(plan, resume=args.resume is not None, overrides=args.overrides):
                cluster.start_agents()
                with make_launch_display(plan, cluster.host) as watcher:
                    supervisor = Supervisor(plan, cluster, watcher)
                    with _stop_on_signals(supervisor):
                        outcome = supervisor.run()
    except KeyboardInterrupt:
        return 130
    except KeelError as error:
        begun = (plan.run_folder / "run.db").is_file()
        raise type(error)(f"{error}\ngo on with: keel launch --resume {plan.run_folder}") if begun else error from None
    return _print_outcome(plan, outcome)


def _make_launch_plan(args: argparse.Namespace) -> "LaunchPlan":
    """Everything that can be refused without a cluster is refused here."""
    from keel.rollout.episode_runner import build_environments
    from keel.run.folder import unused_path
    from keel.run.monitor.sinks import resolve_sinks
    from keel.tools.launch.plan import check_overrides, make_plan

    if args.engines is not None:
        args.overrides = [*args.overrides, f"--launch.engines={args.engines}"]
    if args.resume is None:
        file, folder = Path(args.recipe), args.folder or unused_path(Path("runs"), Path(args.recipe).stem)
        if (folder / "run.db").exists():
            raise ConfigError(f"{folder} holds a run; go on with it by --resume {folder}, or choose another --run")
    else:
        file, folder = args.resume / "config.toml", args.resume
        check_overrides(args.overrides, args.allow_changes)
    plan = make_plan(file, args.overrides, folder)
    build_environments(plan.settings)
    resolve_sinks(plan.settings.metrics)
    return plan


def _print_outcome(plan: "LaunchPlan", outcome: str) -> int:
    """How it ended, in a line."""
    from keel.cli.display.console import console
    from keel.run.ledger import Ledger

    ledger = Ledger(plan.run_folder / "run.db")
    try:
        finished, last = ledger.get_meta("status") == "finished", ledger.last_step
    finally:
        ledger.close()
    if finished:
        said = f"finished: {plan.run_folder}"
    else:
        said = f"stopped after step {last}; go on with: keel launch --resume {plan.run_folder}"
    console().print(said, soft_wrap=True)
    return 130 if outcome == "killed" else 0


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Until there is something to stop in order, SIGTERM is what Ctrl-C is: everything is left by its `with`."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stop_on_signals(supervisor: "Supervisor") -> Iterator[None]:
    """Ctrl-C and SIGTERM as requests: the first is patient, the second is not."""
    asked: list[float] = []

    def interrupted(*_: object) -> None:
        if asked and time.monotonic() - asked[0] > SIGNAL_DEBOUNCE_SECONDS:
            supervisor.kill()
        elif not asked:
            asked.append(time.monotonic())
            supervisor.stop()

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
