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
    from keel.run.monitor.callbacks import Observer
    from keel.training.distributed.world import Place

TWICE = 1.0
"""Seconds within which a second signal is the same request: wrappers pass on what the terminal has sent already."""

FLAGS = ("--run", "--resume", "--allow-changes", "--json", "--metrics-port", "--metrics-host", "--metrics-key-file")


class Bound(NamedTuple):
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
    place = _place()
    if place is not None and place.rank:
        return _follow(place)
    if args.recipe is None and args.resume is None:
        raise ConfigError("give a RECIPE, or --resume RUN; recipes/larger_number.toml is one to begin with")
    if args.allow_changes and args.resume is None:
        raise ConfigError("--allow-changes cannot act without --resume")
    add_module_folders(args.recipe, args.resume)
    # asked for and refused before there is a folder: a run that cannot begin leaves nothing
    with _bound(args) as bound:
        folder = _folder(args, place)
        try:
            return _train(folder, args.json, bound, place)
        finally:
            folder.close()


def _place() -> "Place | None":
    """Where torchrun, or whoever speaks as it does, has put this process; None: it was started alone."""
    if "RANK" not in os.environ:
        return None  # without asking torch, so that a refusal is quick
    from keel.training.distributed.world import Place, end_with_parent

    place = Place.of(os.environ)
    if place is not None and (place.rank or place.agent):
        end_with_parent()  # a launcher that was killed must not leave its ranks behind
    return place


def _follow(place: "Place") -> int:
    """This process is another rank of a run: it does what rank 0 says, and ends with it."""
    from keel.training.distributed.rank_worker import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        # rank 0 gets them too, and finishes the step with all ranks
        signal.signal(number, signal.SIG_IGN)
    follow(place)
    return 0


def _folder(args: argparse.Namespace, place: "Place | None") -> "RunFolder":
    """The folder of the run, new or to go on with."""
    from keel.config import load
    from keel.rollout.episode_runner import arenas
    from keel.run.folder import RunFolder, free_name
    from keel.run.monitor.sinks import require
    from keel.training.distributed.rank_processes import Crew

    if args.resume is not None:
        return RunFolder.open(args.resume, file=args.recipe, overrides=args.overrides, allow_changes=args.allow_changes)
    loaded = load(args.recipe, args.overrides)
    arenas(loaded.settings)  # whatever it refuses leaves no folder behind
    require(loaded.settings.metrics)
    Crew(loaded.settings.trainer, place)
    return RunFolder.create(args.folder or free_name(Path("runs"), Path(args.recipe).stem), loaded)


def _train(folder: "RunFolder", json: bool, bound: Bound | None, place: "Place | None") -> int:
    from keel.cli.display.progress import display
    from keel.run.event_loop import complete
    from keel.run.loop import Run
    from keel.run.monitor.callbacks import Several
    from keel.run.monitor.sinks import open_sinks
    from keel.run.summary import summary

    text = ""
    with _exported(bound) as exporter:
        shown = display(json=json)
        # sinks before the display: how they end is shown
        observer = Several(open_sinks(folder, shown.notice), exporter, shown)
        if folder.settings.launch is not None and place is None:
            shown.notice("the table launch is for `keel launch`: this run uses this machine alone")
        try:
            going = Run(folder, observer, abandon=_abandon, place=place)
            complete(_watched(going))
            text = summary(folder)
            if folder.ledger.get("status") == "stopped":
                text += f"\nstopped    after step {going.step}; go on with: keel train --resume {folder.path}"
        finally:
            observer.ended(text)
    return 0


def _abandon(why: str) -> None:
    """The end of a run that hangs where nothing can reach it: no clean-up would return either."""
    sys.stderr.write(f"keel: {why}\n")
    sys.stderr.flush()
    os._exit(2)


@contextmanager
def _bound(args: argparse.Namespace) -> Iterator[Bound | None]:
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
        yield Bound(listener, key)


@contextmanager
def _exported(bound: Bound | None) -> Iterator["Observer"]:
    """What the run's numbers are served from, while the block lasts."""
    from keel.run.monitor.callbacks import Silent

    if bound is None:
        yield Silent()
        return
    from keel.run.monitor.exporter import Exporter, ExporterServer

    exporter = Exporter()
    server = ExporterServer(exporter, bound.listener, bound.key)
    server.start()
    try:
        yield exporter
    finally:
        server.stop()


async def _watched(going: Any) -> None:
    """Train, with Ctrl-C and SIGTERM as requests to stop: the first is patient, the second is not."""
    loop = asyncio.get_running_loop()
    asked: float | None = None

    def interrupted() -> None:
        nonlocal asked
        if asked is None:
            asked = loop.time()
            going.stop()
        elif loop.time() - asked > TWICE:
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    await going.train()
