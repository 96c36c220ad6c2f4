"""The page and its questions over HTTP, for this machine unless there is a key.

Guarantees that without a key only loopback is answered, and no web page of another site through a browser here (the
Host header must name this machine, and requests that a browser marks as another site's are refused); that the page may
load and ask nothing but this server (Content-Security-Policy, without inline script); that no request changes anything;
and that /openapi.json describes every question by the table that reads its words.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keel.errors import KeelError
from keel.inference.server.access import Access, Rate, Refusal
from keel.inference.server.openapi import Endpoint, describe
from keel.tools.lens.queries import QUESTIONS, Lens
from keel.tools.lens.query_params import parameters
from keel.tools.lens.run_reader import UnknownRun

log = logging.getLogger("keel.tools.lens")

ASSETS = Path(__file__).parent / "assets"

RATE = Rate(per_second=100, burst=500)
"""A page asks some ten questions when a view is opened, and a few each time it looks again."""
ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}

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
    """Lets through who may ask, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = self.access.refusal(scope) or _from_another_site(scope)
        await (self.app if why is None else refused(why))(scope, receive, with_headers)


def refused(why: Refusal) -> Response:
    """A refusal as a browser understands it: where a key is needed it asks its user for one, as a password."""
    headers = {} if why.retry_after is None else {"retry-after": str(why.retry_after)}
    if why.status == 401:
        headers["www-authenticate"] = 'Basic realm="keel lens: any name, and the key as password", charset="UTF-8"'
    return JSONResponse({"error": why.message}, why.status, headers)


def _from_another_site(scope: Scope) -> Refusal | None:
    site = Headers(scope=scope).get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and scope["path"] != "/":
        return Refusal(403, "another site's page may not ask the lens")
    return None


def build_app(root: Path, api_key: str | None = None) -> Starlette:
    """The application over the runs below a folder."""
    lens = Lens(root)
    access = Access(api_key, RATE)

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
        name, words = request.url.path.removeprefix("/ask/"), dict(request.query_params)
        return await run_in_threadpool(respond, lens, name, words)

    async def failed(_request: Request, error: Exception) -> Response:
        why = cast(HTTPException, error)
        return JSONResponse({"error": why.detail}, why.status_code, why.headers)

    questions = [
        Endpoint(
            path=f"/ask/{name}",
            handler=ask,
            summary=f"The question {name}.",
            parameters=parameters(words),
            refusals=(400, 404),
        )
        for name, words in QUESTIONS.items()
    ]
    described = describe("keel lens", "1", questions, ERROR, key=api_key is not None)
    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/openapi.json", lambda _request: JSONResponse(described), methods=["GET"]),
            *(Route(one.path, one.handler, methods=[one.method]) for one in questions),
            Route("/ask/{name:path}", ask, methods=["GET"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(Guard, access=access)],
        exception_handlers={HTTPException: failed},
        lifespan=lifespan,
    )


def respond(lens: Lens, name: str, words: dict[str, str]) -> Response:
    """An answer, or why there is none, as JSON."""
    try:
        answer: dict[str, Any] = lens.answer(name, words)
        try:
            return JSONResponse(answer)
        except (TypeError, ValueError, RecursionError) as error:
            # a ledger made by others may hold any kind of value in any place
            raise KeelError(f"the run's files hold what cannot be shown: {error}") from error
    except UnknownRun as error:
        return JSONResponse({"error": str(error)}, 404)
    except KeelError as error:
        return JSONResponse({"error": str(error)}, 400)
    except Exception as error:  # a question that fails must not take the page down
        log.error("question %s failed", name, exc_info=error)
        return JSONResponse(
            {"error": f"the lens failed on this question: {type(error).__name__}; its log says more"}, 500
        )
