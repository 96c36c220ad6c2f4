"""`keel serve`: serve a model with an OpenAI-compatible API, on loopback only unless an API key is set.

Shuts down without an error on SIGINT and SIGTERM, after finishing the requests in flight within `--patience` seconds.
"""

import argparse
import asyncio
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
        help="serve a model over HTTP with an OpenAI-compatible API",
        description="Serve MODEL with an OpenAI-compatible API: /v1/completions and /v1/chat/completions with"
        " streaming,\nlog-probs, tools and token ids; /v1/models, /health, /version; /v1/load_weights and"
        " /v1/load_lora_adapter.\n\nMODEL is the folder of a run (its newest checkpoint, or that of --step), a"
        " built-in name, a Hugging Face folder,\nor a hub name; it may be left out with --adapter. Without an API key"
        " the server must listen on loopback.",
        epilog="examples:\n  keel serve smollm2-135m\n  keel serve runs/first --step 20\n"
        "  keel serve --adapter runs/lora/checkpoints/step_20\n  keel serve tiny --port 0 --max-batch 8\n"
        "  keel serve out --host 0.0.0.0 --api-key-file key.txt",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder of a run, a built-in name, a Hugging Face folder, or a hub name",
    )
    parser.add_argument("--step", type=int, metavar="N", help="for a run: checkpoint to serve (default: the newest)")
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="folder of a LoRA adapter to serve on top of MODEL (default of MODEL: the adapter's base)",
    )
    parser.add_argument("--name", help="name of the model in requests (default: MODEL, or the adapter)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: 8000)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="key that clients must send; other users can see it in `ps`")
    key.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file with the key")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--max-batch", default=64, help="completions decoded together (default: 64)", **number)
    parser.add_argument(
        "--max-requests",
        default=1024,
        help="most completions in flight; further ones get 429 (default: 1024)",
        **number,
    )
    parser.add_argument("--max-tokens", default=32768, help="most tokens of one completion (default: 32768)", **number)
    parser.add_argument(
        "--max-rate",
        default=1000,
        help="most requests per second of one client; further ones get 429 (default: 1000)",
        **number,
    )
    parser.add_argument(
        "--weights-from",
        metavar="DIR",
        type=Path,
        action="append",
        help="a folder from which requests may load weights and adapters; may be repeated (default: runs)",
    )
    _add_engine_arguments(parser)
    parser.add_argument(
        "--patience", type=int, default=30, metavar="S", help="seconds to finish requests at shutdown (default: 30)"
    )
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep freed memory for later tensors (Linux): faster, but the process does not shrink (default: on)",
    )
    parser.add_argument("--with-parent", action="store_true", help="exit when the parent process exits")
    parser.set_defaults(run=run)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the weights are held and computed."""
    parser.add_argument("--int8", action="store_true", help="quantize linear layers to int8, which changes log-probs")
    parser.add_argument(
        "--native-kernels",
        default="auto",
        choices=("auto", "off"),
        help="float32 on CPU; auto: compiled C kernels if a compiler is found (they hold the weights twice);"
        " off: torch only (default: auto)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float64 (default: auto)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until a signal arrives."""
    from keel.inference.server.access import check_binding

    key = read_key(args.api_key, args.api_key_file)
    check_binding("--host", args.host, key)
    listener = bind_socket(args.host, args.port)
    with listener:
        if args.with_parent:
            threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        app = build_model_app(args, key)
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        console().print(f"serving {args.name or _default_name(args)} at http://{url_host}:{port}/v1", soft_wrap=True)
        run_server(app, listener, args.patience)
    return 0


def _exit_with_parent(parent_pid: int) -> None:
    """Terminate this process when its parent is gone, which is when its parent id changes."""
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def build_model_app(args: argparse.Namespace, key: str | None) -> Any:
    """Load the model and return the application."""
    from pydantic import ValidationError

    from keel.cli.run.served_model import find_served_model, tool_session_factory
    from keel.common.settings import to_config_error
    from keel.config import EngineSettings
    from keel.inference.local.local_engine import LocalEngine
    from keel.inference.protocol import WeightSource
    from keel.inference.server.access import RateLimit
    from keel.inference.server.allowed_paths import AllowedFolders
    from keel.inference.server.app import build_app
    from keel.inference.server.openai_requests import Limits
    from keel.training import load_model
    from keel.training.model.references import check_adapter_base
    from keel.training.step.malloc import retain_freed_memory

    for name in ("max_requests", "max_tokens", "max_rate"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    try:
        settings = EngineSettings(int8=args.int8, native_kernels=args.native_kernels, max_batch=args.max_batch)
        served = find_served_model(args.model, args.adapter, args.step, dtype=args.dtype, device=args.device)
    except ValidationError as error:
        raise to_config_error(error) from None
    if args.keep_memory:
        retain_freed_memory()
    model = load_model(served.settings, served.seed)
    engine = LocalEngine(model.network, model.tokenizer, settings, version=served.step or 0)
    if served.adapter is not None:
        check_adapter_base(served.adapter, model)
        asyncio.run(engine.load_weights(WeightSource.adapter(served.adapter), served.step or 0))
    return build_app(
        engine,
        model.tokenizer,
        model=args.name or _default_name(args),
        api_key=key,
        limits=Limits(
            max_in_flight=args.max_requests,
            max_tokens=args.max_tokens,
            rate_limit=RateLimit(per_second=args.max_rate, burst=2 * args.max_rate),
        ),
        allowed_folders=AllowedFolders(args.weights_from or [Path("runs")]),
        vocab_size=model.head.out_features,
        open_tool_session=tool_session_factory(model.tokenizer),
    )


def _default_name(args: argparse.Namespace) -> str:
    return str(args.model or args.adapter)


def read_key(value: str | None, file: Path | None) -> str | None:
    """Return the API key from the command line or a file."""
    from keel.inference.server import api_key

    if file is not None:
        return api_key.read_api_key("--api-key-file", file)
    if value is not None and (not value or not value.isascii() or value.split() != [value]):
        raise ConfigError("the API key is empty, not ASCII or contains a space; use letters and digits only")
    return value


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a port in use is an error before the model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; choose another with --port") from error


def run_server(app: Any, listener: socket.socket, shutdown_timeout: int) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in flight."""
    from keel.inference.server.uvicorn_server import make_server

    server = make_server(app, shutdown_timeout=shutdown_timeout)
    # uvicorn raises the signal again after its shutdown: ignore it, so that the process exits with code 0
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
