"""`keel pool`: show the state of a pool's engine servers, and load weights into all of them with --load.

Without --load the servers are only probed. Servers are never started or stopped.
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
        description="Probe every member of a pool and print its state, version, load and errors.\n\nThe members are"
        " URLs, every address of a DNS name, the lines of a file, or a JSON list at a URL.\nA member that holds an"
        " older version than another is shown as syncing. Members are not changed, except with\n--load DIR, which loads"
        " weights or an adapter from a folder that every member can read.\n\nThe exit code is 0 if all members are"
        " ready, 1 if some are not or none was found, and 2 after an error.",
        epilog="examples:\n  keel pool http://127.0.0.1:8000 http://127.0.0.1:8001\n"
        "  keel pool --dns engines.internal:8000 --watch\n  keel pool --file members.txt --json",
    )
    parser.add_argument("urls", metavar="URL", nargs="*", help="address of a member, such as http://10.0.0.1:8000")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dns", metavar="NAME:PORT", help="every address of this name is a member")
    source.add_argument("--file", metavar="FILE", help="a file with one URL per line")
    source.add_argument("--discovery-url", metavar="URL", help="a URL that returns a JSON list of member URLs")
    parser.add_argument("--watch", action="store_true", help="repeat until interrupted")
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or one per probe with --watch")
    parser.add_argument(
        "--poll-interval", type=float, default=5.0, metavar="S", help="seconds between probes (default: 5)"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds to answer (default: 5)")
    parser.add_argument(
        "--backend", choices=("keel", "vllm"), default="keel", help="server software of the members (default: keel)"
    )
    parser.add_argument("--load", metavar="DIR", type=Path, help="load weights or an adapter into all members first")
    parser.add_argument("--version", type=int, metavar="N", help="with --load: version number of the loaded weights")
    parser.add_argument("--drain", action="store_true", help="with --load: finish requests in flight before loading")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="key sent to the members; other users can see it in `ps`")
    key.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file with the key")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe once, or until interrupted; the exit code is that of the last probe."""
    from keel.inference.pool.http_engine import HttpEngine
    from keel.inference.pool.pool import Pool
    from keel.inference.pool.vllm_engine import VllmEngine

    settings = make_pool_settings(args)
    key = read_key(args.api_key, args.api_key_file)
    engine_class = VllmEngine if settings.backend == "vllm" else HttpEngine
    pool = Pool(settings, lambda url: engine_class(url, api_key=key), version=None)
    # errors are shown in the table; without a handler they would also go to standard error
    null_handler, logger = logging.NullHandler(), logging.getLogger("keel")
    logger.addHandler(null_handler)
    exit_code = ExitCode()
    try:
        asyncio.run(show_pool(pool, exit_code, make_weight_load(args), json_lines=args.json, watch=args.watch))
    except KeyboardInterrupt:
        if not args.watch:
            raise
    finally:
        logger.removeHandler(null_handler)
    return exit_code.value


def make_pool_settings(args: argparse.Namespace) -> "PoolSettings":
    """Return the arguments as settings, or raise `ConfigError`."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import PoolSettings

    sources = [name for name in ("urls", "dns", "file", "discovery_url") if getattr(args, name)]
    if len(sources) != 1:
        raise ConfigError("pass the members as URLs, or with one of --dns, --file and --discovery-url")
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
    """Return the weights to load, if any, or raise `ConfigError`."""
    from keel.inference.pool.target_weights import WeightLoad
    from keel.inference.protocol import WeightSource

    if args.load is None:
        for name in ("version", "drain"):
            if getattr(args, name):
                raise ConfigError(f"--{name} has no effect without --load DIR")
        return None
    if args.version is None:
        raise ConfigError("--load needs --version N, the version that sampled tokens are recorded with")
    if not args.load.is_dir():
        raise ConfigError(f"--load {args.load} is not a folder")
    is_adapter = (args.load / "adapter_config.json").is_file()
    source = WeightSource.adapter if is_adapter else WeightSource.folder
    return WeightLoad(source(args.load.resolve()), args.version, args.drain)


class ExitCode:
    """Holds the exit code of the last probe."""

    value = 1


async def show_pool(
    pool: "Pool", exit_code: ExitCode, load: "WeightLoad | None", *, json_lines: bool, watch: bool
) -> None:
    """Load weights into all members if requested, then show the pool once or repeatedly."""

    def probe() -> "list[MemberStatus]":
        rows = mark_outdated(pool.status())
        exit_code.value = 0 if rows and all(row.state == "ready" for row in rows) else 1
        return rows

    try:
        await pool.wait_until_probed()
        if load is not None:
            # raises if no member loaded it; the error of a single member is shown in the table
            await load.apply_to(pool)
        if json_lines:
            await repeat(lambda: print_json(probe(), pool.discovery_error), watch, pool.settings.poll_interval)
        elif watch and sys.stdout.isatty():
            with Live(console=console(), auto_refresh=False) as live:
                await repeat(lambda: live.update(status_view(probe(), pool.discovery_error), refresh=True), watch, 1.0)
        else:
            await repeat(
                lambda: console().print(status_view(probe(), pool.discovery_error)), watch, pool.settings.poll_interval
            )
    finally:
        await pool.close()


async def repeat(print_status: Callable[[], None], watch: bool, interval: float) -> None:
    print_status()
    while watch:
        await asyncio.sleep(interval)
        print_status()


def mark_outdated(rows: "list[MemberStatus]") -> "list[MemberStatus]":
    """Mark members that hold an older version than another as syncing: a pool would have to update them first."""
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
    """Return a table of the members and a line that counts them by state."""
    table = Table(box=None, pad_edge=False)
    table.add_column("member", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("version", "running", "waiting", "errors", "for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last error", overflow="fold")
    for row in rows:
        # every cell is a Text, so that text from servers is never read as markup
        table.add_row(
            Text(row.url),
            Text(row.state + (", retiring" if row.retiring else ""), style=STYLES[row.state]),
            Text("-" if row.version is None else str(row.version)),
            *(Text(str(number)) for number in (row.running, row.waiting, row.errors)),
            Text(format_age(row.age)),
            Text(row.last_error),
        )
    counts: Counter[str] = Counter(row.state for row in rows)
    summary = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state]) or "none found"
    lines: list[Any] = [table] if rows else []
    lines.append(Text(f"{len(rows)} member{'s' * (len(rows) != 1)}: {summary}"))
    if discovery_error:
        lines.append(Text(f"discovery failed: {discovery_error}", style="red"))
    return Group(*lines)


def format_age(seconds: float) -> str:
    """Format a duration, such as "5 min"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
