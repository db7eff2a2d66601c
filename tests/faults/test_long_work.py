"""Work of large requests that once held up the event loop or the engine's thread: where it is done, and how much."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import _IncludedRouter
from prometheus_client import generate_latest
from pydantic import ValidationError

from tessera.app.anthropic.schema import MessagesRequest
from tessera.app.generate import generation as generation_module
from tessera.app.generate import prompt
from tessera.app.generate.admission import CHOICES_AT_A_TIME
from tessera.app.generate.chat_grammar import chat_grammar
from tessera.app.generate.completion import Completion, num_values
from tessera.app.generate.generation import Choice, Generation, TextOptions, TokenEntry
from tessera.app.generate.prompt import MAX_INLINE_IDS, checked_token_ids
from tessera.app.http import json_reader
from tessera.app.http.body import (
    LARGE_BODY,
    MAX_INLINE_ITEMS,
    MAX_INLINE_VALUES,
    built,
    parse_json_object,
    run_in_turn,
)
from tessera.app.http.json_pieces import PiecesResponse, body_of, json_in_pieces, json_pieces
from tessera.app.ollama.messages import OllamaMessage, chat_messages
from tessera.app.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from tessera.app.openai.chat import routes as chat_routes
from tessera.app.openai.chat import store as chat_store
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.chat.store import CompletionStore
from tessera.app.openai.completions import routes as completion_routes
from tessera.app.openai.completions.events import CompletionEvents
from tessera.app.openai.embeddings import embedders
from tessera.app.openai.embeddings import routes as embedding_routes
from tessera.app.openai.rerank import scorers
from tessera.app.openai.responses import store as responses_store
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.openai.tokenize import routes as tokenize_routes
from tessera.app.openai.tokenize.schema import DetokenizeRequest
from tessera.app.ops import metrics_text
from tessera.app.schema import fields as schema_fields
from tessera.app.schema.chat import ChatMessage, ChatRequest
from tessera.app.schema.fields import ids_from
from tessera.app.schema.request import MAX_WHOLE_FLOATS, RequestModel, parse_request
from tessera.app.schema.tools import MAX_TOOLS, Tool
from tessera.app.server.http_server import SWITCH_INTERVAL, prepare_routes
from tessera.app.store.store import Store
from tessera.app.text.tokenizer import (
    MAX_BATCH_CHARS,
    MAX_IDS_AT_ONCE,
    MAX_INLINE_CHARS,
    MAX_INLINE_TEXTS,
    HuggingFaceTokenizer,
    are_small,
)
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import (
    AbortRequests,
    AddEmbedding,
    EmbeddingInfo,
    PromptScores,
    RequestOutput,
    TokenLogprobs,
    client_decoder,
    client_encoder,
)
from tessera.engine.contract.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, SamplingParams
from tessera.engine.core.scheduler import MAX_MATCHED_BLOCKS
from tessera.engine.ipc.client import RECEIVE_SECONDS, EngineClient
from tessera.engine.ipc.request_stream import Inbox
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.fakes.fake_runner import Harness
from tests.support.servers.http_fixtures import TOKENIZER, call, events, serve
from tests.support.servers.surface_fixtures import tool_settings

HELLO = {"role": "user", "content": "hello"}
LIMIT = 0.02  # seconds that nothing may take on the event loop


class FakeEmbeddings(FakeClient):
    def __init__(self) -> None:
        info = EmbeddingInfo(
            role="main",
            architecture="FakeForCausalLM",
            pooling="last",
            dimension=4,
            vocab_size=512,
            max_input_tokens=16,
        )
        super().__init__(always([]), info=msgspec.structs.replace(INFO, embeddings=(info,)))

    async def embed(self, inputs: list[list[int]], **options: Any) -> Any:
        return np.full((len(inputs), 4), 0.5, np.float32)


class Threads(list[str]):
    """The threads in which functions were called, by their pools' names."""

    def noting(self, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.append(threading.current_thread().name.partition("_")[0])
            return function(*args, **kwargs)

        return called


def test_fault_stalls_large_responses_are_built_in_a_thread() -> None:
    async def threads() -> list[bool]:
        here = threading.get_ident()
        return [await built(count, threading.get_ident) == here for count in (1, MAX_INLINE_VALUES + 1)]

    assert asyncio.run(threads()) == [True, False]


def test_fault_stalls_log_probabilities_are_what_makes_a_response_large() -> None:
    scores = TokenLogprobs(1, -0.5, 1, [1, 2, 3], [-0.5, -1.0, -2.0])
    completion = Completion(text="ab", token_ids=[1, 2], entries=[TokenEntry(scores, 0), TokenEntry(scores, 1)])
    generation = Generation([Choice(0, None, TextOptions())], [], 2)  # type: ignore[arg-type]
    assert num_values(generation, [completion]) == 3 + 2 * 4
    generation.choices[0].prompt_logprobs = [PromptScores.of([scores] * 5)] * 2
    assert num_values(generation, [completion, Completion()]) == 4 + 12 * 4


@pytest.mark.parametrize(
    ("path", "module", "name", "fields"),
    [
        ("/v1/completions", completion_routes, "text_completion", {"prompt": "hello", "logprobs": 5}),
        (
            "/v1/chat/completions",
            chat_routes,
            "chat_completion",
            {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 5},
        ),
    ],
)
def test_fault_stalls_each_api_builds_its_large_responses_in_that_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, module: Any, name: str, fields: dict[str, Any]
) -> None:
    threads = Threads()
    monkeypatch.setattr(module, name, threads.noting(getattr(module, name)))
    monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", 20)
    client = FakeClient(always(play([5] * 40, logprobs=True)))
    for count in (40, 1):
        client.script = always(play([5] * count, logprobs=True, finish="length"))
        answer = call(client, tool_settings(tmp_path / str(count)), "POST", path, json={"model": "tiny", **fields})
        assert answer.status_code == 200, answer.text
    assert threads == ["response", "MainThread"]


