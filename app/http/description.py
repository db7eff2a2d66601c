"""Declarations of routes for /openapi.json beyond FastAPI's `response_model`: bodies, events, names in paths.

FastAPI sees neither the bodies, which `app.http.body` reads within bounds, nor the events, which are written as bytes.
The models of responses describe and are tested against real responses; no response is built from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from fastapi import Path
from pydantic import BaseModel, ConfigDict

from tessera.app.schema.fields import MAX_NAME
from tessera.app.schema.request import RequestModel

REF = "#/components/schemas/{model}"
EVENT_STREAM = "text/event-stream"

# A name in a path. Nothing has a longer one, so those are answered with 404.
PathName: TypeAlias = Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": MAX_NAME})]


class ApiObject(BaseModel):
    """Base of the models that describe responses: all fields, and only those."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class Description(dict[str, Any]):
    """`openapi_extra` of a route.

    Attributes:
        bodies: the requests that the route accepts.
        events: the model of each streamed event's data, or None.
    """

    def __init__(
        self,
        *bodies: type[RequestModel],
        events: type[BaseModel] | None = None,
        query: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`query` has the JSON schemas of the optional query parameters."""
        super().__init__()
        self.bodies = bodies
        self.events = events
        if bodies:
            self["requestBody"] = {"required": True, "content": {"application/json": _body_content(bodies)}}
        if events is not None:
            self["responses"] = {"200": {"content": {EVENT_STREAM: {"schema": _event_schema(events)}}}}
        if query is not None:
            self["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]


def _body_content(bodies: tuple[type[RequestModel], ...]) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model=body.__name__)} for body in bodies]
    examples = {name: {"value": value} for body in bodies for name, value in body.examples.items()}
    return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}, "examples": examples}


def _event_schema(events: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes them."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": REF.format(model=events.__name__)},
        "description": "JSON; after the last chunk of a chat or text completion, [DONE].",
    }
    return {
        "type": "object",
        "description": "Each of the server-sent events.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }
