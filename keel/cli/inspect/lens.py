"""`keel lens` serves a web page for run folders; `keel report` writes it as one file that works offline.

The page is served to this machine only unless an API key is set, which a browser then asks for.
"""

import argparse
from pathlib import Path
from typing import Any

from keel.cli.display.console import console
from keel.cli.run.serve import bind_socket, read_key, run_server
from keel.errors import ConfigError


def add(subparsers: Any) -> None:
    """Register both commands."""
    lens = subparsers.add_parser(
        "lens",
        help="watch runs and inspect their tokens in a browser",
        description="Serve a web page for a run, or for all runs below a folder: curves, the trust region, and every"
        " token with its outcome.\nThe page updates while a run is in progress. It is served to this machine only,"
        " unless an API key is set.",
        epilog="examples:\n  keel lens runs\n  keel lens runs/first --port 0",
    )
    lens.add_argument("folder", metavar="RUN_OR_FOLDER", type=Path)
    lens.add_argument("--port", type=int, default=8010, help="port to listen on; 0 chooses a free one (default: 8010)")
    lens.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    lens.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help="file with the API key, which the browser asks for"
    )
    lens.set_defaults(run=run_lens)

    report = subparsers.add_parser(
        "report",
        help="write the lens page of a run as one HTML file",
        description="Write the page of `keel lens` for one run as a file that needs no server and no network."
        "\nIts size is bounded: it has all curves, histograms, and a sample of rollouts, and states what was left out.",
        epilog="examples:\n  keel report runs/first\n  keel report runs/first --out first.html --megabytes 2",
    )
    report.add_argument("folder", metavar="RUN", type=Path)
    report.add_argument("--out", type=Path, help="file to write (default: report.html in the run's folder)")
    report.add_argument("--megabytes", type=float, default=5.0, metavar="N", help="maximum size (default: 5)")
    report.set_defaults(run=run_report)


def run_lens(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from keel.inference.server.access import check_binding
    from keel.tools.lens.server import build_app

    key = read_key(None, args.api_key_file)
    check_binding("--host", args.host, key)
    app = build_app(args.folder, key)
    with bind_socket(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        console().print(f"serving {args.folder} on http://{url_host}:{port}", soft_wrap=True)
        run_server(app, listener, shutdown_timeout=1)
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Write the report."""
    from keel.tools.lens.report import MIN_BYTES, write_report

    if not MIN_BYTES <= args.megabytes * 1e6 <= 1e9:
        raise ConfigError(f"--megabytes {args.megabytes:g} must be between {MIN_BYTES / 1e6:g} and 1000")
    out = args.out or args.folder / "report.html"
    size = write_report(args.folder, out, int(args.megabytes * 1e6))
    console().print(f"{out}: {size / 1e6:.1f} MB", soft_wrap=True)
    return 0
