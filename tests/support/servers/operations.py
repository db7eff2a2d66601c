"""The operations that /openapi.json describes, from the routes themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi.routing import APIRoute

from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.http.description import Description
from tessera.app.ollama.errors import OLLAMA
from tessera.app.openapi.document import openapi_document
from tessera.app.schema.request import RequestModel
from tessera.app.server.application import ROUTES, api_routes
from tessera.app.settings import AppSettings


@dataclass(frozen=True)
class Operation:
    """One method of one path, the models of its bodies and their examples."""

    route: APIRoute
    id: str
    method: str
    path: str
    bodies: tuple[type[RequestModel], ...]
    parameters: tuple[str, ...]

    @property
    def examples(self) -> Mapping[str, Any]:
        return {name: example for body in self.bodies for name, example in body.examples.items()}

    @property
    def description(self) -> Description | None:
        return self.route.openapi_extra if isinstance(self.route.openapi_extra, Description) else None


def _operation(route: APIRoute) -> Operation:
    assert route.methods is not None
    assert route.operation_id is not None
    (method,) = route.methods
    bodies = route.openapi_extra.bodies if isinstance(route.openapi_extra, Description) else ()
    names = tuple(re.findall(r"{(\w+)", route.path))
    return Operation(route, route.operation_id, method.lower(), route.path_format, bodies, names)


OPERATIONS = tuple(_operation(route) for route in api_routes(ROUTES) if route.include_in_schema)
POOLED = frozenset({"sleep", "wakeUp"})  # which end and start engines; see tests/e2e/test_several_models.py
# Which need an option, and a process that trains; see tests/app/openai/test_fine_tuning.py.
TUNING = frozenset(
    operation.id
    for operation in OPERATIONS
    if operation.path.startswith("/v1/fine_tuning") or operation.id == "deleteModel"
)
HARMLESS = tuple(operation for operation in OPERATIONS if operation.id not in POOLED)


@lru_cache
def document_for(settings: AppSettings) -> dict[str, Any]:
    """The document that a server with these settings has at /openapi.json; not to be changed."""
    return openapi_document(api_routes(ROUTES), settings, (ANTHROPIC, OLLAMA))
