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
from keel.inference.server.access import AccessControl, AccessDenial, RateLimit
from keel.inference.server.openapi import RouteSpec, openapi_document
from keel.tools.lens.queries import QUERIES, Lens
from keel.tools.lens.query_params import openapi_parameters
from keel.tools.lens.run_reader import UnknownRun

log = logging.getLogger("keel.tools.lens")

ASSETS = Path(__file__).parent / "assets"

RATE_LIMIT = RateLimit(per_second=100, burst=500)
"""A page asks some ten questions when a view is opened, and a few each time it looks again."""
ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # a page kept from an older version would ask questions that this one does not know
    "cache-control": "no-store",
}


class LensAccessMiddleware:
    """Lets through who may ask, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        why = self.access.check_request(scope) or _check_same_site(scope)
        await (self.app if why is None else refusal_response(why))(scope, receive, with_headers)


def refusal_response(refusal: AccessDenial) -> Response:
    """A refusal as a browser understands it: where a key is needed it asks its user for one, as a password."""
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    if refusal.status == 401:
        headers["www-authenticate"] = 'Basic realm="keel lens: any name, and the key as password", charset="UTF-8"'
    return JSONResponse({"error": refusal.message}, refusal.status, headers)


def _check_same_site(scope: Scope) -> AccessDenial | None:
    site = Headers(scope=scope).get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and scope["path"] != "/":
        return AccessDenial(403, "another site's page may not ask the lens")
    return None


def build_app(root: Path, api_key: str | None = None) -> Starlette:
    """The application over the runs below a folder."""
    lens = Lens(root)
    access = AccessControl(api_key, RATE_LIMIT)

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
        name, words = request.url.path.removeprefix("/query/"), dict(request.query_params)
        return await run_in_threadpool(respond, lens, name, words)

    async def failed(_request: Request, error: Exception) -> Response:
        why = cast(HTTPException, error)
        return JSONResponse({"error": why.detail}, why.status_code, why.headers)

    questions = [
        RouteSpec(
            path=f"/query/{name}",
            handler=ask,
            summary=f"The question {name}.",
            parameters=openapi_parameters(words),
            error_statuses=(400, 404),
        )
        for name, words in QUERIES.items()
    ]
    described = openapi_document("keel lens", "1", questions, ERROR_SCHEMA, requires_key=api_key is not None)
    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/openapi.json", lambda _request: JSONResponse(described), methods=["GET"]),
            *(Route(one.path, one.handler, methods=[one.method]) for one in questions),
            Route("/query/{name:path}", ask, methods=["GET"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(LensAccessMiddleware, access=access)],
        exception_handlers={HTTPException: failed},
        lifespan=lifespan,
    )


def respond(lens: Lens, name: str, params: dict[str, str]) -> Response:
    """An answer, or why there is none, as JSON."""
    try:
        answer: dict[str, Any] = lens.query(name, params)
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
