"""What a server answers, said once: the table from which its routes and its OpenAPI description are both made.

Guarantees that a path that is served is described and the other way round, and that what a request may hold is
described by what reads it. Answers are described by their kind and their most important parts, not field by field.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]
Schema = Mapping[str, Any]

ERROR_DESCRIPTIONS: Mapping[int, str] = {
    400: "what was asked for cannot be; the message names field and value",
    401: "no key, or a wrong one",
    403: "not from here, or not that path",
    404: "there is none of that name",
    405: "not by this method",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests; retry-after says when to come back",
    503: "not now; retry-after says when to come back",
}


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """One path and method."""

    path: str
    handler: Handler
    summary: str
    method: Literal["GET", "POST"] = "GET"
    body: Schema | None = None
    """JSON schema of the request's body."""
    parameters: Sequence[Schema] = ()
    """OpenAPI parameters."""
    response_schemas: Mapping[str, Schema] = field(default_factory=lambda: {"application/json": {"type": "object"}})
    """Of success: JSON schemas by media type."""
    error_statuses: Sequence[int] = ()
    """Statuses that it may answer with beside 200 and those that every path has."""
    keyless: bool = False
    """Answered without the server's key."""


def openapi_document(
    title: str, version: str, endpoints: Sequence[RouteSpec], error_schema: Schema, *, requires_key: bool
) -> dict[str, Any]:
    """The OpenAPI description of a server; `error` is the schema of all its refusals."""
    paths: dict[str, Any] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _describe_operation(one, requires_key and not one.keyless)
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": dict(error_schema)}},
    }
    if requires_key:
        told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return told


def _describe_operation(endpoint: RouteSpec, requires_key: bool) -> dict[str, Any]:
    always = (401, 403, 405, 429) if requires_key else (403, 405, 429)
    content: dict[str, Any] = {kind: {"schema": dict(schema)} for kind, schema in endpoint.response_schemas.items()}
    statuses = sorted({*always, *endpoint.error_statuses, *((400, 408, 413, 415) if endpoint.body is not None else ())})
    said: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_')}",
        "responses": {"200": {"description": "as asked", "content": content}},
    }
    for status in statuses:
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        said["responses"][str(status)] = {"description": ERROR_DESCRIPTIONS[status], "content": content}
    if endpoint.parameters:
        said["parameters"] = [dict(parameter) for parameter in endpoint.parameters]
    if endpoint.body is not None:
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": dict(endpoint.body)}}}
    if requires_key:
        said["security"] = [{"key": []}]
    return said
