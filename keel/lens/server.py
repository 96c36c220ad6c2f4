"""The page and its questions over HTTP, for this machine only.

Guarantees that only loopback is answered, and no web page of another site through a browser here (the Host header must
name this machine, and requests that a browser marks as another site's are refused); that the page may load and ask
nothing but this server (Content-Security-Policy, without inline script); and that no request changes anything.
"""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keel.errors import KeelError
from keel.lens.answers import Lens
from keel.lens.folder import UnknownRun

log = logging.getLogger("keel.lens")

ASSETS = Path(__file__).parent / "assets"

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # a page kept from an older version would ask questions that this one does not know
    "cache-control": "no-store",
}


class Guard:
    """Lets this machine through and nobody else, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = refusal(scope)
        answer: ASGIApp = self.app if why is None else JSONResponse({"error": why}, 403)
        await answer(scope, receive, with_headers)


def refusal(scope: Scope) -> str | None:
    """Why a request is not answered; none when it is."""
    headers, client = Headers(scope=scope), scope.get("client")
    forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    if client is None or not is_loopback(client[0]) or forwarded:
        return "the lens answers its own machine only; from elsewhere use an ssh tunnel"
    host = headers.get("host", "")
    host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(host):
        return f"host {host[:100]} is not this machine; ask for 127.0.0.1 or localhost"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
        return "another site's page may not ask the lens"
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def build_app(root: Path) -> Starlette:
    """The application over the runs below a folder."""
    lens = Lens(root)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # the first page finds the runs already read
        reading = asyncio.create_task(run_in_threadpool(respond, lens, "runs", {}))
        yield
        await reading
        lens.close()

    async def page(_request: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    async def ask(request: Request) -> Response:
        name, words = request.path_params["name"], dict(request.query_params)
        return await run_in_threadpool(respond, lens, name, words)

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/ask/{name}", ask, methods=["GET"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(Guard)],
        lifespan=lifespan,
    )


def respond(lens: Lens, name: str, words: dict[str, str]) -> Response:
    """An answer, or why there is none, as JSON."""
    try:
        answer: dict[str, Any] = lens.answer(name, words)
        return JSONResponse(answer)
    except UnknownRun as error:
        return JSONResponse({"error": str(error)}, 404)
    except KeelError as error:
        return JSONResponse({"error": str(error)}, 400)
    except Exception as error:  # a question that fails must not take the page down
        log.error("question %s failed", name, exc_info=error)
        return JSONResponse(
            {"error": f"the lens failed on this question: {type(error).__name__}; its log says more"}, 500
        )
