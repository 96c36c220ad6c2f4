"""`keel pool`: how the members of a pool are doing, and with --load new weights for all of them.

Without --load it only asks: nothing is loaded. It starts and stops no server.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.cli.run.serve import read_key
from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.config import PoolSettings
    from keel.inference.pool.member import MemberStatus
    from keel.inference.pool.pool import Pool
    from keel.inference.pool.target_weights import WeightLoad

STYLES = {"ready": "green", "syncing": "yellow", "discovering": "dim", "unhealthy": "red"}


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "pool",
        help="show the state of engine servers",
        description="Ask every member of a pool how it is doing and print its state, version, load and errors.\n\nThe"
        " members are URLs, every address of a DNS name, the lines of a file, or a JSON list at an address.\nA member"
        " behind the newest version is shown as syncing. Nothing is changed on any of them, unless weights are loaded"
        " with --load:\nthe folder is one that every member sees, of all weights or of an adapter.\n\nExit code 0: all"
        " members are ready; 1: some are not, or none was found; 2: refused.",
        epilog="examples:\n  keel pool http://127.0.0.1:8000 http://127.0.0.1:8001\n"
        "  keel pool --dns engines.internal:8000 --watch\n  keel pool --file members.txt --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("urls", metavar="URL", nargs="*")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dns", metavar="NAME:PORT", help="every address of this name is a member")
    source.add_argument("--file", metavar="FILE", help="a file with one URL a line")
    source.add_argument("--discovery-url", metavar="URL", help="an address that answers with a JSON list of URLs")
    parser.add_argument("--watch", action="store_true", help="go on until interrupted")
    parser.add_argument("--json", action="store_true", help="for machines: one object, or one a look with --watch")
    parser.add_argument(
        "--poll-interval", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds for an answer (default: 5)")
    parser.add_argument(
        "--backend", choices=("keel", "vllm"), default="keel", help="what the members are (default: keel)"
    )
    parser.add_argument("--load", metavar="DIR", type=Path, help="load weights or an adapter into all members first")
    parser.add_argument("--version", type=int, metavar="N", help="with --load: what answers say they were sampled by")
    parser.add_argument("--drain", action="store_true", help="with --load: answers under way end before the change")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="sent to the members; other users can see it in `ps`")
    key.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file that holds the key")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look once, or until interrupted; the exit code is that of the last look."""
    from keel.inference.pool.http_engine import HttpEngine
    from keel.inference.pool.pool import Pool
    from keel.inference.pool.vllm_engine import VllmEngine

    settings = make_pool_settings(args)
    key = read_key(args.api_key, args.api_key_file)
    server = VllmEngine if settings.backend == "vllm" else HttpEngine
    pool = Pool(settings, lambda url: server(url, api_key=key), version=None)
    # what goes wrong is in the table; without a handler it would also be on standard error
    silent, logger = logging.NullHandler(), logging.getLogger("keel")
    logger.addHandler(silent)
    last = ExitCode()
    try:
        asyncio.run(show_pool(pool, last, make_weight_load(args), json_lines=args.json, watch=args.watch))
    except KeyboardInterrupt:
        if not args.watch:
            raise
    finally:
        logger.removeHandler(silent)
    return last.value


def make_pool_settings(args: argparse.Namespace) -> "PoolSettings":
    """The arguments as settings; what cannot be is a `ConfigError`."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import PoolSettings

    given = [name for name in ("urls", "dns", "file", "discovery_url") if getattr(args, name)]
    if len(given) != 1:
        raise ConfigError("give the members as URLs, or with one of --dns, --file and --discovery-url")
    try:
        return PoolSettings(
            urls=args.urls,
            dns=args.dns,
            file=args.file,
            discovery_url=args.discovery_url,
            poll_interval=args.poll_interval,
            health_timeout=args.timeout,
            backend=args.backend,
        )
    except ValidationError as error:
        raise to_config_error(error, ("pool",)) from None


def make_weight_load(args: argparse.Namespace) -> "WeightLoad | None":
    """What is to be loaded; what cannot be is a `ConfigError`."""
    from keel.inference.pool.target_weights import WeightLoad
    from keel.inference.protocol import WeightSource

    if args.load is None:
        for name in ("version", "drain"):
            if getattr(args, name):
                raise ConfigError(f"--{name} cannot act without --load DIR")
        return None
    if args.version is None:
        raise ConfigError("--load needs --version N, which answers will say that they were sampled by")
    if not args.load.is_dir():
        raise ConfigError(f"--load {args.load} is not a folder")
    is_adapter = (args.load / "adapter_config.json").is_file()
    source = WeightSource.adapter if is_adapter else WeightSource.folder
    return WeightLoad(source(args.load.resolve()), args.version, args.drain)


class ExitCode:
    """The exit code of the last look."""

    value = 1


async def show_pool(
    pool: "Pool", exit_code: ExitCode, load: "WeightLoad | None", *, json_lines: bool, watch: bool
) -> None:
    """Show the pool once, or again and again, after all members were given what is to be loaded."""

    def look() -> "list[MemberStatus]":
        rows = mark_outdated(pool.status())
        exit_code.value = 0 if rows and all(row.state == "ready" for row in rows) else 1
        return rows

    try:
        await pool.wait_until_probed()
        if load is not None:
            # an error when nobody took it; what one member has against it is in the table
            await load.apply_to(pool)
        if json_lines:
            await repeat(lambda: print_json(look(), pool.discovery_error), watch, pool.settings.poll_interval)
        elif watch and sys.stdout.isatty():
            with Live(console=console(), auto_refresh=False) as live:
                await repeat(lambda: live.update(status_view(look(), pool.discovery_error), refresh=True), watch, 1.0)
        else:
            await repeat(
                lambda: console().print(status_view(look(), pool.discovery_error)), watch, pool.settings.poll_interval
            )
    finally:
        await pool.close()


async def repeat(print_status: Callable[[], None], watch: bool, interval: float) -> None:
    print_status()
    while watch:
        await asyncio.sleep(interval)
        print_status()


def mark_outdated(rows: "list[MemberStatus]") -> "list[MemberStatus]":
    """Members that hold an older version than another are not ready for a pool: whoever keeps them has yet to sync."""
    newest = max((row.version or 0 for row in rows if row.state == "ready"), default=0)
    return [
        replace(row, state="syncing", last_error=f"holds version {row.version}, the newest is {newest}")
        if row.state == "ready" and row.version != newest
        else row
        for row in rows
    ]


def print_json(rows: "list[MemberStatus]", discovery_error: str) -> None:
    members = [asdict(row) | {"age": round(row.age, 3)} for row in rows]
    write_stdout(json.dumps({"members": members, "discovery_error": discovery_error}) + "\n")
    sys.stdout.flush()


def status_view(rows: "list[MemberStatus]", discovery_error: str) -> Group:
    """A table of the members and a sentence about them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("member", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("version", "running", "waiting", "errors", "for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last error", overflow="fold")
    for row in rows:
        # everything is Text: what servers say is never read as markup
        table.add_row(
            Text(row.url),
            Text(row.state + (", leaving" if row.retiring else ""), style=STYLES[row.state]),
            Text("-" if row.version is None else str(row.version)),
            *(Text(str(number)) for number in (row.running, row.waiting, row.errors)),
            Text(format_age(row.age)),
            Text(row.last_error),
        )
    counts: Counter[str] = Counter(row.state for row in rows)
    said = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state]) or "none found"
    lines: list[Any] = [table] if rows else []
    lines.append(Text(f"{len(rows)} member{'s' * (len(rows) != 1)}: {said}"))
    if discovery_error:
        lines.append(Text(f"members could not be found out: {discovery_error}", style="red"))
    return Group(*lines)


def format_age(seconds: float) -> str:
    """Seconds for people."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
