"""`keel train`: train with a recipe, or resume a run.

Ctrl-C finishes the step, saves and prints how to resume; a second Ctrl-C exits immediately, and the run can be resumed
as after a crash.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keel.cli.stop_signals import SIGNAL_DEBOUNCE_SECONDS
from keel.errors import ConfigError
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.run.folder import RunFolder
    from keel.run.monitor.callbacks import RunCallback
    from keel.run.start.run_kind import RunKind
    from keel.training.distributed.world import RankInfo

FLAGS = (
    *("--run", "--resume", "--allow-changes", "--dataset", "--reward", "--model"),
    *("--json", "--metrics-port", "--metrics-host", "--metrics-key-file"),
)


class MetricsListener(NamedTuple):
    """Socket of the metrics endpoint, and the key that it requires."""

    listener: socket.socket
    key: str | None


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model with a recipe, or resume a run",
        description="Train with RECIPE, a TOML file or the name of a packaged recipe, and overrides.\n"
        "Everything the run writes is in its folder.\n"
        "After a crash, a kill or Ctrl-C, --resume continues from the last recorded step.\n\n"
        "Without a recipe, --dataset and --reward are enough: a row is a prompt whose completion the reward scores.\n\n"
        "The exit code is 0 if the run ended or was stopped, 1 if every rollout failed and nothing trained, and 2\n"
        "after an error.",
        epilog="examples:\n  keel train larger_number\n"
        "  keel train larger_number --steps 5 --objective.name ipo_kl --run runs/ipo\n"
        "  keel train --dataset train.jsonl --reward my_rewards:reward --model smollm2-135m\n"
        "  keel train --resume runs/ipo",
        usage="keel train [-h] [--run DIR | --resume RUN] [--allow-changes] [--json]"
        " [--metrics-port N]\n                  [--metrics-host HOST] [--metrics-key-file FILE]"
        "\n                  [RECIPE | --dataset FILE --reward NAME ...] [--model NAME] [--a.b VALUE ...]",
    )
    add_run_arguments(parser)
    add_dataset_arguments(parser, "train on this data set: the environment `dataset` of the run")
    parser.add_argument("--model", metavar="NAME", help="the same as --model.name")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_metrics_flags(parser)
    parser.set_defaults(run=run)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe of a run and the arguments that start or resume it."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    folder_group = parser.add_mutually_exclusive_group()
    folder_group.add_argument(
        "--run", dest="folder", metavar="DIR", type=Path, help="folder of the run (default: runs/RECIPE)"
    )
    folder_group.add_argument("--resume", metavar="RUN", type=Path, help="resume this run with its recorded settings")
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: allow changed settings")


def add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the metrics endpoint."""
    parser.add_argument(
        "--metrics-port",
        metavar="N",
        type=int,
        default=0,
        help="serve Prometheus metrics on this port (default: 0, off)",
    )
    parser.add_argument(
        "--metrics-host",
        metavar="HOST",
        default="127.0.0.1",
        help="address of the metrics endpoint (default: 127.0.0.1)",
    )
    parser.add_argument("--metrics-key-file", metavar="FILE", type=Path, help="a file with the key of the endpoint")