def test_fault_stalls_many_ids_are_checked_and_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = Threads()
    monkeypatch.setattr(tokenize_routes, "checked_token_ids", threads.noting(checked_token_ids))
    settings = tool_settings(tmp_path)
    for count in (MAX_INLINE_IDS + 1, 1):
        body = {"model": "tiny", "tokens": [5] * count}
        answer = call(FakeClient(always([])), settings, "POST", "/detokenize", json=body)
        assert answer.status_code == 200, answer.text
    assert threads == ["text", "MainThread"]


@pytest.mark.parametrize(
    ("path", "large", "small"),
    [
        *(
            (path, {"messages": [{"role": "user", "content": "a" * 5}] * 2500}, {"messages": [HELLO]})
            for path in ("/api/chat", "/v1/messages", "/v1/messages/count_tokens")
        ),
        ("/v1/responses", {"input": [HELLO] * 2500}, {"input": [HELLO]}),
    ],
)
def test_fault_stalls_long_conversations_become_chats_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, large: dict[str, Any], small: dict[str, Any]
) -> None:
    threads = Threads()
    monkeypatch.setattr("tessera.app.schema.chat.ChatRequest.check", threads.noting(ChatRequest.check))
    settings = tool_settings(tmp_path)
    for fields in (large, small):
        limit = {} if path == "/v1/responses" else {"max_tokens": 1}
        body = {"model": "tiny", "stream": False, **limit, **fields}
        call(FakeClient(always(play([5], finish="length"))), settings, "POST", path, json=body)
    assert threads == ["body", "MainThread"]


FUNCTION_TOOL = {"type": "function", "function": {"name": "a"}}
MANY_OBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"messages": [HELLO] * 300}),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 300}]},
    ),
    "tools": ("/v1/chat/completions", {"messages": [HELLO], "tools": [FUNCTION_TOOL] * MAX_TOOLS}),
    "custom tools": (
        "/v1/chat/completions",
        {"messages": [HELLO], "tools": [{"type": "custom", "custom": {"name": "a"}}] * 300},
    ),
    "functions": ("/v1/chat/completions", {"messages": [HELLO], "functions": [{"name": "a"}] * MAX_TOOLS}),
    "items": ("/v1/responses", {"input": [HELLO] * 300}),
    "tools of responses": (
        "/v1/responses",
        {"input": "hello", "tools": [{"type": "function", "name": "a"}] * MAX_TOOLS},
    ),
    "Anthropic's messages": ("/v1/messages", {"max_tokens": 1, "messages": [HELLO] * 300}),
    "Anthropic's tools": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [HELLO], "tools": [{"name": "a", "input_schema": {}}] * MAX_TOOLS},
    ),
    "Ollama's messages": ("/api/chat", {"stream": False, "messages": [HELLO] * 300}),
    "Ollama's calls": (
        "/api/chat",
        {"stream": False, "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 100}] * 2},
    ),
}


@pytest.mark.parametrize("name", MANY_OBJECTS)
def test_fault_stalls_small_bodies_of_many_objects_are_worked_on_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """64 KiB of messages or tools took 10 to 50 ms: no bytes make a body large, but what is made of them."""
    path, fields = MANY_OBJECTS[name]
    content = orjson.dumps({"model": "tiny", **fields})
    assert len(content) < LARGE_BODY
    threads = Threads()
    monkeypatch.setattr("tessera.app.generate.admission.parse_request", threads.noting(parse_request))
    monkeypatch.setattr("tessera.app.schema.chat.ChatRequest.check", threads.noting(ChatRequest.check))
    client = FakeClient(always(play([5], finish="length")), info=msgspec.structs.replace(INFO, max_model_len=2**17))
    headers = {"content-type": "application/json"}
    answer = call(client, tool_settings(tmp_path), "POST", path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert threads
    assert set(threads) == {"body"}


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": [' + b"12345," * 2**18 + b"1]}",
        b'{"input": [' + (b"[" + b"12345," * 2**10 + b"1],") * 2**8 + b"[]]}",
        b'{"a": {"b": [' + b'{"c": [], "d": "e"},' * (2**15 - 8) + b"1]}}",
        b"{" + b"".join(b'"%d": 1,' % key for key in range(2**17)) + b'"a": "b"}',
        b'{"prompt": "' + b'\\", []' * 2**18 + b'"}',
    ],
    ids=["ids", "lists of ids", "objects", "keys", "a string"],
)
def test_fault_stalls_large_json_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """A million ids took 80 ms of the interpreter's lock, as many keys 570, and a long string beside brackets 1,600."""
    sizes: list[int] = []
    parse = orjson.loads

    def note(piece: bytes) -> Any:
        sizes.append(len(piece))
        return parse(piece)

    monkeypatch.setattr(orjson, "loads", note)
    assert parse_json_object(text) == parse(text)
    assert max(sizes) < json_reader.PIECE + 1000


def test_fault_stalls_tools_are_validated_without_private_attributes() -> None:
    """Pydantic sets those in Python: 1,024 tools took 10 ms instead of 4."""
    assert not Tool.__private_attributes__
    given = {"type": "function", "function": {"name": "a", "extra": 1}, "given": 5, "other": [2]}
    assert Tool.model_validate(given).for_template() == given
    assert Tool.model_validate({"type": "custom", "custom": {"name": "a"}}).for_template()["type"] == "function"
    assert "given" not in Tool.model_json_schema()["properties"]
    assert "given" not in Tool.model_validate(given).model_dump()


def test_fault_stalls_the_grammar_of_many_tools_is_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of 1,024 took 60 ms."""
    threads = Threads()
    monkeypatch.setattr("tessera.app.generate.admission.chat_grammar", threads.noting(chat_grammar))
    client = FakeClient(always(play([5], finish="length")), info=msgspec.structs.replace(INFO, max_model_len=2**17))
    for count in (300, 1):
        tools = [{"type": "function", "function": {"name": f"a{number}"}} for number in range(count)]
        body = {"model": "tiny", "messages": [HELLO], "max_tokens": 1, "tools": tools, "tool_choice": "required"}
        answer = call(client, tool_settings(tmp_path), "POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert client.submissions[-1].params.grammar
    assert threads == ["body", "MainThread"]


def test_fault_stalls_tools_are_looked_through_once_for_all_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1,024 tools and 128 choices took 40 ms for the choices' readers, and as much for the response."""
    looked: list[int] = []
    custom_tools = ChatRequest.custom_tools.fget  # type: ignore[attr-defined]

    def note(request: ChatRequest) -> frozenset[str]:
        looked.append(1)
        found: frozenset[str] = custom_tools(request)
        return found

    monkeypatch.setattr(ChatRequest, "custom_tools", property(note))
    encoded = Threads()
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", encoded.noting(HuggingFaceTokenizer.encode))
    counts = []
    for num_choices, num_tools in ((1, 1), (16, 20)):
        looked.clear()
        encoded.clear()
        tools = [{"type": "function", "function": {"name": f"a{number}"}} for number in range(num_tools)]
        body = {"model": "tiny", "messages": [HELLO], "max_tokens": 1, "tools": tools, "tool_choice": "required"}
        client = FakeClient(always(play([5], finish="length")), info=msgspec.structs.replace(INFO, max_model_len=2048))
        settings = tool_settings(tmp_path)
        answer = call(client, settings, "POST", "/v1/chat/completions", json={**body, "n": num_choices})
        assert answer.status_code == 200, answer.text
        counts.append((len(looked), len(encoded)))
    assert counts[0] == counts[1], "nor is a marker of the calls encoded for each tool"


def test_fault_stalls_a_long_stored_conversation_becomes_a_chat_in_a_thread(tmp_path: Path) -> None:
    async def threads_of(num_items: int) -> bool:
        request = Request({"type": "http", "state": {"body_is_large": False}})
        return await run_in_turn(request, lambda _: threading.get_ident(), None, num_items=num_items) == here

    here = threading.get_ident()
    assert [asyncio.run(threads_of(count)) for count in (MAX_INLINE_ITEMS, MAX_INLINE_ITEMS + 1)] == [True, False]


def test_fault_stalls_results_find_their_calls_in_constant_time() -> None:
    """5,120 calls without a result, and 4,000 results of another tool."""
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 128}
    messages = [OllamaMessage.model_validate(calls)] * 40
    messages += [OllamaMessage.model_validate({"role": "tool", "tool_name": "g"})] * 4000
    begin = time.thread_time()
    chat = chat_messages(messages)
    assert time.thread_time() - begin < 1.0, "it was three seconds when each result looked at all calls"
    assert [one.tool_call_id for one in chat[40:43]] == ["call00000", "call00001", "call00002"]


def test_fault_stalls_many_short_texts_are_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = Threads()
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_all", threads.noting(HuggingFaceTokenizer.encode_all))
    settings = tool_settings(tmp_path)
    for count in (MAX_INLINE_TEXTS, MAX_INLINE_TEXTS + 1):
        body = {"model": "tiny", "prompt": ["a"] * count, "max_tokens": 1}
        answer = call(FakeClient(always(play([5], finish="length"))), settings, "POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert threads == ["MainThread", "text"]
    assert are_small([""] * MAX_INLINE_TEXTS)
    assert not are_small(["a" * MAX_INLINE_CHARS, "b"])


def test_fault_stalls_few_texts_wait_for_no_other_thread() -> None:
    """A batch of several texts is shared out among threads: on a busy machine the event loop waited 89 ms for them."""

    class Inner:
        def __init__(self) -> None:
            self.batches: list[int] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            self.batches.append(len(texts))
            return TOKENIZER.encode_batch_fast(texts, **options)

    inner = Inner()
    tokenizer = HuggingFaceTokenizer(cast(Any, inner), {})
    few = ["hello", " world", "", "é<|im_end|>"] * 2
    assert tokenizer.encode_all(few, add_special_tokens=True) == [
        tokenizer.encode(text, add_special_tokens=True) for text in few
    ]
    assert set(inner.batches) == {1}, "one text is encoded in the thread that asks"
    pairs = [("a", "b"), ("a", "c")]
    assert [ids for ids, _ in tokenizer.encode_pairs(pairs, None)] == [TOKENIZER.encode(*pair).ids for pair in pairs]
    assert tokenizer.encode_all([], add_special_tokens=True) == []
    assert set(inner.batches) == {1}
    tokenizer.encode_all(["a"] * (MAX_INLINE_TEXTS + 1), add_special_tokens=True)
    assert inner.batches[-1] == MAX_INLINE_TEXTS + 1
    half = "a" * (MAX_BATCH_CHARS // 2)
    long = ["first", half, half, half, 2 * half + "a", "last"]
    inner.batches.clear()
    found = tokenizer.encode_all(long, add_special_tokens=True)
    assert found == [tokenizer.encode(text, add_special_tokens=True) for text in long]
    assert inner.batches[:4] == [2, 2, 1, 1], "what one call returns has a bound, but for one long text"


def test_fault_stalls_a_million_ids_are_decoded_some_at_a_time() -> None:
    """The library keeps the interpreter's lock while it reads a list of ids, for 26 ms of a million."""
    sizes: list[int] = []

    class Inner:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def decode_batch(self, batch: list[list[int]], **options: Any) -> Any:
            sizes.append(max(map(len, batch)))
            return TOKENIZER.decode_batch(batch, **options)

    tokenizer = HuggingFaceTokenizer(cast(Any, Inner()), {})
    seed = 30
    ids = np.random.default_rng(seed).integers(0, TOKENIZER.get_vocab_size() + 5, 3 * MAX_IDS_AT_ONCE + 7).tolist()
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == TOKENIZER.decode(ids, skip_special_tokens=skip), seed
    assert tokenizer.decode(ids[:MAX_IDS_AT_ONCE], skip_special_tokens=False)
    assert sizes == [MAX_IDS_AT_ONCE]


def test_fault_stalls_what_is_cut_off_a_long_text_costs_nothing() -> None:
    """The library's way keeps the interpreter's lock, for 460 ms of a million characters that are cut to one token."""
    tokenizer = HuggingFaceTokenizer(TOKENIZER, {})
    text = "hello world " * 10_000

    def seconds(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            begin = time.thread_time()
            function()
            times.append(time.thread_time() - begin)
        return min(times)

    whole = seconds(lambda: tokenizer.encode(text, add_special_tokens=True))
    beginning = seconds(lambda: tokenizer.encode_beginning(text, 1, add_special_tokens=True))
    assert beginning < 3 * whole, "it was ten times as much"

    tracemalloc.start()
    try:
        assert tokenizer.beginning(text, 1) == text[: len(tokenizer.beginning("hello", 1))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(text), "there is an object for each of its tokens"


def test_fault_stalls_seeds_and_bad_words_of_many_sequences_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each call of the tokenizer, or for random bytes of the operating system, lets go of the interpreter's lock and
    waits to have it again."""
    drawn: list[int] = []

    def draw(size: int) -> bytes:
        drawn.append(size)
        return os.urandom(size)

    monkeypatch.setattr("secrets.token_bytes", draw)
    client = FakeClient(always(play([5], finish="length")))
    settings = msgspec.structs.replace(tool_settings(tmp_path), max_choices=64)
    threads = Threads()
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_all", threads.noting(HuggingFaceTokenizer.encode_all))
    body = {"model": "tiny", "prompt": [[5], [6]], "n": 32, "max_tokens": 1, "bad_words": ["a", "b", "c"]}
    answer = call(client, settings, "POST", "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(drawn) < 8, "names of the request and of its answer"
    assert len(threads) == 2, "the prompts' texts, of which there are none, and the words"
    seeds = [one.params.seed for one in client.submissions]
    assert len(set(seeds)) == 64
    assert max(seeds) > 2**60


def test_fault_stalls_many_bad_words_are_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = Threads()
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_all", threads.noting(HuggingFaceTokenizer.encode_all))
    most = MAX_INLINE_TEXTS // 2  # each is encoded at the beginning of a text and after a space
    for count in (most, most + 1):
        body = {"model": "tiny", "prompt": [5], "max_tokens": 1, "bad_words": ["hello"] * count}
        client = FakeClient(always(play([5], finish="length")))
        answer = call(client, tool_settings(tmp_path), "POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert client.submissions[0].params.bad_words
    assert threads == ["MainThread", "MainThread", "MainThread", "text"], "the prompts' texts, then the words"


def test_fault_stalls_a_million_ids_are_validated_without_pydantic() -> None:
    def validate(value: Any, outer_location: str | int | None = None, /) -> Any:
        raise AssertionError("pydantic holds the interpreter's lock for all of them")

    ids = [*range(1000), -(2**63), 2**63 - 1]
    assert cast(Any, ids_from(-(2**63)).func)(ids, validate) == ids
    assert DetokenizeRequest.model_validate({"tokens": [*ids, 2**63]}).tokens[-1] == 2**63
    for wrong in ([True], ["1"], [1.5], [None], [2**63 + 1], 5):
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate({"tokens": wrong})


def test_fault_stalls_a_million_ids_are_looked_at_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of them keeps the interpreter's lock: 22 ms in msgspec, 7 where they are packed."""
    sizes: list[int] = []

    def convert(values: list[Any], kind: Any) -> Any:
        sizes.append(len(values))
        return msgspec.convert(values, kind)

    class Packed(array):  # type: ignore[type-arg]
        def fromlist(self, values: list[int], /) -> None:
            sizes.append(len(values))
            super().fromlist(values)

    monkeypatch.setattr(schema_fields, "msgspec", SimpleNamespace(**{**vars(msgspec), "convert": convert}))
    monkeypatch.setattr(prompt, "array", Packed)
    ids = [5] * (2 * schema_fields.ENTRIES_AT_A_TIME + 1)
    assert DetokenizeRequest.model_validate({"tokens": ids}).tokens == ids
    assert checked_token_ids(ids, INFO, "tokens") == array("i", ids)
    assert sum(sizes) == 2 * len(ids)
    assert max(sizes) <= max(schema_fields.ENTRIES_AT_A_TIME, prompt.IDS_AT_A_TIME) < len(ids)
    for wrong in (-1, INFO.vocab_size):
        with pytest.raises(InvalidRequestError, match=f"token id {wrong}"):
            checked_token_ids([*ids, wrong], INFO, "tokens")
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate({"tokens": [*ids, "5"]})


def test_fault_stalls_a_large_body_that_is_refused_is_freed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its traceback had it, and the event loop freed that."""
    threads = Threads()
    monkeypatch.setattr("tessera.app.http.body.release", threads.noting(json_reader.release))
    large = [1.5] * (LARGE_BODY // 3)
    for body in ({"model": "tiny", "prompt": large}, large, {"model": "tiny", "prompt": [1.5]}):
        answer = call(FakeClient(always([])), tool_settings(tmp_path), "POST", "/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
    assert threads == ["body", "body"]

    class Entry:
        def __del__(self) -> None:
            left.append(len(entries))

    left: list[int] = []
    monkeypatch.setattr(json_reader, "ENTRIES_RELEASED", 2)
    entries = [Entry() for _ in range(5)]
    inner: dict[str, Any] = {"b": [[], [1], {"c": {}}]}
    json_reader.release({"a": entries, "d": inner, "e": None})
    assert len(left) == 5
    assert max(map(left.count, left)) <= 2, "so many are freed at once"
    assert not entries
    assert not inner


WRONG_ENTRIES: dict[str, tuple[type[RequestModel], dict[str, Any], list[str]]] = {
    "chat": (ChatCompletionRequest, {"messages": [HELLO]}, ["messages", "tools", "functions", "documents"]),
    "ids": (
        ChatCompletionRequest,
        {"messages": [HELLO]},
        ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "bad_words", "stop"],
    ),
    "responses": (ResponsesRequest, {"input": "hello"}, ["input", "tools", "include"]),
    "messages": (
        MessagesRequest,
        {"model": "tiny", "messages": [HELLO], "max_tokens": 1},
        ["messages", "tools", "stop_sequences"],
    ),
    "ollama": (OllamaChatRequest, {}, ["messages", "tools"]),
    "context": (OllamaGenerateRequest, {"prompt": "hello"}, ["context"]),
    "detokenize": (DetokenizeRequest, {}, ["tokens"]),
}


@pytest.mark.parametrize("entry", [[], {}, "x", 1.5])
@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_fault_stalls_no_error_is_made_of_each_wrong_entry(name: str, entry: Any) -> None:
    """Pydantic holds the interpreter's lock for 5 us an error: 100 ms for a body of 64 KB."""
    model, body, fields = WRONG_ENTRIES[name]
    for field in fields:
        entries = [5 if field in ("documents", "bad_words", "stop", "stop_sequences") else entry]
        with pytest.raises(ValidationError) as refused:
            model.model_validate({**body, field: entries * 1000})
        assert refused.value.error_count() <= MAX_WHOLE_FLOATS + 1, field
        with pytest.raises(InvalidRequestError, match=rf"^{field}"):
            parse_request(model, {**body, field: entries * 1000})


@pytest.mark.parametrize("field", ["structured_outputs", "metadata"])
def test_fault_stalls_no_error_is_made_of_each_wrong_name(field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({"messages": [HELLO], field: {f"name{n}": 1 for n in range(1000)}})
    assert refused.value.error_count() < 20


def test_fault_stalls_many_ids_may_be_written_as_floats_in_part() -> None:
    ids: list[float] = [*range(1000), *(float(n) for n in range(MAX_WHOLE_FLOATS))]
    found = parse_request(ChatCompletionRequest, {"messages": [HELLO], "allowed_token_ids": ids})
    assert found.allowed_token_ids == tuple(map(int, ids))
    assert all(type(each) is int for each in found.allowed_token_ids)
    with pytest.raises(InvalidRequestError, match=r"^allowed_token_ids\[1000\] must be an integer"):
        parse_request(ChatCompletionRequest, {"messages": [HELLO], "allowed_token_ids": [*range(1000), *[0.0] * 65]})


def test_fault_stalls_many_choices_are_made_in_several_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("tessera.app.generate.admission.asyncio", SimpleNamespace(sleep=pause))
    settings = msgspec.structs.replace(tool_settings(tmp_path), max_choices=1024)
    for prompts, times in (([[5]], 0), ([[5]] * 4, 3)):
        pauses.clear()
        client = FakeClient(always(play([5], finish="length")))
        body = {"model": "tiny", "prompt": prompts, "n": CHOICES_AT_A_TIME - 32, "max_tokens": 1}
        answer = call(client, settings, "POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert pauses == [0] * times


def test_fault_stalls_many_choices_are_waited_for_in_several_turns_of_the_loop() -> None:
    num_choices = 3 * generation_module.CHOICES_AT_A_TIME
    begun: list[int] = []  # in each turn

    class Letters:
        def decode_tokens(self, token_ids: list[int]) -> str:
            return "a" * len(token_ids)

        def flush(self) -> str:
            return ""

    class Stream:
        async def __aiter__(self) -> AsyncIterator[RequestOutput]:
            begun[-1] += 1
            yield RequestOutput("a", [5], finish_reason="length")

    async def count_turns() -> None:
        while True:
            begun.append(0)
            await asyncio.sleep(0)

    async def scenario() -> int:
        choices = [Choice(index, Letters(), TextOptions()) for index in range(num_choices)]
        generation = Generation(choices, [cast(Any, Stream()) for _ in choices], 1)
        counter = asyncio.create_task(count_turns())
        deltas = [delta async for delta in generation.deltas()]
        counter.cancel()
        await generation.abort()
        return len(deltas)

    assert asyncio.run(scenario()) == sum(begun) == num_choices
    assert max(begun) <= generation_module.CHOICES_AT_A_TIME


def test_fault_stalls_metrics_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every endpoint and status that there has been, which took 10 ms of the event loop."""
    threads = Threads()
    monkeypatch.setattr(metrics_text, "generate_latest", threads.noting(generate_latest))
    answer = call(FakeClient(always([])), tool_settings(tmp_path), "GET", "/metrics")
    assert answer.status_code == 200, answer.text
    assert threads
    assert set(threads) == {"asyncio"}


def test_fault_stalls_the_widest_parameters_are_verified_in_little_time() -> None:
    """65,536 allowed ids, 128 bad words of 256 tokens, 1,024 biases: the app and the engine each verify them."""
    params = SamplingParams(
        max_tokens=1,
        allowed_token_ids=tuple(range(MAX_ALLOWED_TOKEN_IDS)),
        bad_words=tuple(tuple(range(256)) for _ in range(MAX_BAD_WORDS)),
        logit_bias=dict.fromkeys(range(1024), 1.0),
    )
    begin = time.thread_time()
    for _ in range(4):
        params.verify(MAX_ALLOWED_TOKEN_IDS)
    assert time.thread_time() - begin < 4 * LIMIT / 2


def test_fault_stalls_routes_are_made_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI makes those of a router when a request first comes to it."""
    from fastapi import APIRouter

    router = APIRouter()
    router.get("/here")(lambda: None)
    app = FastAPI()
    app.include_router(router)
    prepare_routes(app)
    monkeypatch.setattr(_IncludedRouter, "_build_effective_context", None)
    (route,) = [route for route in app.routes if isinstance(route, _IncludedRouter)]
    assert len(route.effective_candidates()) == 1


def test_fault_stalls_a_request_of_many_sequences_is_aborted_by_one_message(tmp_path: Path) -> None:
    async def sent() -> list[Any]:
        client = EngineClient(tmp_path)
        await client.start()
        messages: list[Any] = []
        client._send = messages.append  # type: ignore[assignment, method-assign]
        names = [f"r{number}" for number in range(3)]
        client._inboxes.update({name: Inbox() for name in names})
        for name in [*names, "unknown"]:
            client.abandon(name)
        await asyncio.sleep(0)
        await client.close()
        return messages

    assert [one.request_ids for one in asyncio.run(sent()) if isinstance(one, AbortRequests)] == [["r0", "r1", "r2"]]


def test_fault_stalls_a_flood_of_outputs_leaves_turns_to_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Messages that take a millisecond each, and never end."""

    async def num_read_in_a_turn() -> int:
        client = EngineClient(tmp_path)
        await client.start()
        num_read = 0

        class Flood:
            def popleft(self) -> bytes:
                nonlocal num_read
                num_read += 1
                end = time.monotonic() + 0.001
                while time.monotonic() < end:
                    pass
                return b""

        monkeypatch.setattr(client._connection, "received", Flood())
        monkeypatch.setattr(client, "_dispatch", lambda message: None)
        monkeypatch.setattr(client, "_decoder", type("Decoder", (), {"decode": staticmethod(bytes)}))
        client._receive()
        monkeypatch.undo()
        await client.close()
        return num_read

    assert 1 <= asyncio.run(num_read_in_a_turn()) <= RECEIVE_SECONDS / 0.001 + 1


def test_fault_stalls_only_so_many_cached_blocks_are_matched_in_a_step() -> None:
    """Many sequences that share a long prefix start over several steps."""
    engine = Harness(num_blocks=4096, block_size=2, max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=2048)
    prompt = [number % 90 + 1 for number in range(1600)]
    engine.add("first", prompt, 1)
    engine.run()
    for number in range(8):
        engine.add(f"r{number}", prompt, 5, ignore_eos=True)
    engine.step()
    per_sequence = (len(prompt) - 1) // 2
    assert 1 <= len(engine.core.scheduler.running) <= -(-MAX_MATCHED_BLOCKS // per_sequence) < 8
    engine.run()
    assert len(engine.finish_reasons) == 9


def test_fault_stalls_large_json_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 embeddings of 4,096 numbers took 430 ms of the event loop; in one piece a thread holds the lock as long."""
    monkeypatch.setattr("tessera.app.http.json_pieces.MAX_PIECE_VALUES", 8)
    row = np.arange(4, dtype=np.float32)
    values: list[Any] = [
        {"data": [{"index": index, "embedding": row} for index in range(5)], "model": "tiny", "usage": {"total": 1}},
        {"choices": [{"logprobs": {"content": [{"top": [{"token": "a\n", "logprob": -0.5}] * 3}] * 9}}] * 3, "x": None},
        {"a": 1, "b": [], "c": {}, "d": list(range(40)), "e": "x" * 1000, "f": [[1] * 9, [], [2] * 3], "g": [[]] * 20},
        {"small": [1, 2, None, True]},
        {},
    ]
    for value in values:
        pieces = json_pieces(value)
        assert body_of(PiecesResponse(pieces)) == orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        assert max(len(piece) for piece in pieces if b"xxx" not in piece) < 250
    assert [len(json_pieces(value)) > 1 for value in values] == [True, True, True, False, False]


def test_fault_stalls_large_embeddings_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = Threads()
    monkeypatch.setattr(embedding_routes, "_encoded", threads.noting(embedding_routes._encoded))
    monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", 2)
    for count in (1, 40):
        body = {"model": "tiny", "input": [[5]] * count}
        answer = call(FakeEmbeddings(), tool_settings(tmp_path / str(count)), "POST", "/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        assert [one["embedding"] for one in answer.json()["data"]] == [[0.5] * 4] * count
        assert answer.headers["content-length"] == str(len(answer.content))
    assert threads == ["MainThread", "response"]


def test_fault_stalls_many_ids_to_embed_are_checked_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A million took 60 ms of the event loop."""
    threads = Threads()
    monkeypatch.setattr(embedders, "check_total", threads.noting(embedders.check_total))
    for count in (1, MAX_INLINE_IDS + 1):
        body = {"model": "tiny", "input": [[5]] * count}
        call(FakeEmbeddings(), tool_settings(tmp_path / str(count)), "POST", "/v1/embeddings", json=body)
    assert threads == ["MainThread", "text"]


def test_fault_stalls_many_ids_to_embed_are_packed_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a million the event loop took 30 ms."""
    sent: list[Any] = []

    class Client(FakeEmbeddings):
        async def embed(self, inputs: Any, **options: Any) -> Any:
            sent.extend(inputs)
            return await super().embed(inputs, **options)

    threads = Threads()
    monkeypatch.setattr(embedders, "packed", threads.noting(embedders.packed))
    for count in (1, MAX_INLINE_IDS + 1):
        body = {"model": "tiny", "input": [[5]] * count}
        call(Client(), tool_settings(tmp_path / str(count)), "POST", "/v1/embeddings", json=body)
    assert threads == ["MainThread", "text"]
    assert set(map(type, sent)) == {array}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 9}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 9}),
    ],
)
def test_fault_stalls_scores_of_many_texts_are_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """2,048 documents took 10 ms."""
    threads = Threads()
    monkeypatch.setattr("tessera.app.http.body.json_pieces", threads.noting(json_pieces))
    for most in (100, 20):
        monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", most)
        answer = call(FakeEmbeddings(), tool_settings(tmp_path), "POST", path, json={"model": "tiny", **fields})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["results" if path == "/v1/rerank" else "data"]) == 9
    assert threads == ["response"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ],
)
def test_fault_stalls_cosines_of_many_texts_are_computed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """For 2,048 documents and 4,096 dimensions the event loop took 100 ms."""
    threads = Threads()
    monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", 1)
    monkeypatch.setattr(scorers, "cosines", threads.noting(scorers.cosines))
    for count in (1, 9):
        body = {name: value * count if isinstance(value, list) else value for name, value in fields.items()}
        answer = call(
            FakeEmbeddings(), tool_settings(tmp_path / str(count)), "POST", path, json={"model": "tiny", **body}
        )
        assert answer.status_code == 200, answer.text
    assert threads == ["MainThread", "response"]


def test_fault_stalls_many_embeddings_are_shortened_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = Threads()
    monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", 1)
    monkeypatch.setattr(embedders, "_shortened", threads.noting(embedders._shortened))
    for count in (1, 9):
        body = {"model": "tiny", "input": [[5]] * count, "dimensions": 1}
        client = FakeEmbeddings()
        assert client.info is not None
        shorter = msgspec.structs.replace(client.info.embeddings[0], matryoshka_dimensions=(1, 4))
        client.info = msgspec.structs.replace(client.info, embeddings=(shorter,))
        answer = call(client, tool_settings(tmp_path / str(count)), "POST", "/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        assert [one["embedding"] for one in answer.json()["data"]] == [[1.0]] * count
    assert threads == ["MainThread", "response"]


def test_fault_stalls_ids_to_embed_are_sent_as_bytes() -> None:
    """As a list of lists a million took the engine's thread 67 ms to decode."""
    sent = AddEmbedding("a", [array("i", [70_000] * 1000)] * 3)
    data = client_encoder().encode(sent)
    assert len(data) < 4 * 3000 + 100
    assert client_decoder().decode(data) == sent


def test_fault_stalls_a_long_prompt_is_echoed_in_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = Threads()
    monkeypatch.setattr(completion_routes, "_echo", threads.noting(completion_routes._echo))
    monkeypatch.setattr(completion_routes, "MAX_INLINE_IDS", 8)
    for count in (1, 9):
        body = {"model": "tiny", "prompt": [5] * count, "echo": True, "max_tokens": 1}
        client = FakeClient(always(play([5], logprobs=True, finish="length")))
        answer = call(client, tool_settings(tmp_path / str(count)), "POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert threads == ["MainThread", "text"]


def test_fault_stalls_log_probabilities_are_not_counted_one_by_one() -> None:
    class Rows(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a response may have millions of them")

    entry = TokenEntry(TokenLogprobs(1, -0.5, 1, [1, 2, 3], [-0.5, -1.0, -2.0]), 0)
    generation = Generation([Choice(0, None, TextOptions())], [], 2)  # type: ignore[arg-type]
    assert num_values(generation, [Completion(text="a", entries=Rows([entry] * 5))]) == 1 + 5 * 4


def test_fault_stalls_many_log_probabilities_of_a_stream_are_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of an echoed prompt, and of what has come while the client did not read."""
    threads = Threads()
    scored = PromptScores.of([TokenLogprobs(5, -0.5, 1, [5, 1], [-0.5, -1.0])] * 40)
    monkeypatch.setattr(CompletionEvents, "delta", threads.noting(CompletionEvents.delta))
    monkeypatch.setattr("tessera.app.http.body.MAX_INLINE_VALUES", 100)
    monkeypatch.setattr("tessera.app.http.streaming.MAX_INLINE_VALUES", 100)
    monkeypatch.setattr("tessera.app.openai.envelope.MANY_ENTRIES", 8)
    monkeypatch.setattr("tessera.app.http.streaming.MAX_SENT", 50)
    body = {"model": "tiny", "prompt": [5] * 41, "logprobs": 1, "max_tokens": 50, "echo": True}
    outputs = play([5] * 48, per_output=48, logprobs=True, finish=None) + play([5] * 2, logprobs=True, finish="length")
    outputs[0].prompt_logprobs = [scored]
    small = play([5] * 2, logprobs=True, finish="length")
    small[0].prompt_logprobs = [scored]
    found: list[Any] = []
    for script, stream in ((outputs, True), (outputs, False), (small, True)):
        client = FakeClient(always(script))
        answer = call(
            client,
            tool_settings(tmp_path / str(len(found))),
            "POST",
            "/v1/completions",
            json={**body, "stream": stream},
        )
        assert answer.status_code == 200, answer.text
        found.append(answer)
    choices = [event["choices"][0]["logprobs"] for event in events(found[0].content)]
    streamed = {name: [each for one in choices if one for each in one[name]] for name in ("tokens", "token_logprobs")}
    whole = found[1].json()["choices"][0]["logprobs"]
    assert streamed == {name: whole[name] for name in streamed}
    assert threads == ["response", "MainThread", "MainThread", "response", "MainThread"]


def test_fault_stalls_large_stored_objects_are_written_and_read_in_the_stores_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = Threads()
    monkeypatch.setattr(chat_store, "json_in_pieces", threads.noting(json_in_pieces))
    monkeypatch.setattr(chat_store, "_completion_of", threads.noting(chat_store._completion_of))
    monkeypatch.setattr(responses_store, "json_in_pieces", threads.noting(json_in_pieces))
    monkeypatch.setattr(StoredResponse, "decoded", threads.noting(StoredResponse.decoded))

    async def scenario() -> None:
        store = Store(None, (responses_store.RESPONSES,))
        settings = tool_settings(tmp_path)
        store.start()
        completions, responses = CompletionStore(store, settings), ResponseStore(store, settings)
        completion = {"id": "c1", "model": "tiny", "metadata": {}}
        await completions.store_completion("t", completion, [HELLO])
        assert await completions.find("t", "c1") == completion
        assert await completions.messages("t", "c1") == [HELLO]
        message = ChatMessage.model_validate(HELLO)
        stored = StoredResponse({"id": "r1", "output": [{"id": "i1"}]}, (message, message), ({"id": "m1"},))
        await responses.store_response("t", stored)
        assert await responses.find("t", "r1", uses=True) == stored
        assert await responses.find_response("t", "r1") == stored.response
        assert await responses.find_item("t", "i1") == {"id": "i1"}
        assert await responses.find("t", "r2") is None
        assert await responses.find_item("t", "i2") is None
        await store.close()

    asyncio.run(scenario())
    assert len(threads) == 4
    assert "MainThread" not in threads


def test_fault_stalls_threads_have_the_interpreters_lock_soon(tmp_path: Path) -> None:
    """A chat is rendered in one, beside a busy event loop: each of its waits for the lock took 5 ms."""
    before = sys.getswitchinterval()
    try:
        with serve(FakeClient(always([])), tool_settings(tmp_path)) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    finally:
        sys.setswitchinterval(before)
