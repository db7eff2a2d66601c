"""The API's description: every operation with what it accepts, what it answers, its limits and an example.

FastAPI would write this itself if it read the bodies; here `tessera.app.http.body` does, within bounds of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from tessera import __version__
from tessera.app.http.body import MAX_JSON_DEPTH
from tessera.app.openapi import answers
from tessera.app.openapi.operations import ANSWERING, EVENT_STREAM, OPERATIONS, Operation
from tessera.app.schema.common import MAX_NAME, RequestModel
from tessera.app.settings import AppSettings

REF = "#/components/schemas/{model}"
DESCRIPTION = """\
An OpenAI-compatible server of language models; /v1/messages is compatible with Anthropic's API.

Bodies are JSON objects of at most {max_body_bytes} bytes, nested at most {depth} levels deep, that arrive within \
{body_timeout:g} seconds; an answer takes at most {request_timeout:g} seconds. Fields that are not listed are ignored; \
those that other servers know and this one does not have are refused with status 400, which names them. Prompts are \
bounded by the model's context, see max_model_len in /v1/models. Every answer has an x-request-id."""

_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}  # nothing has a longer one: 404
_EVENT = {
    "type": "object",
    "description": "Each of the server-sent events; `data` is JSON, or [DONE] at the end of chats and completions.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_FAULTS: Mapping[int, str] = {
    400: "A field is wrong or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, response or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests are waiting; `Retry-After` says when to come back.",
    500: "The server or the engine failed this request.",
    503: "The model is being loaded, or the engine is restarted.",
    504: "The answer took too long.",
}


@dataclass(slots=True)
class _Schemas:
    """JSON schemas of all types by name; `refs` are what operations point to."""

    definitions: dict[str, Any] = field(default_factory=dict)
    refs: dict[Any, dict[str, Any]] = field(default_factory=dict)


@cache
def openapi_document(settings: AppSettings) -> dict[str, Any]:
    """The whole description, as OpenAPI 3.1."""
    schemas = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas, bool(settings.api_keys))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tessera",
            "version": __version__,
            "description": DESCRIPTION.format(
                max_body_bytes=settings.max_body_bytes,
                depth=MAX_JSON_DEPTH,
                body_timeout=settings.body_timeout,
                request_timeout=settings.request_timeout,
            ),
        },
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return document


def _schemas() -> _Schemas:
    inputs: list[tuple[Any, JsonSchemaMode, TypeAdapter[Any]]] = []
    for operation in OPERATIONS:
        inputs += [(body, "validation", TypeAdapter(body)) for body in operation.bodies]
        if operation.answer is not None:
            inputs.append((operation.answer, "serialization", TypeAdapter(operation.answer)))
    for error in (answers.ErrorAnswer, answers.MessageErrorAnswer):
        inputs.append((error, "serialization", TypeAdapter(error)))
    unique = list({(key, mode): (key, mode, adapter) for key, mode, adapter in inputs}.values())
    found, shared = TypeAdapter.json_schemas(unique, ref_template=REF)
    schemas = _Schemas(definitions=shared.get("$defs", {}))
    for (key, _), schema in found.items():
        schemas.refs[key] = schema
        if isinstance(key, type) and issubclass(key, RequestModel) and key.refused:
            _note_refused(schemas.definitions[schema["$ref"].rpartition("/")[2]], key)
    return schemas


def _note_refused(schema: dict[str, Any], model: type[RequestModel]) -> None:
    names = ", ".join(sorted(set(model.refused) - set(model.model_fields)))
    schema["description"] = f"{schema.get('description', '')}\n\nRefused unless they ask for nothing: {names}.".strip()


def _operation(operation: Operation, schemas: _Schemas, needs_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation, schemas),
    }
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _NAME, "description": meaning}
            for name, meaning in operation.parameters.items()
        ]
        described["parameters"] += [
            {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
        ]
    if operation.bodies:
        described["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _one_of([schemas.refs[body] for body in operation.bodies]),
                    "examples": {name: {"value": value} for name, value in operation.examples.items()},
                }
            },
        }
    if needs_key and not operation.is_open:
        described["security"] = [{"bearer": []}, {"x-api-key": []}]
    return described


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    good: dict[str, Any] = {"description": operation.answer_meaning, "content": {}}
    if operation.answer is not None:
        good["content"]["application/json"] = {"schema": schemas.refs[operation.answer]}
    for media_type in operation.other_media_types:
        good["content"][media_type] = {"schema": _EVENT if media_type == EVENT_STREAM else {"type": "string"}}
    responses = {"200": good}
    if operation.is_open:
        if operation.answer is not None and operation.may_be_unavailable:
            responses["503"] = {**good, "description": "The same, where it is not so."}
        return responses
    error = answers.MessageErrorAnswer if operation.tag == "Anthropic" else answers.ErrorAnswer
    content = {"application/json": {"schema": schemas.refs[error]}}
    statuses = _FAULTS if operation.bodies else {status: _FAULTS[status] for status in ANSWERING}
    for status, meaning in statuses.items():
        responses[str(status)] = {"description": meaning, "content": content}
    return responses


def _one_of(refs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return refs[0] if len(refs) == 1 else {"anyOf": list(refs)}
