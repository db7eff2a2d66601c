"""Kept responses: going on from them, reading and deleting them, whose they are, and how many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.protocol.chat import ChatMessage
from app.responses.store import ResponseStore, StoredResponse
from tests.http_fixtures import serve
from tests.surface_fixtures import CALL, PATIENCE, WEATHER_PARAMETERS, prompt_of, says, tool_settings

ASK: Any = {"model": "tiny", "input": "hi"}
TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER_PARAMETERS, "strict": None}


def sdk(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(tmp_path: Path, stream: bool) -> None:
    client = says("one")
    with serve(client, tool_settings(tmp_path)) as url, sdk(url) as api:
        if stream:
            with api.responses.stream(**ASK, instructions="only for this turn") as events:
                first = events.get_final_response()
        else:
            first = api.responses.create(**ASK, instructions="only for this turn")
        second = api.responses.create(model="tiny", input="more", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        api.responses.create(model="tiny", input="end", instructions="new", previous_response_id=second.id)
    turns = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    assert prompt_of(client, 1) == turns + "<|im_start|>assistant\n"
    assert prompt_of(client, 2) == (
        "<|im_start|>system\nnew<|im_end|>\n" + turns + "<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nend<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tool_loop(tmp_path: Path) -> None:
    client = says(CALL)
    with serve(client, tool_settings(tmp_path)) as url, sdk(url) as api:
        first = api.responses.create(**ASK, tools=[TOOL])
        result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
        api.responses.create(model="tiny", input=[result], tools=[TOOL], previous_response_id=first.id)
    assert "<tool_call>weather Köln</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n" in prompt_of(client)


def test_read_and_delete(tmp_path: Path) -> None:
    with serve(says("one"), tool_settings(tmp_path)) as url, sdk(url) as api:
        kept = api.responses.create(**ASK)
        assert api.responses.retrieve(kept.id) == kept
        assert httpx.delete(f"{url}/v1/responses/{kept.id}").json() == {
            "id": kept.id,
            "object": "response",
            "deleted": True,
        }
        for missing in (kept.id, "resp_0"):
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(missing)
            with pytest.raises(openai.NotFoundError):
                api.responses.delete(missing)
            with pytest.raises(openai.BadRequestError) as refused:
                api.responses.create(**ASK, previous_response_id=missing)
            assert refused.value.param == "previous_response_id"


def test_store_false_keeps_nothing(tmp_path: Path) -> None:
    with serve(says("one"), tool_settings(tmp_path)) as url, sdk(url) as api:
        for stream in (False, True):
            if stream:
                with api.responses.stream(**ASK, store=False) as events:
                    answer = events.get_final_response()
            else:
                answer = api.responses.create(**ASK, store=False)
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(answer.id)


def test_fault_tenant_isolation_keys_do_not_see_each_others_responses(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path, api_keys=("mine", "yours"))
    with serve(says("one"), settings) as url, sdk(url, "mine") as mine, sdk(url, "yours") as yours:
        kept = mine.responses.create(**ASK)
        with pytest.raises(openai.NotFoundError):
            yours.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            yours.responses.delete(kept.id)
        with pytest.raises(openai.BadRequestError):
            yours.responses.create(**ASK, previous_response_id=kept.id)
        assert mine.responses.retrieve(kept.id).output_text == "one"


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    with serve(says("one"), tool_settings(tmp_path, max_stored_responses=0)) as url, sdk(url) as api:
        answer = api.responses.create(**ASK, store=True)
        assert httpx.post(f"{url}/v1/responses", json=ASK).json()["store"] is False
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            api.responses.create(**ASK, previous_response_id=answer.id)


def stored(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": name}, (ChatMessage(role="user", content="x" * size),))


def test_the_longest_unused_go_first() -> None:
    store = ResponseStore(max_count=2, max_bytes=10**6)
    for name in "ab":
        store.put("t", stored(name))
    assert store.get("t", "a") is not None
    store.put("t", stored("c"))
    assert [name for name in "abc" if store.get("t", name)] == ["a", "c"]


def test_bytes_are_bounded() -> None:
    limit = 100_000
    store = ResponseStore(max_count=1000, max_bytes=limit)
    for index in range(200):
        store.put("t", stored(str(index), size=1000))
    kept = [found for index in range(200) if (found := store.get("t", str(index)))]
    assert 0 < len(kept) < 200
    assert sum(one.num_bytes() for one in kept) <= limit
    store.put("t", stored("huge", size=limit))
    assert store.get("t", "huge") is None
    assert store.get("t", "199") is not None, "what is too large to keep drives nothing out"
    for index in range(200):
        store.delete("t", str(index))
    store.put("t", stored("x", size=limit // 5))
    assert store.get("t", "x") is not None, "what was deleted no longer counts"
