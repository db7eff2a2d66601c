"""/openapi.json: it names every route and every limit, its examples work, and it needs nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.app.ollama.model_routes import REFUSED
from tessera.app.server.application import ROUTES
from tessera.app.settings import AppSettings
from tests.support.servers.http_fixtures import call, settings_for
from tests.support.servers.operations import OPERATIONS, document_for
from tests.support.servers.surface_fixtures import says, tool_settings

# The description itself, the start page, and what is not found or always refused.
UNLISTED = {"/openapi.json", "/", "/v1/responses/compact", *REFUSED}

EMBED = ("createEmbeddings", "ollamaEmbed", "ollamaEmbeddings")


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    response = call(says("ok"), tool_settings(tmp_path), "GET", "/openapi.json")
    assert response.status_code == 200
    described: dict[str, Any] = response.json()
    return described


def test_every_route_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for module in ROUTES
        for route in module.router.routes
        for method in route.methods
        if route.path not in UNLISTED
    }
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == routes


def test_references_lead_somewhere_within_the_document(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    refs = {part.split('"', 1)[0] for part in text.split('"$ref": "')[1:]}
    assert refs
    assert {ref.removeprefix("#/components/schemas/") for ref in refs} <= set(schemas)
    assert "http://" not in text
    assert "https://" not in text
    assert not [name for name in schemas if "__" in name], "two types share a name"


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op.bodies], ids=lambda operation: operation.id)
def test_examples_are_accepted(tmp_path: Path, operation: Any) -> None:
    assert operation.examples
    for example in operation.examples.values():
        body = json.loads(json.dumps(example).replace("MODEL", "tiny"))
        other = {"input", "query", "text_1", "queries", "documents"} & body.keys()
        generates = operation.id == "createResponse" or not other
        generates = generates and operation.id not in EMBED and operation.route.tags != ["Scores"]
        refers = any(name in body for name in ("previous_response_id", "input_file_id", "training_file"))
        if not refers and generates:
            response = call(says("ok"), tool_settings(tmp_path), "POST", operation.path, json=body)
            names_none = "{" in operation.path or operation.id == "unloadLoraAdapter"  # nothing is stored or loaded
            unknown = response.status_code == 404 and names_none
            assert response.status_code == 200 or unknown, response.text


def test_refused_fields_and_defaults_are_told(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert "web_search_options" in schemas["ChatCompletionRequest"]["description"]
    assert "conversation" in schemas["ResponsesRequest"]["description"]
    chat = schemas["ChatCompletionRequest"]
    assert set(chat["required"]) == {"messages"}
    assert chat["properties"]["stream"]["default"] is False
    stops = schemas["ChatCompletionRequest"]["properties"]["stop"]["anyOf"]
    assert {"maxItems": 64, "type": "array"}.items() <= stops[1].items()


def test_keys_are_described_where_they_are_needed(tmp_path: Path) -> None:
    open_server = document_for(settings_for(tmp_path))
    closed = document_for(AppSettings(model_folder="x", served_model_names=("tiny",), api_keys=("k",)))
    assert "security" not in open_server["paths"]["/v1/models"]["get"]
    assert closed["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "security" not in closed["paths"]["/health"]["get"]
    assert "k" not in [word for word in json.dumps(closed).split('"') if word == "k"]


def test_limits_of_bodies_and_times_are_those_of_the_settings(tmp_path: Path) -> None:
    text = document_for(settings_for(tmp_path, max_body_bytes=12345, request_timeout=77.0))["info"]["description"]
    assert "12345 bytes" in text
    assert "77 seconds" in text


def test_no_page_that_loads_scripts_from_elsewhere(tmp_path: Path) -> None:
    for path in ("/docs", "/redoc"):
        assert call(says("ok"), tool_settings(tmp_path), "GET", path).status_code == 404
