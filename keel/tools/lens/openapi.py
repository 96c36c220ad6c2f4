"""Build the OpenAPI document of the lens from the table that its routes are made from.

Guarantees that parameters are described by the declarations that parse them. Responses are described as JSON objects,
not field by field.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]
Schema = Mapping[str, Any]

ERROR_DESCRIPTIONS: Mapping[int, str] = {
    400: "Invalid request; the message names parameter and value.",
    401: "Missing or invalid API key.",
    403: "Not allowed from this client.",
    404: "Unknown name.",
    405: "Method not allowed.",
    429: "Too many requests; the retry-after header says when to retry.",
}


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """One route that responds to GET."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
    parameters: Sequence[Schema] = ()
    """OpenAPI parameters."""
    error_statuses: Sequence[int] = ()
    """Error statuses in addition to those of every route."""


def openapi_document(
    title: str, version: str, endpoints: Sequence[RouteSpec], error_schema: Schema, *, requires_key: bool
) -> dict[str, Any]:
    """Return the OpenAPI document of a server; `error_schema` is the schema of every error response."""
    components: dict[str, Any] = {"schemas": {"Error": dict(error_schema)}}
    if requires_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": {
            endpoint.path: {endpoint.method.lower(): _describe_operation(endpoint, requires_key)}
            for endpoint in endpoints
        },
        "components": components,
    }


def _describe_operation(endpoint: RouteSpec, requires_key: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {"description": "Success.", "content": {"application/json": {"schema": {"type": "object"}}}}
    }
    for status in sorted({403, 405, 429, *((401,) if requires_key else ()), *endpoint.error_statuses}):
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[str(status)] = {"description": ERROR_DESCRIPTIONS[status], "content": content}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_')}",
        "parameters": [dict(parameter) for parameter in endpoint.parameters],
        "responses": responses,
    }
    if requires_key:
        operation["security"] = [{"key": []}]
    return operation
