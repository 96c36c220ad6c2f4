"""Who may talk to the server, and how refusals look.

Guarantees that every error is JSON in the OpenAI shape, that with a key nothing but /health answers without it, that
without one only this machine is answered (and no web page through a browser on it), that a body is never read beyond
its limit, and that work nobody waits for any more is cancelled. It knows nothing of models.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from keel.engine.requests import RequestError
from keel.errors import KeelError
from keel.wire import EngineError

log = logging.getLogger("keel.engine")

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

Answer = TypeVar("Answer")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def as_request_error(error: Exception) -> RequestError:
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
    kind = KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> JSONResponse:
    """The response to an exception."""
    told = as_request_error(error)
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
    return JSONResponse(error_body(told), told.status, headers.get(told.status))


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Middleware that lets through who may ask: holders of the key, or without one this machine."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self.digest = None if api_key is None else _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 403 here, or pass the request on."""
        if scope["type"] == "http" and scope["path"] != "/health":
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        if self.digest is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # digests are of one length and compared in constant time: neither tells how much of a guess was right
            if scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self.digest):
                return None
            message = "the API key is wrong" if key else "this server needs an API key: Authorization: Bearer KEY"
            return RequestError(401, message, code="invalid_api_key")
        client = scope.get("client")
        forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
        if client is None or not is_loopback(client[0]) or forwarded:
            return RequestError(403, "without an API key this server answers its own machine only; start it with one")
        # a page whose domain was pointed at this machine would otherwise speak with the user's rights
        host = headers.get("host", "")
        host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(host):
            return RequestError(403, f"host {host} is not this machine; ask for 127.0.0.1 or localhost")
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, as long as it is JSON by its header and within the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # browsers ask first before they send JSON to another site, and send anything else unasked
        raise RequestError(415, f"content-type is {kind or 'missing'}; it must be application/json")
    too_large = RequestError(413, f"the body is larger than this server's limit of {limit} bytes")
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
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
