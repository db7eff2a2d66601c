"""The OpenAPI document: operations from FastAPI's routes, schemas from pydantic, errors and keys added here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from tessera import __version__
from tessera.app.http.auth import OPEN_PATHS
from tessera.app.http.description import REF, Description, reference
from tessera.app.http.dialect import OPENAI, Dialect
from tessera.app.http.json_reader import MAX_JSON_DEPTH
from tessera.app.settings import AppSettings

DESCRIPTION = """\
An OpenAI-compatible server of language models; /v1/messages is compatible with Anthropic's API.

Bodies are JSON objects of at most {max_body_bytes} bytes, nested at most {depth} levels deep, that arrive within \
{body_timeout:g} seconds; a response takes at most {request_timeout:g} seconds. Unlisted fields are ignored; \
those that other servers know and this one does not have are refused with status 400, which names them, or taken \
without effect where they are hints. Prompts are bounded by the model's context, see max_model_len in /v1/models. \
Every response has an x-request-id."""

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ERRORS: Mapping[int, str] = {
    400: "A field is wrong or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The server's options do not offer it, or the key does not allow it.",
    404: "There is no such model, object or path.",
    408: "The body did not arrive in time.",
    409: "The object is not in a state for this.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests are waiting, or a limit of the key is reached; `Retry-After` says when to come back.",
    500: "The server or the engine failed this request.",
    503: "The model is being loaded, the engine is restarted, memory is short, or the disk fails.",
    504: "The response took too long.",
    507: "There is no space left to store it.",
}
ERRORS_WITHOUT_BODY = (400, 401, 404, 500, 503, 507)
ERRORS_WITH_BODY = (*ERRORS_WITHOUT_BODY, 408, 413, 415, 429, 504)


def openapi_document(
    routes: Sequence[APIRoute], settings: AppSettings, dialects: Sequence[Dialect] = ()
) -> dict[str, Any]:
    """The document, as OpenAPI 3.1.

    Args:
        routes: those of all APIs; routes that are not `include_in_schema` are left out.
        dialects: of the APIs whose errors do not have OpenAI's form.
    """
    listed = [route for route in routes if route.include_in_schema]
    document = get_openapi(
        title="Tessera",
        version=__version__,
        description=DESCRIPTION.format(
            max_body_bytes=settings.max_body_bytes,
            depth=MAX_JSON_DEPTH,
            body_timeout=settings.body_timeout,
            request_timeout=settings.request_timeout,
        ),
        routes=listed,
    )
    for route in listed:
        dialect = next((dialect for dialect in dialects if dialect.paths.match(route.path)), OPENAI)
        for operation in document["paths"][route.path_format].values():
            operation["responses"].pop("422", None)  # of FastAPI's validation, which no route uses
            if route.path in OPEN_PATHS:
                continue
            further = route.openapi_extra.errors if isinstance(route.openapi_extra, Description) else ()
            has_body = "requestBody" in operation
            operation["responses"].update(_error_responses(dialect, further, has_body=has_body))
            if settings.accepted_keys:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
    document["components"] = {
        "schemas": _schemas(listed, [OPENAI, *dialects]),
        "securitySchemes": SECURITY_SCHEMES,
    }
    return document


def _error_responses(dialect: Dialect, further: Iterable[int], *, has_body: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": reference(dialect.error_model)}}
    statuses = sorted({*(ERRORS_WITH_BODY if has_body else ERRORS_WITHOUT_BODY), *further})
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}


def _schemas(routes: Iterable[APIRoute], dialects: Iterable[Dialect]) -> dict[str, Any]:
    """JSON schemas of all described models, and of those that they refer to, by name."""
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
    for route in routes:
        if isinstance(route.openapi_extra, Description):
            described = route.openapi_extra
            models |= dict.fromkeys((body, "validation") for body in described.bodies)
            if described.returns is not None:
                models[described.returns, "serialization"] = None
            if described.events is not None:
                models[described.events, "serialization"] = None
    models |= dict.fromkeys((dialect.error_model, "serialization") for dialect in dialects)
    _, found = models_json_schema(list(models), ref_template=REF)
    schemas: dict[str, Any] = found["$defs"]
    return schemas
