"""The response models behind /openapi.json against real responses and events: each fits, and each field occurs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.http.description import ApiObject
from tessera.app.http.dialect import OPENAI
from tessera.app.ollama.errors import OLLAMA
from tessera.app.ollama.lines import NDJSON
from tessera.app.openai.chat.objects import ChatCompletionObject
from tessera.app.openai.fine_tuning import objects as fine_tuning
from tessera.app.openai.responses.objects import ResponseEvent
from tessera.engine.contract.errors import EngineError
from tessera.engine.contract.messages import EmbeddingInfo, PromptScores, ScorerInfo, TokenLogprobs
from tests.support.fakes.fake_client import FakeClient, Submission, play
from tests.support.servers.http_fixtures import ids, serve
from tests.support.servers.operations import OPERATIONS, POOLED, TUNING, Operation
from tests.support.servers.surface_fixtures import CALL, PATIENCE, ROOMY, WEATHER_PARAMETERS, tool_settings

EMBEDDINGS = EmbeddingInfo(
    role="main", architecture="Fake", pooling="last", dimension=4, vocab_size=512, max_input_tokens=64
)
SCORER = ScorerInfo(
    beside=False,
    form="pair",
    architecture="Fake",
    labels=("relevant",),
    scores="sigmoid",
    vocab_size=512,
    max_input_tokens=64,
)
INFO = msgspec.structs.replace(ROOMY, embeddings=(EMBEDDINGS,), scorer=SCORER)

HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "weather", "description": "Tells the weather", "parameters": WEATHER_PARAMETERS, "strict": False}
SCHEMA = {"name": "city", "schema": WEATHER_PARAMETERS}
UPLOADED = b"not a request"
BATCH_OPERATIONS = ("createBatch", "retrieveBatch", "cancelBatch")
THINKS_AND_CALLS = f"<think>hm</think>so {CALL}"
FAILS = object()  # in the place of a text: the engine fails after some tokens

CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
CHAT_TOOLS = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}
SCORED = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
STORED_CHAT = {
    **CHAT,
    "store": True,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "messages": [
        {**HELLO[0], "name": "me"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "assistant", "refusal": "no", "reasoning_content": "hm", "function_call": CALLED["function"]},
        *HELLO,
    ],
}
CUSTOM_TOOL = {"type": "custom", "custom": {"name": "note"}}
ALL_TOOLS = [
    {"type": "function", **FUNCTION},
    {"type": "custom", "name": "note", "description": "Takes notes", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "app",
        "description": "Tools of the app",
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "note"}],
    },
    {"type": "web_search"},
]
SEALED = {"include": ["reasoning.encrypted_content"]}
CUSTOM_CALL = '<tool_call>\n{"name": "note", "arguments": {"input": "so"}}\n</tool_call>'
NAMESPACED_CALL = CALL.replace("weather", "app__weather")
USAGE = {"stream_options": {"include_usage": True}}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "hello"}
MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HELLO}
OLLAMA_CHAT: dict[str, Any] = {**CHAT, "stream": False}
OLLAMA_PROMPT: dict[str, Any] = {**COMPLETION, "stream": False}
LONG_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "rain " * 20}
EDITED: dict[str, Any] = {
    "messages": [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {}},
            ],
        },
        {"role": "user", "content": [LONG_RESULT]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}]},
        *HELLO,
    ],
    "context_management": {
        "edits": [
            {"type": "clear_thinking_20251015"},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 0},
                "keep": {"type": "tool_uses", "value": 0},
            },
        ]
    },
}
ITEMS = [
    {"role": "user", "content": "hello"},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": "hm",
        "encrypted_content": "x",
    },
    {"role": "assistant", "content": "calling"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"type": "function_call_output", "namespace": "app", "name": "weather", "output": "rain"},
    {"type": "function_call", "call_id": "d", "namespace": "app", "name": "weather", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "e", "namespace": "app", "name": "note", "input": "so"},
    {"type": "custom_tool_call_output", "call_id": "e", "output": "noted"},
    {"type": "local_shell_call", "call_id": "f", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "f", "output": "a.txt"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]},
    {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
]


@dataclass
class Case:
    """One request: its body, or the file and purpose of an upload; what the model writes; if it can be streamed."""

    body: dict[str, Any] | None = None
    text: Any = "hello wörld"
    streams: bool = True
    whole: bool = True
    path: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    upload: tuple[bytes, str] | None = None


CASES: dict[str, list[Case]] = {
    "createChatCompletion": [
        Case({**CHAT, "n": 2}),
        Case({**CHAT, **SCORED}),
        Case({**CHAT, **SCORED, "prompt_logprobs": 1}, streams=False),
        Case({**CHAT_TOOLS, **SCORED}, THINKS_AND_CALLS),
        Case({**CHAT_TOOLS, "max_tokens": 3}, THINKS_AND_CALLS),
        Case({**CHAT_TOOLS, "tools": [CUSTOM_TOOL]}, CUSTOM_CALL),
        Case({**CHAT, "functions": [FUNCTION]}, CALL),
        Case({**CHAT, **USAGE}, whole=False),
        Case(CHAT, FAILS),
    ],
    "listChatCompletions": [Case(), Case(query={"limit": "0"})],
    "retrieveChatCompletion": [Case()],
    "listChatCompletionMessages": [Case()],
    "updateChatCompletion": [Case({"metadata": {"a": "b"}})],
    "deleteChatCompletion": [Case()],
    "createCompletion": [
        Case({**COMPLETION, "n": 2, "max_tokens": 2}),
        Case({**COMPLETION, "echo": True, "logprobs": 1, "return_token_ids": True}),
        Case({**COMPLETION, "prompt_logprobs": 1}, streams=False),
        Case({**COMPLETION, **USAGE}, whole=False),
        Case(COMPLETION, FAILS),
    ],
    "createResponse": [
        Case({**RESPONSE, "top_logprobs": 1, "metadata": {"a": "b"}, "reasoning": {"summary": "auto"}}),
        Case({**RESPONSE, "tools": [{"type": "function", **FUNCTION}]}, THINKS_AND_CALLS),
        Case({**RESPONSE, "max_output_tokens": 3, "text": {"format": {"type": "json_schema", **SCHEMA}}}),
        Case(
            {
                **RESPONSE,
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "weather"},
            },
            CALL,
        ),
        Case({**RESPONSE, "tools": ALL_TOOLS, "text": {"format": {"type": "json_object", "schema": {}}}}, "{}"),
        Case({**RESPONSE, "tools": ALL_TOOLS, **SEALED}, f"<think>hm</think>{CUSTOM_CALL}{NAMESPACED_CALL}"),
        Case({**RESPONSE, "tools": ALL_TOOLS}, CUSTOM_CALL.replace("note", "app__note")),
        Case({**RESPONSE, "text": {"format": {"type": "json_object"}}}, "{}"),
        Case(RESPONSE, FAILS),
    ],
    "countInputTokens": [Case(RESPONSE)],
    "retrieveResponse": [Case(streams=False)],
    "deleteResponse": [Case()],
    "listInputItems": [Case()],
    "cancelResponse": [Case()],
    "createConversation": [Case({"metadata": {"a": "b"}, "items": ITEMS})],
    "retrieveConversation": [Case()],
    "updateConversation": [Case({"metadata": {"a": "b"}})],
    "deleteConversation": [Case()],
    "createConversationItems": [Case({"items": ITEMS})],
    "listConversationItems": [Case()],
    "retrieveConversationItem": [Case()],
    "deleteConversationItem": [Case()],
    "createEmbeddings": [
        Case({"model": "tiny", "input": ["hello", "world"]}),
        Case({"model": "tiny", "input": "hello", "encoding_format": "base64"}),
    ],
    **{key: [Case({"query": "a", "documents": ["b"]})] for key in ("rerank", "rerankCohere")},
    "score": [Case({"text_1": "a", "text_2": "b"})],
    "classify": [Case({"input": "a"})],
    "createFile": [Case(upload=(UPLOADED, "batch"))],
    "listFiles": [Case()],
    "retrieveFile": [Case()],
    "downloadFile": [Case()],
    "deleteFile": [Case()],
    "createBatch": [Case({"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}})],
    "listBatches": [Case()],
    "retrieveBatch": [Case()],
    "cancelBatch": [Case()],
    "invoke": [Case(CHAT)],
    "loadLoraAdapter": [Case({"lora_name": "spelling", "lora_path": "/adapters/spelling"})],
    "listModels": [Case()],
    "retrieveModel": [Case(path={"name": "tiny"}), Case(path={"name": "another"})],
    "unloadLoraAdapter": [Case({"lora_name": "spelling"})],
    "createMessage": [
        Case(MESSAGE),
        Case(
            {**MESSAGE, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": WEATHER_PARAMETERS}]},
            THINKS_AND_CALLS,
        ),
        Case({**MESSAGE, "max_tokens": 3}),
        Case({**MESSAGE, "stop_sequences": ["w"]}),
        Case({**MESSAGE, "max_tokens": 64, **EDITED}),
        Case(MESSAGE, FAILS),
        Case({**MESSAGE, "thread": {"type": "create"}}, streams=False),
    ],
    "ollamaChat": [
        Case({**OLLAMA_CHAT, "tools": CHAT_TOOLS["tools"], "logprobs": True, "top_logprobs": 1}, THINKS_AND_CALLS),
        Case({**OLLAMA_CHAT, "options": {"num_predict": 3}}),
        Case({"model": "tiny", "stream": False}, streams=False),
        Case(OLLAMA_CHAT, FAILS),
    ],
    "ollamaGenerate": [
        Case(OLLAMA_PROMPT, "<think>hm</think>so"),
        Case({**OLLAMA_PROMPT, "raw": True, "logprobs": True}),
        Case({**OLLAMA_PROMPT, "prompt": ""}, streams=False),
        Case(OLLAMA_PROMPT, FAILS),
    ],
    "ollamaEmbed": [Case({"model": "tiny", "input": ["hello", "world"]}), Case({"model": "tiny", "input": ""})],
    "ollamaEmbeddings": [Case({"model": "tiny", "prompt": "hello"}), Case({"model": "tiny"})],
    "ollamaTags": [Case()],
    "ollamaPs": [Case()],
    "ollamaShow": [Case({"model": "tiny"}), Case({"name": "another"})],
    "ollamaPull": [Case({"model": "tiny"}), Case({"model": "another"})],
    "ollamaVersion": [Case()],
    "countTokens": [Case({"model": "tiny", "messages": HELLO}), Case({"model": "tiny", "messages": HELLO, **EDITED})],
    "tokenize": [Case({"prompt": "hello"}), Case({"messages": HELLO, "return_token_strs": True})],
    "detokenize": [Case({"tokens": [5, 6, 7]})],
    "tokenizerInfo": [Case()],
    "resetPrefixCache": [Case()],
    "isSleeping": [Case()],
    "load": [Case()],
    "ping": [Case()],
    "health": [Case()],
    "ready": [Case()],
    "version": [Case()],
    "metrics": [Case()],
}


class Client(FakeClient):
    """Writes `text`, with the scores that a request asks for; embeds as well."""

    def __init__(self) -> None:
        super().__init__(self._write, info=INFO)
        self.text: Any = ""

    def _write(self, submission: Submission) -> Any:
        text = "hello" if self.text is FAILS else self.text
        token_ids = [*ids(text), 0][: submission.params.max_tokens]
        finish = "stop" if token_ids[-1] == 0 else "length"
        outputs = play(token_ids, finish=finish, stop_token_id=0, logprobs=submission.params.logprobs is not None)
        if submission.params.prompt_logprobs is not None:
            scores = [TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5]) for token_id in submission.prompt[1:]]
            outputs[0] = msgspec.structs.replace(outputs[0], prompt_logprobs=[PromptScores.of(scores)])
        return [*outputs[:-1], EngineError("the device failed")] if self.text is FAILS else outputs

    async def embed(
        self, inputs: list[list[int]], *, role: str = "main", first_lengths: Any = (), account: Any = None
    ) -> Any:
        return np.full((len(inputs), 1 if role == "scorer" else EMBEDDINGS.dimension), 0.5, np.float32)


def ended_batch(http: httpx.Client, file_id: str) -> str:
    """The id of a batch that has failed, with an error."""
    request = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = http.post("/v1/batches", json=request).json()["id"]
    for _ in range(1000):
        if http.get(f"/v1/batches/{batch_id}").json()["status"] == "failed":
            return batch_id
        threading.Event().wait(0.01)
    raise AssertionError("the batch did not end")


class Fields:
    """The fields of described models that have occurred."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def note(self, value: Any) -> None:
        if isinstance(value, BaseModel):
            for name in value.model_fields_set:
                self.seen.add((type(value).__name__, name))
                self.note(getattr(value, name))
        elif isinstance(value, dict):
            for child in value.values():
                self.note(child)
        elif isinstance(value, list):
            for child in value:
                self.note(child)


