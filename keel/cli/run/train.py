"""`keel train`: run a recipe, or go on with a run.

Ctrl-C finishes the step, saves and says how to go on; a second one stops at once, and what is on the disk is as good as
after a crash, which is good.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keel.cli.modules import add_module_folders
from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.run.folder import RunFolder
    from keel.run.monitor.callbacks import RunCallback
    from keel.training.distributed.world import RankInfo

SIGNAL_DEBOUNCE_SECONDS = 1.0
"""Seconds within which a second signal is the same request: wrappers pass on what the terminal has sent already."""

FLAGS = ("--run", "--resume", "--allow-changes", "--json", "--metrics-port", "--metrics-host", "--metrics-key-file")


class MetricsListener(NamedTuple):
    """Where the run's numbers are asked for, and the key that asks for them."""

    listener: socket.socket
    key: str | None


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model by a recipe, or go on with a run",
        description="Train by RECIPE, a TOML file (see recipes/), with overrides. Everything of the run is in its"
        " folder.\nAfter a crash, a kill or Ctrl-C, --resume goes on from the last step that was written down.",
        epilog="examples:\n  keel train recipes/larger_number.toml\n"
        "  keel train recipes/larger_number.toml --steps 5 --objective.name ipo_kl --run runs/ipo\n"
        "  keel train --resume runs/ipo",
        usage="keel train [-h] [--run DIR | --resume RUN] [--allow-changes] [--json]"
        " [--metrics-port N]\n                  [--metrics-host HOST] [--metrics-key-file FILE]"
        "\n                  [RECIPE] [--a.b VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run", dest="folder", metavar="DIR", type=Path, help="folder of the run (default: runs/RECIPE)"
    )
    where.add_argument("--resume", metavar="RUN", type=Path, help="go on with this run, by its own settings")
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: go on with other settings")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    parser.add_argument(
        "--metrics-port", metavar="N", type=int, default=0, help="Prometheus metrics on this port (default: 0, none)"
    )
    parser.add_argument(
        "--metrics-host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument("--metrics-key-file", metavar="FILE", type=Path, help="a file that holds the key")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train to the end, or to where it was told to stop."""
    place = _rank_info()
    if place is not None and place.rank:
        return _run_rank_worker(place)
    if args.recipe is None and args.resume is None:
        raise ConfigError("give a RECIPE, or --resume RUN; recipes/larger_number.toml is one to begin with")
    if args.allow_changes and args.resume is None:
        raise ConfigError("--allow-changes cannot act without --resume")
    add_module_folders(args.recipe, args.resume)
    # asked for and refused before there is a folder: a run that cannot begin leaves nothing
    with _bind_metrics_port(args) as bound:
        folder = _open_run_folder(args, place)
        try:
            return _train(folder, args.json, bound, place)
        finally:
            folder.close()


def _rank_info() -> "RankInfo | None":
    """Where torchrun, or whoever speaks as it does, has put this process; None: it was started alone."""
    if "RANK" not in os.environ:
        return None  # without asking torch, so that a refusal is quick
    from keel.training.distributed.world import RankInfo, end_with_parent

    place = RankInfo.from_environment(os.environ)
    if place is not None and (place.rank or place.has_agent_store):
        end_with_parent()  # a launcher that was killed must not leave its ranks behind
    return place


def _run_rank_worker(rank_info: "RankInfo") -> int:
    """This process is another rank of a run: it does what rank 0 says, and ends with it."""
    from keel.training.distributed.rank_worker import run_rank_worker

    for number in (signal.SIGINT, signal.SIGTERM):
        # rank 0 gets them too, and finishes the step with all ranks
        signal.signal(number, signal.SIG_IGN)
    run_rank_worker(rank_info)
    return 0


def _open_run_folder(args: argparse.Namespace, rank_info: "RankInfo | None") -> "RunFolder":
    """The folder of the run, new or to go on with."""
    from keel.config import load_settings
    from keel.rollout.episode_runner import build_environments
    from keel.run.folder import RunFolder, unused_path
    from keel.run.monitor.sinks import resolve_sinks
    from keel.training.distributed.rank_processes import RankProcesses

    if args.resume is not None:
        return RunFolder.open(args.resume, file=args.recipe, overrides=args.overrides, allow_changes=args.allow_changes)
    loaded = load_settings(args.recipe, args.overrides)
    build_environments(loaded.settings)  # whatever it refuses leaves no folder behind
    resolve_sinks(loaded.settings.metrics)
    RankProcesses(loaded.settings.trainer, rank_info)
    return RunFolder.create(args.folder or unused_path(Path("runs"), Path(args.recipe).stem), loaded)


def _train(
    folder: "RunFolder", json: bool, metrics_listener: MetricsListener | None, rank_info: "RankInfo | None"
) -> int:
    from keel.cli.display.progress import make_run_display
    from keel.run.event_loop import run_to_completion
    from keel.run.loop import TrainingRun
    from keel.run.monitor.callbacks import CallbackList
    from keel.run.monitor.sinks import open_sinks
    from keel.run.summary import summarize_run

    text = ""
    with _serve_metrics(metrics_listener) as exporter:
        shown = make_run_display(json=json)
        # sinks before the display: how they end is shown
        observer = CallbackList(open_sinks(folder, shown.notice), exporter, shown)
        if folder.settings.launch is not None and rank_info is None:
            shown.notice("the table launch is for `keel launch`: this run uses this machine alone")
        try:
            going = TrainingRun(folder, observer, on_hang=_exit_hung_run, rank_info=rank_info)
            run_to_completion(_train_until_signal(going))
            text = summarize_run(folder)
            if folder.ledger.get_meta("status") == "stopped":
                text += f"\nstopped    after step {going.step}; go on with: keel train --resume {folder.path}"
        finally:
            observer.ended(text)
    return 0


def _exit_hung_run(reason: str) -> None:
    """The end of a run that hangs where nothing can reach it: no clean-up would return either."""
    sys.stderr.write(f"keel: {reason}\n")
    sys.stderr.flush()
    os._exit(2)


@contextmanager
def _bind_metrics_port(args: argparse.Namespace) -> Iterator[MetricsListener | None]:
    """A socket for the metrics, on this machine's own address unless there is a key; none for port 0."""
    from keel.cli.run.serve import read_key
    from keel.inference.server.access import check_binding

    host, port = args.metrics_host, args.metrics_port
    if port == 0:
        if host != "127.0.0.1" or args.metrics_key_file is not None:
            raise ConfigError("--metrics-host and --metrics-key-file cannot act without --metrics-port")
        yield None
        return
    key = read_key(None, args.metrics_key_file)
    check_binding("--metrics-host", host, key)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--metrics-port {port}: cannot listen on {host}: {error}; choose another") from error
    with listener:
        yield MetricsListener(listener, key)


@contextmanager
def _serve_metrics(metrics_listener: MetricsListener | None) -> Iterator["RunCallback"]:
    """What the run's numbers are served from, while the block lasts."""
    from keel.run.monitor.callbacks import NullCallback

    if metrics_listener is None:
        yield NullCallback()
        return
    from keel.run.monitor.exporter import Exporter, ExporterServer

    exporter = Exporter()
    server = ExporterServer(exporter, metrics_listener.listener, metrics_listener.key)
    server.start()
    try:
        yield exporter
    finally:
        server.stop()


async def _train_until_signal(training_run: Any) -> None:
    """Train, with Ctrl-C and SIGTERM as requests to stop: the first is patient, the second is not."""
    loop = asyncio.get_running_loop()
    asked: float | None = None

    def interrupted() -> None:
        nonlocal asked
        if asked is None:
            asked = loop.time()
            training_run.stop()
        elif loop.time() - asked > SIGNAL_DEBOUNCE_SECONDS:
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    await training_run.train()