def add_dataset_arguments(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --dataset and --reward."""
    parser.add_argument("--dataset", metavar="FILE", help=help)
    parser.add_argument(
        "--reward",
        dest="rewards",
        metavar="NAME",
        action="append",
        help="a built-in reward or module:function for --dataset; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Train until the run ends or is stopped."""
    from keel.run.start.run_kind import train_kind

    return start_run(args, _prepare_arguments, train_kind)


def _prepare_arguments(args: argparse.Namespace) -> None:
    args.overrides = [*_short_overrides(args), *args.overrides]
    if args.recipe is None and args.resume is None and args.dataset is None:
        raise ConfigError(
            "pass a RECIPE, --dataset FILE with --reward NAME, or --resume RUN, for example: keel train larger_number"
        )


def start_run(
    args: argparse.Namespace,
    prepare_arguments: Callable[[argparse.Namespace], None],
    make_kind: "Callable[[RankInfo | None], RunKind]",
) -> int:
    """Create or resume a run as the arguments say, and train until it ends or is stopped."""
    rank_info = _rank_info()
    add_module_folders(args.recipe, args.resume)
    if rank_info is not None and rank_info.rank:
        return _run_rank_worker(rank_info)
    prepare_arguments(args)
    if args.allow_changes and args.resume is None:
        raise ConfigError("--allow-changes has no effect without --resume")
    # bound first, so that no folder is created if the port is in use
    kind = make_kind(rank_info)
    with _bind_metrics_port(args) as metrics_listener, _open_run_folder(args, kind) as folder:
        return _train(kind, folder, args.json, metrics_listener, rank_info)


def _short_overrides(args: argparse.Namespace) -> list[str]:
    """Return --dataset, --reward and --model as overrides."""
    from keel.config.toml_writer import to_toml

    model = [] if args.model is None else [f"--model.name={to_toml(args.model)}"]
    return [*model, *dataset_overrides(args)]


def dataset_overrides(args: argparse.Namespace) -> list[str]:
    """Return --dataset and --reward as overrides."""
    from keel.config.toml_writer import to_toml

    if (args.dataset is None) != (args.rewards is None):
        raise ConfigError("--dataset FILE and --reward NAME need each other")
    if args.dataset is None:
        return []
    return [
        f"--environments.dataset.dataset.path={to_toml(args.dataset)}",
        f"--environments.dataset.rewards={to_toml(args.rewards)}",
    ]


def _rank_info() -> "RankInfo | None":
    """Return the rank that torchrun or a similar launcher gave this process, or None without one."""
    if "RANK" not in os.environ:
        return None  # without importing torch, so that errors are reported quickly
    from keel.training.distributed.world import RankInfo, end_with_parent

    rank_info = RankInfo.from_environment(os.environ)
    if rank_info is not None and (rank_info.rank or rank_info.has_agent_store):
        end_with_parent()  # a launcher that was killed must not leave its ranks running
    return rank_info


def _run_rank_worker(rank_info: "RankInfo") -> int:
    """Run this process as a rank other than 0: execute the commands of rank 0 until it ends."""
    from keel.training.distributed.rank_worker import run_rank_worker

    for number in (signal.SIGINT, signal.SIGTERM):
        # rank 0 also receives the signal, and finishes the step with all ranks
        signal.signal(number, signal.SIG_IGN)
    run_rank_worker(rank_info)
    return 0


def _open_run_folder(args: argparse.Namespace, kind: "RunKind") -> "RunFolder":
    """Create the folder of a new run, or open that of a resumed one."""
    from keel.run.folder import RunFolder, unused_path

    if args.resume is not None:
        return RunFolder.open(args.resume, file=args.recipe, overrides=args.overrides, allow_changes=args.allow_changes)
    loaded = kind.load(args.recipe, args.overrides)
    if args.recipe is None:
        loaded = replace(loaded, recipe_folder=Path.cwd())  # where the data set and the module of the reward are
    return RunFolder.create(
        args.folder or unused_path(Path("runs"), Path(args.recipe or args.dataset or kind.command).stem), loaded
    )


def _train(
    kind: "RunKind",
    folder: "RunFolder",
    json: bool,
    metrics_listener: MetricsListener | None,
    rank_info: "RankInfo | None",
) -> int:
    from keel.run.monitor.progress import escape_unprintable, make_run_display
    from keel.run.start.training_session import train_session
    from keel.tools.launch.plan import LAUNCHED_VARIABLE
    from keel.tools.launch.process_guard import RUN_FAILED_EXIT

    with _serve_metrics(metrics_listener) as exporter:
        display = make_run_display(json=json, columns=kind.columns)
        result = train_session(
            folder,
            display,
            _train_until_signal,
            kind=kind,
            callbacks=(exporter,),
            on_hang=_exit_hung_run,
            rank_info=rank_info,
        )
    if result.problem is not None:
        sys.stderr.write(f"keel: {escape_unprintable(result.problem)}\n")
        return RUN_FAILED_EXIT if LAUNCHED_VARIABLE in os.environ else 1
    return 0


def _exit_hung_run(reason: str) -> None:
    """Exit immediately from a run that hangs: cleaning up would hang as well."""
    sys.stderr.write(f"keel: {reason}\n")
    sys.stderr.flush()
    os._exit(2)


@contextmanager
def _bind_metrics_port(args: argparse.Namespace) -> Iterator[MetricsListener | None]:
    """Yield the socket of the metrics endpoint, or None for port 0. Addresses other than loopback require a key."""
    from keel.cli.run.serve import read_key
    from keel.inference.server.access import check_binding

    host, port = args.metrics_host, args.metrics_port
    if port == 0:
        if host != "127.0.0.1" or args.metrics_key_file is not None:
            raise ConfigError("--metrics-host and --metrics-key-file have no effect without --metrics-port")
        yield None
        return
    key = read_key(None, args.metrics_key_file)
    check_binding("--metrics-host", host, key)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--metrics-port {port}: cannot listen on {host}: {error}; choose another port") from error
    with listener:
        yield MetricsListener(listener, key)


@contextmanager
def _serve_metrics(metrics_listener: MetricsListener | None) -> Iterator["RunCallback"]:
    """Serve the metrics of the run while the context is open; yields the callback that receives them."""
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
    """Train; the first Ctrl-C or SIGTERM stops after the step, the second exits immediately."""
    loop = asyncio.get_running_loop()
    first_signal: float | None = None

    def interrupted() -> None:
        nonlocal first_signal
        if first_signal is None:
            first_signal = loop.time()
            training_run.stop()
        elif loop.time() - first_signal > SIGNAL_DEBOUNCE_SECONDS:
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    await training_run.train()
