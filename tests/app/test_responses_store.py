"""Kept responses: going on from them, reading and deleting them, whose they are, and how many there are."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.schema.chat import ChatMessage
from tessera.app.server.serve import RESPONSE_FILE
from tests.support.http_fixtures import serve
from tests.support.server_fixture import running_server
from tests.support.surface_fixtures import CALL, PATIENCE, WEATHER_PARAMETERS, prompt_of, says, tool_settings

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


def test_the_items_of_a_request_can_be_listed(tmp_path: Path) -> None:
    """Each with an id, the newest first, in pages; what the answer says is not among them."""
    with serve(says("one"), tool_settings(tmp_path)) as url, sdk(url) as api:
        items: Any = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
        ]
        kept = api.responses.create(model="tiny", input=items, tools=[TOOL])
        found = list(api.responses.input_items.list(kept.id, order="asc", limit=2))
        assert [item.type for item in found] == [item.get("type", "message") for item in items]
        assert len({item.id for item in found}) == 6
        assert (found[0].content[0].text, found[2].content[0].type) == ("hi", "output_text")
        assert (found[1].content[0].text, found[3].name, found[4].output) == ("hm", "weather", "rain")
        assert [item.id for item in api.responses.input_items.list(kept.id)] == [item.id for item in found[::-1]]
        page = httpx.get(f"{url}/v1/responses/{kept.id}/input_items", params={"limit": 2, "after": found[4].id}).json()
        assert ([item["id"] for item in page["data"]], page["has_more"]) == ([found[3].id, found[2].id], True)
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", found[3].id, found[2].id)
        text = api.responses.create(**ASK)
        (item,) = api.responses.input_items.list(text.id)
        assert (item.role, item.content[0].text) == ("user", "hi")
        for param, value in (("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up"), ("after", "msg_0")):
            refused = httpx.get(f"{url}/v1/responses/{kept.id}/input_items", params={param: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        with pytest.raises(openai.NotFoundError):
            list(api.responses.input_items.list("resp_0"))


def test_an_answer_that_is_done_cannot_be_cancelled(tmp_path: Path) -> None:
    with serve(says("one"), tool_settings(tmp_path)) as url, sdk(url) as api:
        kept = api.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            api.responses.cancel(kept.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.cancel("resp_0")
        assert api.responses.retrieve(kept.id) == kept


def test_app_processes_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    one, two = (ResponseStore(max_count=3, max_bytes=10**6, path=path) for _ in range(2))
    one.store_response("t", stored("a"))
    two.store_response("t", stored("b"))
    assert two.get("t", "a") == stored("a")
    assert one.get("t", "b") == stored("b")
    assert one.get("other", "b") is None
    two.store_response("t", stored("c"))
    assert one.get("t", "a") is not None
    one.store_response("t", stored("d"))
    assert [name for name in "abcd" if two.get("t", name)] == ["a", "c", "d"], "b has been unused for the longest time"
    assert two.delete("t", "a")
    assert not one.delete("t", "a")


def test_a_file_that_takes_nothing_more_fails_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(max_count=3, max_bytes=10**6, path=str(path))
    store.store_response("t", stored("a"))
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE responses")
    other.close()
    store.store_response("t", stored("b"))
    assert "is not kept" in caplog.text


def stored(name: str, size: int = 10) -> StoredResponse:
    response = {"id": name, "background": False, "output": []}
    return StoredResponse(response, (ChatMessage(role="user", content="x" * size),))


def test_the_longest_unused_go_first() -> None:
    store = ResponseStore(max_count=2, max_bytes=10**6)
    for name in "ab":
        store.store_response("t", stored(name))
    assert store.get("t", "a") is not None
    store.store_response("t", stored("c"))
    assert [name for name in "abc" if store.get("t", name)] == ["a", "c"]


def test_bytes_are_bounded() -> None:
    limit = 100_000
    store = ResponseStore(max_count=1000, max_bytes=limit)
    for index in range(200):
        store.store_response("t", stored(str(index), size=1000))
    kept = [found for index in range(200) if (found := store.get("t", str(index)))]
    assert 0 < len(kept) < 200
    assert sum(len(part) for one in kept for part in one.encoded()) <= limit
    store.store_response("t", stored("huge", size=limit))
    assert store.get("t", "huge") is None
    assert store.get("t", "199") is not None, "what is too large to keep drives nothing out"
    for index in range(200):
        store.delete("t", str(index))
    store.store_response("t", stored("x", size=limit // 5))
    assert store.get("t", "x") is not None, "what was deleted no longer counts"


def open_files(pid: int) -> set[str]:
    return {Path(os.readlink(link)).name for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}


def test_any_app_process_goes_on_from_what_another_has_answered(tmp_path: Path) -> None:
    """Each request has a connection of its own, until both processes have read what is kept."""
    with running_server(None, tmp_path / "log", "--api-workers", "2", "--log-format", "json") as server:
        body = {"model": server.model, "input": "What is 2 + 3?", "max_output_tokens": 8, "temperature": 0}
        first = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE).json()
        assert first["store"] is True

        def both_have_read() -> bool:
            assert httpx.get(f"{server.url}/v1/responses/{first['id']}", timeout=PATIENCE).json() == first
            return all(
                RESPONSE_FILE in open_files(pid)
                for pid in (server.process.pid, *server.children("tessera.app.server.worker"))
            )

        server.until(
            lambda: bool(server.children("tessera.app.server.worker")) and both_have_read(),
            "both processes to take part",
        )
        later = {**body, "previous_response_id": first["id"]}
        for _ in range(4):
            answer = httpx.post(f"{server.url}/v1/responses", json=later, timeout=PATIENCE).json()
            assert answer["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        # What both have done is in one log, of which each line is an object, and in one count.
        server.until(lambda: server.log.count('"endpoint": "/v1/responses"') == 5, "the lines of 5 requests")
        log = [json.loads(line) for line in server.log.splitlines()]
        requests = [line for line in log if line.get("endpoint") == "/v1/responses"]
        assert [(line["status"], line["output_tokens"]) for line in requests] == [(200, 8)] * 5
        counted = 'http_requests_total{endpoint="/v1/responses",status="200"}'
        assert [server.metrics()[counted] for _ in range(4)] == [5] * 4
