"""`keel serve`: a model behind an OpenAI-compatible server, on this machine only unless there is a key.

Ends without an error on SIGINT and SIGTERM, after answering what is under way as long as its patience lasts.
"""

import argparse
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from keel.cli.display.console import console
from keel.errors import ConfigError


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "serve",
        help="sample from a model over HTTP",
        description="Serve MODEL with an OpenAI-compatible API: /v1/completions and /v1/chat/completions with"
        " streaming,\nlog-probs and token ids; /v1/models, /health, /version; /v1/load_weights and"
        " /v1/load_lora_adapter.\n\nMODEL is a built-in name, a Hugging Face folder, or a hub name. Without a key only"
        " this machine is answered.",
        epilog="examples:\n  keel serve smollm2-135m\n  keel serve tiny --port 0 --max-batch 8\n"
        "  keel serve out --host 0.0.0.0 --api-key-file key.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--name", help="what requests call the model (default: MODEL)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="what clients must send; other users can see it in `ps`")
    key.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file that holds the key")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--max-batch", default=64, help="answers that are decoded together (default: 64)", **number)
    parser.add_argument(
        "--max-requests", default=1024, help="answers under way, 429 beyond it (default: 1024)", **number
    )
    parser.add_argument("--max-tokens", default=32768, help="tokens of one answer (default: 32768)", **number)
    parser.add_argument(
        "--max-rate", default=1000, help="requests a second of one client, 429 beyond it (default: 1000)", **number
    )
    parser.add_argument(
        "--weights-from",
        metavar="DIR",
        type=Path,
        action="append",
        help="a folder below which requests may load weights and adapters; may be given again (default: runs)",
    )
    parser.add_argument("--int8", action="store_true", help="linear layers in int8: not quite the same model")
    parser.add_argument(
        "--native-kernels",
        default="auto",
        choices=("auto", "off"),
        help="float32 on CPU: auto: in C where there is a compiler, which holds weights twice; torch: torch's own",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float64 (default: auto)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: what torch finds)")
    parser.add_argument("--patience", type=int, default=30, metavar="S", help="seconds to answer in when asked to stop")
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what tensors free for the next ones (Linux): faster, and the process stays as large as it once was",
    )
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started it does")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until told to stop."""
    from keel.inference.server.access import check_binding

    key = read_key(args.api_key, args.api_key_file)
    check_binding("--host", args.host, key)
    listener = bind_socket(args.host, args.port)
    with listener:
        if args.with_parent:
            threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        app = build_model_app(args, key)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        console().print(f"serving {args.name or args.model} at http://{shown}:{port}/v1", soft_wrap=True)
        run_server(app, listener, args.patience)
    return 0


def _exit_with_parent(parent_pid: int) -> None:
    """A parent that was killed cannot say so: whoever takes its children over has another id."""
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def build_model_app(args: argparse.Namespace, key: str | None) -> Any:
    """The application with its model loaded."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import EngineSettings, ModelSettings
    from keel.inference.local.local_engine import LocalEngine
    from keel.inference.server.access import RateLimit
    from keel.inference.server.allowed_paths import AllowedFolders
    from keel.inference.server.app import build_app
    from keel.inference.server.openai_requests import Limits
    from keel.training import load_model
    from keel.training.step.malloc import retain_freed_memory

    for name in ("max_requests", "max_tokens", "max_rate"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    try:
        settings = EngineSettings(int8=args.int8, native_kernels=args.native_kernels, max_batch=args.max_batch)
        wanted = ModelSettings(name=args.model, dtype=args.dtype, device=args.device)
    except ValidationError as error:
        raise to_config_error(error) from None
    if args.keep_memory:
        retain_freed_memory()
    model = load_model(wanted)
    return build_app(
        LocalEngine(model.network, model.tokenizer, settings),
        model.tokenizer,
        model=args.name or args.model,
        api_key=key,
        limits=Limits(
            max_in_flight=args.max_requests,
            max_tokens=args.max_tokens,
            rate_limit=RateLimit(per_second=args.max_rate, burst=2 * args.max_rate),
        ),
        allowed_folders=AllowedFolders(args.weights_from or [Path("runs")]),
        vocab_size=model.head.out_features,
    )


def read_key(value: str | None, file: Path | None) -> str | None:
    """The key, from the command line or a file."""
    from keel.inference.server import api_key

    if file is not None:
        return api_key.read_api_key("--api-key-file", file)
    if value is not None and (not value or not value.isascii() or value.split() != [value]):
        raise ConfigError("the API key is empty, not ASCII or holds a space; make it one word of letters and digits")
    return value


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is done."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; choose another with --port") from error


def run_server(app: Any, listener: socket.socket, shutdown_timeout: int) -> None:
    """Answer until SIGINT or SIGTERM, then finish what is under way."""
    from keel.inference.server.uvicorn_server import make_server

    server = make_server(app, shutdown_timeout=shutdown_timeout)
    # uvicorn raises the signal again when it is done: it has been dealt with, and ends nothing but the server
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
