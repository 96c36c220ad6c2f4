"""Serve the lens page and its queries over HTTP, to this machine only unless an API key is set.

Guarantees that without a key only loopback clients are served, and that pages of other sites cannot send queries
through a browser on this machine: the Host header must name this machine, and requests that a browser marks as
cross-site are rejected. The page can load from and connect to this server only (Content-Security-Policy without inline
scripts). No request changes anything. /openapi.json is generated from the table that validates the parameters.
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
from keel.tools.lens.offline_page import ASSETS
from keel.tools.lens.openapi import RouteSpec, openapi_document
from keel.tools.lens.queries import QUERIES, Lens
from keel.tools.lens.query_params import openapi_parameters
from keel.tools.lens.run_reader import UnknownRun

log = logging.getLogger("keel.tools.lens")

RATE_LIMIT = RateLimit(per_second=100, burst=500)
"""The page sends about ten queries when a view is opened, and a few with each refresh."""
ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # a cached page of an older version would send queries that this version does not know
    "cache-control": "no-store",
}


class LensAccessMiddleware:
    """Rejects clients without access, and adds the security headers to every response."""

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

        denial = self.access.check_request(scope) or _check_same_site(scope)
        await (self.app if denial is None else denial_response(denial))(scope, receive, with_headers)


def denial_response(denial: AccessDenial) -> Response:
    """Return the response to a denied request. With status 401 a browser asks its user for the key as a password."""
    headers = {} if denial.retry_after is None else {"retry-after": str(denial.retry_after)}
    if denial.status == 401:
        headers["www-authenticate"] = 'Basic realm="keel lens: any user name, the key as password", charset="UTF-8"'
    return JSONResponse({"error": denial.message}, denial.status, headers)


def _check_same_site(scope: Scope) -> AccessDenial | None:
    site = Headers(scope=scope).get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and scope["path"] != "/":
        return AccessDenial(403, "pages of other sites cannot query the lens")
    return None


def build_app(root: Path, api_key: str | None = None) -> Starlette:
    """Return the application that serves the runs below a folder."""
    lens = Lens(root)
    access = AccessControl(api_key, RATE_LIMIT)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # read the runs before the first page asks for them
        warm_up = asyncio.create_task(run_in_threadpool(respond, lens, "runs", {}))
        yield
        await warm_up
        lens.close()

    async def page(_request: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    async def query(request: Request) -> Response:
        name, params = request.url.path.removeprefix("/query/"), dict(request.query_params)
        return await run_in_threadpool(respond, lens, name, params)

    async def http_error(_request: Request, error: Exception) -> Response:
        http_exception = cast(HTTPException, error)
        return JSONResponse({"error": http_exception.detail}, http_exception.status_code, http_exception.headers)

    queries = [
        RouteSpec(
            path=f"/query/{name}",
            handler=query,
            summary=f"Query {name}.",
            parameters=openapi_parameters(params),
            error_statuses=(400, 404),
        )
        for name, params in QUERIES.items()
    ]
    openapi = openapi_document("keel lens", "1", queries, ERROR_SCHEMA, requires_key=api_key is not None)
    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/openapi.json", lambda _request: JSONResponse(openapi), methods=["GET"]),
            *(Route(route.path, route.handler, methods=[route.method]) for route in queries),
            Route("/query/{name:path}", query, methods=["GET"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(LensAccessMiddleware, access=access)],
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )


def respond(lens: Lens, name: str, params: dict[str, str]) -> Response:
    """Return the result of a query, or its error, as JSON."""
    try:
        result: dict[str, Any] = lens.query(name, params)
        try:
            return JSONResponse(result)
        except (TypeError, ValueError, RecursionError) as error:
            # an untrusted ledger may contain values of any type
            raise KeelError(f"the run's files contain values that cannot be shown: {error}") from error
    except UnknownRun as error:
        return JSONResponse({"error": str(error)}, 404)
    except KeelError as error:
        return JSONResponse({"error": str(error)}, 400)
    except Exception as error:  # a query that fails must not stop the page
        log.error("query %s failed", name, exc_info=error)
        return JSONResponse({"error": f"query {name} failed: {type(error).__name__}; see the log of the lens"}, 500)