def error_model(path: str) -> type[ApiObject]:
    return next(dialect.error_model for dialect in (ANTHROPIC, OLLAMA, OPENAI) if dialect.paths.match(path))


def events_of(body: str, media_type: str) -> Iterator[str]:
    """The data of each event, without the [DONE]; of NDJSON the lines."""
    if media_type == NDJSON:
        yield from body.splitlines()
        return
    for block in body.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        assert lines[-1].startswith("data: "), block
        data = lines[-1].removeprefix("data: ")
        if data != "[DONE]":
            if len(lines) > 1:
                assert lines[0] == f"event: {json.loads(data)['type']}"
            yield data


def check_whole(http: httpx.Client, operation: Operation, case: Case, fields: Fields) -> dict[str, Any] | None:
    """The response as JSON, checked against the model that the route declares for its status."""
    body: dict[str, Any] = {"json": case.body} if case.body is not None else {}
    if case.upload is not None:
        body = {"files": {"file": case.upload[0]}, "data": {"purpose": case.upload[1]}}
    response = http.request(operation.method, operation.path.format(**case.path), params=case.query, **body)
    model: type[BaseModel] | None = operation.description.returns if operation.description is not None else None
    if response.status_code != 200 and operation.id not in ("health", "ping", "ready"):
        model = error_model(operation.path)
    if model is None:
        assert response.headers["content-type"].startswith(("text/plain", "application/octet-stream"))
        return None
    fields.note(model.model_validate_json(response.content))
    parsed: dict[str, Any] = response.json()
    return parsed


