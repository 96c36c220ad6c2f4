"""An engine behind the OpenAI protocol: completions and chat, whole or streamed, with token ids and log-probs.

Guarantees that every token comes with the policy version that sampled it (`versions`), that a client that leaves frees
what it held, that new weights are announced by /version only after they are live, and that what cannot be answered is
an error in the OpenAI shape. Everything it answers is described by /openapi.json. How it answers is in `service`.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import keel
from keel.common.settings import Settings
from keel.inference.protocol import Engine
from keel.inference.server.access import AccessControl
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.handlers import RequestHandlers
from keel.inference.server.middleware import AccessMiddleware, ClientGone, error_response
from keel.inference.server.openai_requests import (
    AdapterRequest,
    BroadcastRequest,
    CompletionRequest,
    Limits,
    RequestError,
    WeightsRequest,
    json_schema,
)
from keel.inference.server.openai_responses import SessionFactory, Tokenizer
from keel.inference.server.openapi import Handler, RouteSpec, openapi_document
from keel.inference.server.prometheus import RequestCounter

log = logging.getLogger("keel.server")


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
) -> Starlette:
    """The server's application. It closes the engine when it shuts down.

    `vocabulary` is the model's number of token ids where it is more than the tokenizer's. `exact`: every choice carries
    all that training needs (token ids, log-probs, versions, prompt, sampling), asked for or not, and weights are not
    loaded over HTTP: whoever trains on the answers is the one who changes them. `talk`: renders conversations and reads
    answers, in place of the tokenizer's chat template. `roots`: the folders that weights may be loaded from by
    request; not given: none.
    """
    limits = limits or Limits()
    service = RequestHandlers(
        engine,
        tokenizer,
        model,
        limits,
        vocab_size or len(tokenizer),
        training_fields,
        open_session,
        allowed_folders or AllowedFolders(),
    )
    access = AccessControl(api_key, limits.rate_limit, open_paths=frozenset({"/health"}))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engine.close()

    async def http_error(_request: Request, error: Exception) -> Response:
        failed = cast(HTTPException, error)
        return error_response(RequestError(failed.status_code, failed.detail))

    endpoints = build_routes(service)
    page = openapi_document("keel serve", keel.__version__, endpoints, ERROR_SCHEMA, requires_key=api_key is not None)
    routes = [Route(one.path, _with_error_responses(one.handler), methods=[one.method]) for one in endpoints]
    routes.append(Route("/openapi.json", lambda _request: JSONResponse(page), methods=["GET"]))
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestCounter, meter=service.server_metrics, paths=paths),
            Middleware(AccessMiddleware, access=access),
        ],
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )


def build_routes(service: RequestHandlers) -> list[RouteSpec]:
    """Everything that is answered, for the routes and for /openapi.json."""
    texts = {"application/json": COMPLETION_SCHEMA, "text/event-stream": _object_schema(data={"type": "string"})}
    loading = [
        RouteSpec(
            path=path,
            method="POST",
            handler=handler,
            summary=_first_doc_line(schema),
            body=json_schema(schema, service.limits),
            response_schemas={"application/json": _object_schema(version={"type": "integer"})},
            error_statuses=(503,),
        )
        for path, handler, schema in (
            ("/v1/load_weights", service.load_weights, WeightsRequest),
            ("/v1/load_lora_adapter", service.load_adapter, AdapterRequest),
            ("/v1/receive_weights", service.receive_weights, BroadcastRequest),
        )
    ]
    asking = [
        RouteSpec(
            path=path,
            method="POST",
            handler=handler,
            summary=_first_doc_line(schema),
            body=json_schema(schema, service.limits),
            response_schemas=texts,
            error_statuses=(404, 503),
        )
        for path, handler, schema in (
            ("/v1/completions", service.completions, CompletionRequest),
            ("/v1/chat/completions", service.chat, service.chat_schema),
        )
    ]
    health = _object_schema(ready={"type": "boolean"}, version={"type": "integer"})
    return [
        *asking,
        *([] if service.training_fields else loading),
        RouteSpec(path="/v1/models", handler=service.models, summary="What is served."),
        RouteSpec(
            path="/health",
            handler=service.health,
            summary="Whether requests are answered.",
            response_schemas={"application/json": health},
            error_statuses=(503,),
            keyless=True,
        ),
        RouteSpec(path="/version", handler=service.version, summary="Of the weights that are live."),
        RouteSpec(
            path="/metrics",
            handler=service.metrics,
            summary="For Prometheus.",
            response_schemas={"text/plain": {"type": "string"}},
        ),
    ]


def _first_doc_line(schema: type[Settings]) -> str:
    return (schema.__doc__ or "").partition("\n")[0]


def _object_schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


COMPLETION_SCHEMA = _object_schema(id={"type": "string"}, object={"type": "string"}, choices={"type": "array"})
ERROR_SCHEMA = _object_schema(
    error=_object_schema(
        message={"type": "string"},
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)


def _with_error_responses(handler: Handler) -> Handler:
    """The handler, with its exceptions as responses."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone:
            log.info("%s: the client left, its request was cancelled", request.url.path)
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - whatever failed, the client gets JSON and the log the traceback
            return error_response(error)

    return answer
