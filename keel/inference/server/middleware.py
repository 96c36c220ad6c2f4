"""The way into the server, and how refusals look.

Guarantees that every error is JSON in the OpenAI shape, that a body is never read beyond its limits of size and time,
and that work nobody waits for any more is cancelled. Who may ask, and how often, is said in
`keel.inference.server.access`; it knows nothing of models.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from keel.errors import KeelError
from keel.inference.protocol import EngineError
from keel.inference.server.access import AccessControl
from keel.inference.server.openai_requests import Limits, RequestError

log = logging.getLogger("keel.server")

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def to_request_error(error: Exception) -> RequestError:
    """What a client is told about an exception: its own mistakes in full, the server's without their insides."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError):
        return RequestError(503, str(error)) if error.retryable else RequestError(400, str(error))
    if isinstance(error, KeelError):
        return RequestError(400, str(error))
    log.error("a request failed", exc_info=error)
    return RequestError(500, f"the server failed on this request: {type(error).__name__}; its log says more")


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the OpenAI shape."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> JSONResponse:
    """The response to an exception."""
    told = to_request_error(error)
    headers = {}
    if told.status == 401:
        headers["www-authenticate"] = "Bearer"
    if told.status in (429, 503):
        headers["retry-after"] = str(told.retry_after or 1)
    return JSONResponse(error_body(told), told.status, headers)


class AccessMiddleware:
    """Middleware that lets through who may ask, and answers everybody else in the protocol's shape."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 403 or 429 here, or pass the request on."""
        refusal = self.access.check_request(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        code = "invalid_api_key" if refusal.status == 401 else None
        error = RequestError(refusal.status, refusal.message, code=code, retry_after=refusal.retry_after)
        await error_response(error)(scope, receive, send)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, as long as it is JSON by its header and within the limits."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # browsers ask first before they send JSON to another site, and send anything else unasked
        raise RequestError(415, f"content-type is {kind or 'missing'}; it must be application/json")
    limit, body = limits.body_bytes, bytearray()
    too_large = RequestError(413, f"the body is larger than this server's limit of {limit} bytes")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or len(length) > 18 or int(length) > limit:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive in {limits.body_timeout:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns, or `ClientGone` with the work cancelled. The body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
