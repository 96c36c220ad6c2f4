"""`keel launch`: train on a Ray cluster, with trainer ranks and engine servers as supervised processes.

Shows the state of the components and the trainer's output. Ctrl-C finishes the step, saves and shuts down; a second
Ctrl-C kills all components. A launch with invalid settings leaves no folder behind.
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.cli.stop_signals import stop_on_signals
from keel.errors import ConfigError, KeelError
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.tools.launch.plan import LaunchPlan

FLAGS = ("--run", "--resume", "--allow-changes", "--cluster", "--engines")


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "launch",
        help="train on a Ray cluster with several engines and trainer ranks",
        description="Train with RECIPE on a Ray cluster: engine servers and trainer ranks are processes, placed by"
        " their resources and\nrestarted if they fail. The [launch] table of the recipe sets how many there are and"
        " what each needs.",
        epilog="examples:\n  keel launch larger_number --engines 2\n"
        "  keel launch gpu_pool --cluster 10.0.0.1:6379 --engines 8 --launch.engine.gpus 1\n"
        "  keel launch --resume runs/larger_number",
        usage="keel launch [-h] [--run DIR | --resume RUN] [--allow-changes] [--cluster ADDRESS]"
        " [--engines N]\n                   [RECIPE] [--a.b VALUE ...]",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    folder_group = parser.add_mutually_exclusive_group()
    folder_group.add_argument(
        "--run",
        dest="folder",
        metavar="DIR",
        type=Path,
        help="folder of the run, on a path that all nodes share (default: runs/NAME)",
    )
    folder_group.add_argument("--resume", metavar="RUN", type=Path, help="resume this run with its recorded settings")
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: allow changed settings")
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        default="auto",
        help="local: start Ray on this machine for this launch only; HOST:PORT: the head of a cluster, such as"
        " 10.0.0.1:6379; auto: the cluster that this machine belongs to, else local (default: auto)",
    )
    parser.add_argument("--engines", metavar="N", type=int, help="engine servers to start (launch.engines)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Launch, and supervise until the run ends or is stopped."""
    from keel.cli.display.launch_display import make_launch_display
    from keel.tools.launch.launch_folder import prepared_run_folder
    from keel.tools.launch.ray_cluster import RayCluster, require_ray
    from keel.tools.launch.supervisor import Supervisor

    if (args.recipe is None) == (args.resume is None):
        raise ConfigError("pass either RECIPE or --resume RUN, for example: keel launch larger_number")
    if args.allow_changes and args.resume is None:
        raise ConfigError("--allow-changes has no effect without --resume")
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
                    with stop_on_signals(supervisor.stop, supervisor.kill):
                        outcome = supervisor.run()
    except KeyboardInterrupt:
        return 130
    except KeelError as error:
        if not (plan.run_folder / "run.db").is_file():
            raise
        raise type(error)(f"{error}\nresume with: keel launch --resume {plan.run_folder}") from None
    return _print_outcome(plan, outcome)


def _make_launch_plan(args: argparse.Namespace) -> "LaunchPlan":
    """Check everything that can be checked without a cluster and return the plan."""
    from keel.rollout.episode_runner import build_environments
    from keel.run.folder import unused_path
    from keel.run.monitor.sinks import resolve_sinks
    from keel.tools.launch.plan import check_overrides, make_plan

    if args.engines is not None:
        args.overrides = [*args.overrides, f"--launch.engines={args.engines}"]
    if args.resume is None:
        file, folder = Path(args.recipe), args.folder or unused_path(Path("runs"), Path(args.recipe).stem)
        if (folder / "run.db").exists():
            raise ConfigError(f"{folder} already holds a run; pass --resume {folder}, or choose another --run")
    else:
        file, folder = args.resume / "config.toml", args.resume
        check_overrides(args.overrides, args.allow_changes)
    plan = make_plan(file, args.overrides, folder)
    build_environments(plan.settings)
    resolve_sinks(plan.settings.metrics)
    return plan


def _print_outcome(plan: "LaunchPlan", outcome: str) -> int:
    """Print how the launch ended and return the exit code."""
    from keel.cli.display.console import console
    from keel.run.ledger import Ledger

    ledger = Ledger(plan.run_folder / "run.db")
    try:
        finished, last = ledger.get_meta("status") == "finished", ledger.last_step
    finally:
        ledger.close()
    if finished:
        line = f"finished: {plan.run_folder}"
    else:
        line = f"stopped after step {last}; resume with: keel launch --resume {plan.run_folder}"
    console().print(line, soft_wrap=True)
    return 130 if outcome == "killed" else 0


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C until the supervisor runs, so that every context manager exits."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
