"""Request intake and error responses shared by the servers.

Guarantees that every error is JSON in OpenAI's error format, that a body is never read beyond its size and time limits,
and that work is cancelled when the client disconnects. The access rules are in `keel.inference.server.access`.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
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


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


def to_request_error(error: Exception) -> RequestError:
    """Return the error shown to the client: client errors in full, internal errors without details."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError):
        return RequestError(503, str(error)) if error.retryable else RequestError(400, str(error))
    if isinstance(error, KeelError):
        return RequestError(400, str(error))
    log.error("a request failed", exc_info=error)
    return RequestError(500, f"internal error: {type(error).__name__}; see the server's log")


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the response body for an error."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    detail = ErrorDetail(message=str(error), type=kind, param=error.param, code=error.code)
    return ErrorResponse(error=detail).model_dump()


def error_response(error: Exception) -> JSONResponse:
    """Return the response for an exception."""
    request_error = to_request_error(error)
    headers = {}
    if request_error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if request_error.status in (429, 503):
        headers["retry-after"] = str(request_error.retry_after or 1)
    return JSONResponse(error_body(request_error), request_error.status, headers)


class AccessMiddleware:
    """ASGI middleware that applies the access rules and responds to denied requests in OpenAI's error format."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401, 403 or 429, or forward the request."""
        denial = self.access.check_request(scope) if scope["type"] == "http" else None
        if denial is None:
            await self.app(scope, receive, send)
            return
        code = "invalid_api_key" if denial.status == 401 else None
        error = RequestError(denial.status, denial.message, code=code, retry_after=denial.retry_after)
        await error_response(error)(scope, receive, send)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a JSON request, or raise `RequestError` if it exceeds the limits."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # browsers send a CORS preflight before posting JSON to another site, but post other types without one
        raise RequestError(415, f"content-type is {media_type or 'missing'}; it must be application/json")
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
        raise RequestError(408, f"the body did not arrive within {limits.body_timeout:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`, or cancel it and raise `ClientGone` when the client disconnects.

    The request's body must have been read before.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
