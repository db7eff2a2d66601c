"""Declarations of routes for /openapi.json: the models of requests, responses and events, and names in paths.

FastAPI sees none of these bodies: `app.http.body` reads requests within bounds, and responses are written as bytes. The
response models only describe; a test holds real responses and events against them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from fastapi import Path
from pydantic import BaseModel, ConfigDict

from tessera.app.schema.fields import MAX_NAME
from tessera.app.schema.request import RequestModel

REF = "#/components/schemas/{model}"
EVENT_STREAM = "text/event-stream"
WHOLE_OBJECT: Mapping[int, str] = {200: "The object."}
WHOLE_OBJECT_OR_EVENTS: Mapping[int, str] = {200: "The whole object, or with `stream` its events."}

# A name in a path. Nothing has a longer one, so those are answered with 404.
PathName: TypeAlias = Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": MAX_NAME})]


class ApiObject(BaseModel):
    """Base of the models that describe responses: all fields, and only those."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class Description(dict[str, Any]):
    """`openapi_extra` of a route: the models of its bodies, which FastAPI does not see.

    Attributes:
        bodies: the requests that the route accepts.
        returns: the model of the response; None: bytes.
        events: the model of each streamed event's data, or None.
        errors: statuses of failures beside those that all routes have.
    """

    def __init__(
        self,
        *bodies: type[RequestModel],
        returns: type[BaseModel] | None,
        events: type[BaseModel] | None = None,
        statuses: Mapping[int, str] = WHOLE_OBJECT,
        query: Mapping[str, Mapping[str, Any]] | None = None,
        form: Mapping[str, Any] | None = None,
        errors: Sequence[int] = (),
    ) -> None:
        """
        Args:
            errors: statuses of failures beside those that all routes have.
            form: JSON schema of a multipart body, in place of `bodies`.
            statuses: descriptions of the statuses with which `returns` is sent.
            query: JSON schemas of the optional query parameters.
        """
        super().__init__()
        self.bodies = bodies
        self.returns = returns
        self.events = events
        self.errors = errors
        content: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        if returns is not None:
            content = {"application/json": {"schema": reference(returns)}}
        if events is not None:
            content[EVENT_STREAM] = {"schema": _event_schema(events)}
            statuses = WHOLE_OBJECT_OR_EVENTS
        self["responses"] = {
            str(status): {"description": meaning, "content": content} for status, meaning in statuses.items()
        }
        if bodies:
            self["requestBody"] = {"required": True, "content": {"application/json": _body_content(bodies)}}
        if form is not None:
            self["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
        if query is not None:
            self["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def _body_content(bodies: tuple[type[RequestModel], ...]) -> dict[str, Any]:
    refs = [reference(body) for body in bodies]
    examples = {name: {"value": value} for body in bodies for name, value in body.examples.items()}
    return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}, "examples": examples}


def _event_schema(events: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes them."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(events),
        "description": "JSON; after the last chunk of a chat or text completion, [DONE].",
    }
    return {
        "type": "object",
        "description": "Each of the server-sent events.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }
