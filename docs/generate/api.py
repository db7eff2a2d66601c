"""The API reference, a page for each group of endpoints, from the server's own OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.generate.field_notes import NOTES
from docs.generate.figures import markdown_table
from docs.generate.schemas import Schema, accepts, cell, meaning, refs, with_default
from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.ollama.errors import OLLAMA
from tessera.app.openapi.document import openapi_document
from tessera.app.server.application import ROUTES, api_routes
from tessera.app.settings import AppSettings

URL = "http://127.0.0.1:8000"
REFUSED = "Refused unless they ask for nothing:"


@dataclass(frozen=True)
class Page:
    """A page and the beginnings of the paths that are on it."""

    file: str
    title: str
    prefixes: tuple[str, ...]
    introduction: str = ""


PAGES = (
    Page(
        "chat.md",
        "Chat completions",
        ("/v1/chat/",),
        "OpenAI's chat API: a conversation in, a completion out. With `store: true` the completion is stored.",
    ),
    Page("completions.md", "Completions", ("/v1/completions",), "OpenAI's older API: text or token ids in, text out."),
    Page(
        "responses.md",
        "Responses",
        ("/v1/responses",),
        "OpenAI's Responses API. Responses are stored for `previous_response_id`, unless `store` is false.",
    ),
    Page(
        "conversations.md",
        "Conversations",
        ("/v1/conversations",),
        "OpenAI's Conversations API: stored items, which responses with `conversation` continue and are added to.",
    ),
    Page("messages.md", "Messages", ("/v1/messages",), "Anthropic's Messages API. Errors have Anthropic's form."),
    Page(
        "ollama.md",
        "Ollama",
        ("/api/",),
        "Ollama's API, for tools that speak no other. Model names may have the tag `:latest`, durations are in"
        " nanoseconds, errors have Ollama's form. `options` that only load or place a model have no effect. Models are"
        " chosen when the server is started: `/api/create`, `/api/copy`, `/api/push` and `/api/delete` are refused.",
    ),
    Page("embeddings.md", "Embeddings", ("/v1/embeddings",)),
    Page(
        "scores.md",
        "Rerank, score, classify",
        ("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify"),
        "Reranking in the form of Jina's and Cohere's APIs, scores and classes in that of vLLM.",
    ),
    Page(
        "files.md",
        "Files",
        ("/v1/files",),
        "Files of an API key, kept in the [data folder](../operating/batches.md#the-data-folder).",
    ),
    Page(
        "batches.md",
        "Batches",
        ("/v1/batches",),
        "The requests of a file, run beside interactive requests: see"
        " [Files, batches and the data folder](../operating/batches.md#batches).",
    ),
    Page(
        "fine_tuning.md",
        "Fine-tuning",
        ("/v1/fine_tuning",),
        "Adapters of served models, trained on chats or preferences: see [Fine-tuning jobs](../fine-tuning.md).",
    ),
    Page("models.md", "Models", ("/v1/models",)),
    Page(
        "tokens.md",
        "Tokens",
        ("/tokenize", "/detokenize", "/tokenizer_info"),
        "The tokenizer and the chat template by themselves.",
    ),
    Page(
        "operation.md",
        "Health and metrics",
        (
            "/health",
            "/ping",
            "/ready",
            "/load",
            "/version",
            "/metrics",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
        ),
    ),
    Page("invocations.md", "Invocations", ("/invocations",), "Amazon SageMaker's one path for several APIs."),
)


@cache
def document() -> dict[str, Any]:
    """The document as a server with an API key and default settings gives it."""
    settings = AppSettings(model_folder=".", served_model_names=("MODEL",), api_keys=("key",))
    return openapi_document(api_routes(ROUTES), settings, (ANTHROPIC, OLLAMA))


def api_pages() -> dict[str, str]:
    """File name -> Markdown. Raises ValueError for a path that is on no page."""
    pages: dict[str, str] = {}
    for page in PAGES:
        pages[page.file] = _page(page)
    lost = [path for path in document()["paths"] if not any(path.startswith(page.prefixes) for page in PAGES)]
    if lost:
        raise ValueError(f"these paths are on no page of the API reference; add them to PAGES: {', '.join(lost)}")
    return pages


def _page(page: Page) -> str:
    parts = [f"# {page.title}", page.introduction]
    named: list[str] = []
    for path, methods in document()["paths"].items():
        if path.startswith(page.prefixes):
            for method, operation in methods.items():
                parts += _operation(method, path, operation)
                named += _objects(operation)
    objects = list(_with_nested(named))
    if objects:
        parts.append("## Objects")
        parts += [part for name in objects for part in _object(name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _schema(name: str) -> Schema:
    found: Schema = document()["components"]["schemas"][name]
    return found


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"## {method.upper()} {path} {{ #{operation['operationId'].lower()} }}"
    key = "Needs a key once keys are set." if operation.get("security") else "Needs no key."
    yield f"{operation['summary']}. {key}"
    if operation.get("parameters"):
        rows = [
            [
                _named(parameter["name"], required=parameter.get("required", False)),
                parameter["in"],
                with_default(parameter["schema"]),
                cell(parameter.get("description") or parameter["schema"].get("description", "")),
            ]
            for parameter in operation["parameters"]
        ]
        yield markdown_table(["parameter", "in", "accepts", "meaning"], rows, 4)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body:
        yield from _body(method, path, body)
    form = operation.get("requestBody", {}).get("content", {}).get("multipart/form-data")
    if form:
        yield "### Request: multipart/form-data"
        yield _fields(form["schema"])
    yield from _responses(operation["responses"])


def _body(method: str, path: str, body: dict[str, Any]) -> Iterator[str]:
    forms = [_schema(name) for name in refs(body["schema"])]
    for form in forms:
        yield "### Request" if len(forms) == 1 else f"### Request: {form.get('title', '')}"
        description, _, refused = form.get("description", "").partition(REFUSED)
        yield cell(description)
        yield _fields(form)
        if refused:
            names = ", ".join(f"`{name.strip(' .')}`" for name in refused.split(","))
            yield f"Refused with status 400 unless they ask for nothing: {names}."
    tabs = []
    for name, example in body.get("examples", {}).items():
        body_text = _pretty(example["value"])
        command = f"curl {URL}{path} \\\n  -H 'Content-Type: application/json' \\\n  -d '{body_text}'"
        indented = "\n".join(f"    {line}" for line in f"```sh\n{command}\n```".splitlines())
        tabs.append(f'=== "{name}"\n\n{indented}')
    yield "\n\n".join(tabs)


def _pretty(value: Any) -> str:
    """As a shell argument, for the demonstration model."""
    return json.dumps(value, indent=2).replace("'", "'\\''").replace('"MODEL"', '"tessera-builtin"')


def _fields(schema: Schema) -> str:
    """The table of an object's fields, required ones first."""
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    ordered = [
        *(name for name in properties if name in required),
        *(name for name in properties if name not in required),
    ]
    rows = [
        [
            _named(name, required=name in required),
            with_default(properties[name]),
            meaning(properties[name]) or NOTES.get(name, ""),
        ]
        for name in ordered
    ]
    return markdown_table(["field", "accepts", "meaning"], rows, 3)


def _named(name: str, *, required: bool) -> str:
    return f"`{name}`{' *required*' if required else ''}"


def _responses(responses: dict[str, Any]) -> Iterator[str]:
    yield "### Response"
    good = responses["200"]
    content = good.get("content", {})
    forms = [accepts(each["schema"]) for kind, each in content.items() if kind == "application/json"]
    others = [_stream(kind, each.get("schema", {})) for kind, each in content.items() if kind != "application/json"]
    yield f"{good['description']} {' or '.join([*forms, *others])}"
    failures = [status for status in responses if status != "200"]
    if failures:
        yield f"May fail with status {', '.join(failures)}: see [Errors](index.md#errors)."


def _stream(kind: str, schema: Schema) -> str:
    """A media type, and what the `data` of its events is."""
    data = schema.get("properties", {}).get("data", {}).get("contentSchema")
    return f"`{kind}` of {accepts(data)}" if data else f"`{kind}`"


def _objects(operation: dict[str, Any]) -> list[str]:
    """Schemas that an operation's tables link to; a request's own form has its table in place."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    names = [name for form in refs(body) for name in refs(_schema(form))]
    content = operation["responses"]["200"].get("content", {})
    return names + [name for each in content.values() for name in refs(each.get("schema", {}))]


def _with_nested(names: list[str]) -> Iterator[str]:
    """These and all that they point to, each once."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name not in seen:
            seen.add(name)
            yield name
            waiting = [*refs(_schema(name)), *waiting]


def _object(name: str) -> Iterator[str]:
    schema = _schema(name)
    yield f"### {name} {{ #{name.lower()} }}"
    yield cell(schema.get("description", ""))
    if schema.get("properties"):
        yield _fields(schema)
    else:
        yield accepts({key: value for key, value in schema.items() if key != "title"})


def undescribed_fields() -> list[str]:
    """Fields of request bodies without a description, as `Schema.field`."""
    found = []
    for methods in document()["paths"].values():
        for operation in methods.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for name in refs(body.get("schema", {})):
                for field, schema in _schema(name).get("properties", {}).items():
                    if not meaning(schema):
                        found.append(f"{name}.{field}")
    return found