def check_streamed(http: httpx.Client, operation: Operation, case: Case, fields: Fields) -> None:
    """Every event against the model that the route declares for them."""
    assert operation.description is not None
    events = operation.description.events
    assert events is not None
    response = http.request(operation.method, operation.path, json={**(case.body or {}), "stream": True})
    assert response.status_code == 200, response.text
    for data in events_of(response.text, response.headers["content-type"]):
        fields.note(events.model_validate_json(data))


def test_every_response_and_event_fits_and_every_field_occurs(tmp_path: Path) -> None:
    client, fields = Client(), Fields()
    assert CASES.keys() | POOLED | TUNING == {operation.id for operation in OPERATIONS}
    operations = {operation.id: operation for operation in OPERATIONS}
    with (
        serve(client, tool_settings(tmp_path)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        for name, cases in CASES.items():
            operation = operations[name]
            for case in cases:
                client.text = case.text
                if "response_id" in operation.parameters:
                    stored = check_whole(http, operations["createResponse"], Case({**RESPONSE, "input": ITEMS}), fields)
                    assert stored is not None
                    case.path = {"response_id": stored["id"]}
                if "completion_id" in operation.parameters:
                    stored = check_whole(http, operations["createChatCompletion"], Case(STORED_CHAT), fields)
                    assert stored is not None
                    case.path = {"completion_id": stored["id"]}
                if "conversation_id" in operation.parameters:
                    stored = http.post("/v1/conversations", json={"items": ITEMS}).json()
                    items = http.get(f"/v1/conversations/{stored['id']}/items").json()["data"]
                    case.path = {"conversation_id": stored["id"], "item_id": items[0]["id"]}
                    asks = Case({**RESPONSE, "conversation": stored["id"]})
                    check_whole(http, operations["createResponse"], asks, fields)
                if name in ("retrieveFile", "downloadFile", "deleteFile", *BATCH_OPERATIONS):
                    made = check_whole(http, operations["createFile"], CASES["createFile"][0], fields)
                    assert made is not None
                    case.path = {"file_id": made["id"]}
                    if name == "createBatch":
                        case.body = {**(case.body or {}), "input_file_id": made["id"]}
                    elif name in BATCH_OPERATIONS:
                        case.path = {"batch_id": ended_batch(http, made["id"])}
                if case.whole:
                    check_whole(http, operation, case, fields)
                if case.streams and operation.description is not None and operation.description.events is not None:
                    check_streamed(http, operation, case, fields)
        client.well = client.ready = False
        for name in ("health", "ready"):
            check_whole(http, operations[name], Case(), fields)
    declared = {(model.__name__, name) for model in described_models() for name in model.model_fields}
    assert declared - fields.seen == set(), "declared, but never sent"


def described_models() -> list[type[ApiObject]]:
    """The models that are used themselves, rather than as bases of others."""
    found: list[type[ApiObject]] = []
    pending: list[type[ApiObject]] = [ApiObject]
    while pending:
        model = pending.pop()
        below = [each for each in model.__subclasses__() if each.__module__.startswith("tessera.")]
        pending += below
        is_tuned = model.__module__ == fine_tuning.__name__
        if (not below or model.__name__ == "AlternativeToken") and not is_tuned:
            found.append(model)
    return found


def test_a_field_too_many_or_too_few_is_noticed() -> None:
    event = {"type": "response.reasoning_text.delta", "sequence_number": 1, "output_index": 0, "item_id": "i"}
    ResponseEvent.model_validate({**event, "content_index": 0, "delta": "x"})
    for wrong in ({**event, "content_index": 0}, {**event, "content_index": 0, "delta": "x", "more": 1}):
        with pytest.raises(ValidationError):
            ResponseEvent.model_validate(wrong)
    with pytest.raises(ValidationError):
        ChatCompletionObject.model_validate({"id": "x"})
