"""The OpenAI-compatible server as a FastAPI application.

Serves completions and chat completions, complete or streamed, with token ids and log-probs. Guarantees that every token
carries the policy version that sampled it (`versions`), that a client that disconnects frees its completions, that
/version reports new weights only after they are live, and that every error is in OpenAI's error format.

/openapi.json describes every route. The interactive docs pages are disabled because they load scripts from a CDN.
Bodies are read and validated by `read_body` and `parse_request`, which are stricter than FastAPI's own parsing: they
bound size and time and never coerce a type. What the routes do is in `handlers`.
"""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Route

import keel
from keel.common.settings import Settings
from keel.inference.protocol import Engine
from keel.inference.server.access import AccessControl
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.handlers import RequestHandlers
from keel.inference.server.middleware import AccessMiddleware, ClientGone, ErrorResponse, error_response, read_body
from keel.inference.server.openai_requests import (
    AdapterRequest,
    BroadcastRequest,
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    WeightsRequest,
    json_schema,
    parse_request,
)
from keel.inference.server.openai_responses import (
    HealthResponse,
    ModelList,
    SessionFactory,
    Tokenizer,
    VersionResponse,
    WeightsResponse,
)
from keel.inference.server.prometheus import RequestCounter

log = logging.getLogger("keel.server")

RequestT = TypeVar("RequestT", bound=Settings)

ERROR_DESCRIPTIONS = {
    400: "Invalid request; the message names field and value.",
    401: "Missing or invalid API key.",
    403: "Not allowed from this client, or a path outside the allowed folders.",
    404: "Unknown model.",
    405: "Method not allowed.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests; the retry-after header says when to retry.",
    503: "Temporarily unavailable; the retry-after header says when to retry.",
}
COMPLETION_CONTENT = {
    media_type: {"schema": {"type": "object", "properties": properties, "required": list(properties)}}
    for media_type, properties in {
        "application/json": {"id": {"type": "string"}, "object": {"type": "string"}, "choices": {"type": "array"}},
        "text/event-stream": {"data": {"type": "string"}},
    }.items()
}
"""Responses of the completion routes in /openapi.json: their main fields, complete or as server-sent events."""
BODY_ERRORS = (400, 408, 413, 415)
"""Statuses of every route that reads a body."""


class ErrorFormatRoute(APIRoute):
    """A route whose exceptions become responses in OpenAI's error format."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientGone:
                log.info("%s: the client disconnected and its request was cancelled", request.url.path)
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - whatever failed, the client gets JSON and the log the traceback
                return error_response(error)

        return handle


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model: str,
    api_key: str | None = None,
    limits: Limits | None = None,
    vocab_size: int | None = None,
    training_fields: bool = False,
    open_session: SessionFactory | None = None,
    allowed_folders: AllowedFolders | None = None,
    open_tool_session: SessionFactory | None = None,
) -> FastAPI:
    """Build the application of a server. It closes the engine when it shuts down.

    Args:
        engine: The engine that samples.
        tokenizer: The model's tokenizer.
        model: Name of the model in requests.
        api_key: Key that clients must send; None serves this machine only.
        limits: Limits on requests.
        vocab_size: Number of token ids of the model, if larger than the tokenizer's.
        training_fields: Put everything that training needs (token ids, log-probs, versions, prompt, sampling) into
            every choice, requested or not, and serve no routes that load weights: the trainer changes them itself.
        open_session: Renders conversations and parses completions in place of the tokenizer's chat template.
        allowed_folders: Folders that requests may load weights from; none by default.
        open_tool_session: The same as `open_session`, for requests with tools only.
    """
    limits = limits or Limits()
    handlers = RequestHandlers(
        engine,
        tokenizer,
        model,
        limits,
        vocab_size or len(tokenizer),
        training_fields,
        open_session,
        allowed_folders or AllowedFolders(),
        open_tool_session,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engine.close()

    app = FastAPI(
        title="keel serve",
        version=keel.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_errors(403, 405, 429),
        exception_handlers={HTTPException: _http_error},
    )
    app.router.route_class = ErrorFormatRoute
    # documents the key in /openapi.json; AccessMiddleware checks it, for unknown paths too
    key_required = [] if api_key is None else [Security(HTTPBearer(auto_error=False))]
    _add_completion_routes(app, handlers, key_required)
    if not training_fields:
        _add_weight_routes(app, handlers, key_required)
    _add_status_routes(app, handlers, key_required)
    # the last one added is the outermost: denied requests are counted too
    app.add_middleware(
        AccessMiddleware, access=AccessControl(api_key, limits.rate_limit, open_paths=frozenset({"/health"}))
    )
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(RequestCounter, metrics=handlers.server_metrics, paths=paths)
    return app


def _add_completion_routes(app: FastAPI, handlers: RequestHandlers, key_required: list[Dependency]) -> None:
    def options(schema: type[Settings]) -> dict[str, Any]:
        return {
            "dependencies": key_required,
            "responses": {200: {"content": COMPLETION_CONTENT}, **_errors(*BODY_ERRORS, 401, 404, 503)},
            "openapi_extra": _request_body(schema, handlers.limits),
        }

    @app.post("/v1/completions", **options(CompletionRequest))
    async def completions(
        request: Request, params: Annotated[CompletionRequest, _body(CompletionRequest, handlers.limits)]
    ) -> Response:
        """Complete one or more prompts."""
        return await handlers.completions(request, params)

    @app.post("/v1/chat/completions", **options(handlers.chat_schema))
    async def chat_completions(
        request: Request, params: Annotated[ChatRequest, _body(handlers.chat_schema, handlers.limits)]
    ) -> Response:
        """Complete a conversation."""
        return await handlers.chat(request, params)


def _add_weight_routes(app: FastAPI, handlers: RequestHandlers, key_required: list[Dependency]) -> None:
    def options(schema: type[Settings]) -> dict[str, Any]:
        return {
            "dependencies": key_required,
            "responses": _errors(*BODY_ERRORS, 401, 503),
            "openapi_extra": _request_body(schema, handlers.limits),
        }

    @app.post("/v1/load_weights", **options(WeightsRequest))
    async def load_weights(
        params: Annotated[WeightsRequest, _body(WeightsRequest, handlers.limits)],
    ) -> WeightsResponse:
        """Load all weights from a Hugging Face folder on the server's machine; responds when they are live."""
        return await handlers.load_weights(params)

    @app.post("/v1/load_lora_adapter", **options(AdapterRequest))
    async def load_lora_adapter(
        params: Annotated[AdapterRequest, _body(AdapterRequest, handlers.limits)],
    ) -> WeightsResponse:
        """Load a PEFT adapter from a folder on the server's machine; responds when it is live."""
        return await handlers.load_adapter(params)

    @app.post("/v1/receive_weights", **options(BroadcastRequest))
    async def receive_weights(
        request: Request, params: Annotated[BroadcastRequest, _body(BroadcastRequest, handlers.limits)]
    ) -> WeightsResponse:
        """Receive all weights that the client broadcasts; responds when they are live."""
        return await handlers.receive_weights(request, params)


def _add_status_routes(app: FastAPI, handlers: RequestHandlers, key_required: list[Dependency]) -> None:
    options: dict[str, Any] = {"dependencies": key_required, "responses": _errors(401)}

    @app.get("/v1/models", **options)
    async def models() -> ModelList:
        """List the names under which the model is served."""
        return handlers.models()

    @app.get("/health", response_model=HealthResponse, responses={503: {"model": HealthResponse}})
    async def health() -> Response:
        """Report whether the server accepts requests: 200 if it does, 503 if not."""
        return await handlers.health()

    @app.get("/version", **options)
    async def version() -> VersionResponse:
        """Return the policy version of the live weights."""
        return await handlers.version()

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    # response_class without a media type: otherwise FastAPI describes the errors as text/plain too
    @app.get("/metrics", response_class=Response, dependencies=key_required, responses={**text, **_errors(401)})
    async def metrics() -> Response:
        """Return metrics in the Prometheus text format."""
        return await handlers.metrics()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe error responses in /openapi.json."""
    return {status: {"model": ErrorResponse, "description": ERROR_DESCRIPTIONS[status]} for status in statuses}


def _request_body(schema: type[Settings], limits: Limits) -> dict[str, Any]:
    """Describe a request body in /openapi.json."""
    content = {"application/json": {"schema": json_schema(schema, limits)}}
    return {"requestBody": {"required": True, "content": content}}


def _body(schema: type[RequestT], limits: Limits) -> Any:
    """Return the dependency that reads and validates a request body."""

    async def parse(request: Request) -> RequestT:
        return parse_request(schema, await read_body(request, limits))

    return Depends(parse)


async def _http_error(_request: Request, error: Exception) -> Response:
    http_error = cast(HTTPException, error)
    return error_response(RequestError(http_error.status_code, http_error.detail))
