"""Stored responses: going on from them, reading and deleting them, whose they are, and how many there are."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tessera.app.openai.responses import journal as journal_module
from tessera.app.openai.responses.journal import Appended, AskedEvents, JobOwner, Journal, JournalPart, NewEvents
from tessera.app.openai.responses.journal_reader import JournalReader, JournalWatch
from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.schema.chat import ChatMessage
from tessera.app.server.application import SCHEMAS
from tessera.app.store.store import Store
from tests.support.fakes.fake_client import FakeClient, always
from tests.support.servers.http_fixtures import serve, settings_for, write_model_folder
from tests.support.servers.server_fixture import running_server
from tests.support.servers.surface_fixtures import CALL, PATIENCE, WEATHER_PARAMETERS, prompt_of, says, tool_settings

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


def test_what_is_stored_and_sealed_survives_a_restart(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path, data_dir=str(tmp_path / "data"))
    client = says("<think>hm, so</think>one")
    with serve(client, settings) as url, sdk(url) as api:
        kept = api.responses.create(**ASK)
        conversation = api.conversations.create(items=[{"role": "user", "content": "before"}])
        sealed = api.responses.create(**ASK, store=False, include=["reasoning.encrypted_content"]).to_dict()["output"]
    with serve(client, settings) as url, sdk(url) as api:
        assert api.responses.retrieve(kept.id) == kept
        api.responses.create(**ASK, conversation=conversation.id)
        assert prompt_of(client).startswith("<|im_start|>user\nbefore<|im_end|>")
        del sealed[0]["content"]  # type: ignore[index, call-overload, attr-defined]
        api.responses.create(model="tiny", input=[*sealed, {"role": "user", "content": "so?"}])  # type: ignore[misc]
        assert "<think>hm, so</think>one" in prompt_of(client)


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    with serve(says("one"), tool_settings(tmp_path, max_stored_objects=0)) as url, sdk(url) as api:
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


def stored(name: str, size: int = 10) -> StoredResponse:
    response = {"id": name, "background": False, "status": "in_progress", "output": []}
    return StoredResponse(response, (ChatMessage(role="user", content="x" * size),))


@asynccontextmanager
async def opened(folder: Path, **limits: int) -> AsyncIterator[ResponseStore]:
    store = Store(folder, SCHEMAS)
    yield ResponseStore(store, settings_for(folder, **limits))
    await store.close()


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, max_stored_objects=2) as one, opened(tmp_path, max_stored_objects=2) as two:
            await one.store_response("t", stored("a"))
            await two.store_response("t", stored("b"))
            assert await two.find("t", "a", uses=True) == stored("a")
            assert await one.find("other", "a") is None
            await one.store_response("t", stored("c"))
            assert [name for name in "abc" if await two.find("t", name)] == ["a", "c"]
            assert await two.delete("t", "a")
            assert not await one.delete("t", "a")

    asyncio.run(scenario())


def test_bytes_are_bounded(tmp_path: Path) -> None:
    limit = 20_000

    async def scenario() -> None:
        async with opened(tmp_path, max_stored_bytes=limit) as responses:
            for index in range(40):
                await responses.store_response("t", stored(str(index), size=1000))
            kept = [found for index in range(40) if (found := await responses.find("t", str(index)))]
            assert 0 < len(kept) < 40
            assert sum(len(one.encoded()) for one in kept) <= limit
            await responses.store_response("t", stored("huge", size=limit))
            assert await responses.find("t", "huge") is None
            assert await responses.find("t", "39") is not None, "what is too large to store drives nothing out"

    asyncio.run(scenario())


def test_deleting_needs_the_tenant(tmp_path: Path) -> None:
    """Even where the id is known, and two tenants have it."""

    async def scenario() -> None:
        async with opened(tmp_path) as responses:
            for tenant in ("mine", "yours"):
                await responses.store_response(tenant, stored("a"))
            assert not await responses.delete("another", "a")
            assert await responses.delete("mine", "a")
            assert await responses.find("mine", "a") is None
            assert await responses.find("yours", "a") is not None

    asyncio.run(scenario())


def event(number: int) -> bytes:
    return b'event: x\ndata: {"sequence_number":%d}\n\n' % number


async def goes_on(journal: Journal, seq: int, first: int, events: bytes) -> bool:
    """Whether a job does after events were appended."""
    return seq in (await journal.append([NewEvents(seq, first, events)])).going


async def read_all(reader: JournalReader) -> list[Any]:
    data = b"".join([piece async for piece in reader.deltas()])
    return [json.loads(block.partition(b"data: ")[2]) for block in data.split(b"\n\n")[:-1]]


def test_what_a_dead_process_worked_on_has_failed(tmp_path: Path) -> None:
    """Within one process a lock is never in the way, so another owner counts as dead."""

    async def scenario() -> None:
        async with opened(tmp_path) as responses:
            dead, reader = Journal(responses, JobOwner(responses.store)), Journal(responses, JobOwner(responses.store))
            seq = await dead.begin("t", stored("a"))
            assert await goes_on(dead, seq, 0, event(0) + event(1))
            assert await goes_on(dead, seq, 2, event(2))
            (part,) = await dead.read([AskedEvents("t", "a", 0)])
            assert part is not None
            assert not await dead.settle("t", "a", part), "its own process works on it"
            found = await read_all(JournalReader(JournalWatch(reader), "t", "a", 0))
            assert [each["sequence_number"] for each in found] == [1, 2, 3]
            assert found[-1]["type"] == "response.failed"
            assert found[-1]["response"]["error"]["message"] == "The server ended while it worked on this response."
            failed = await responses.find("t", "a")
            assert failed is not None
            assert failed.response == found[-1]["response"]
            assert await read_all(JournalReader(JournalWatch(reader), "t", "a", 2)) == found[2:], "it is said once"

    asyncio.run(scenario())


def test_a_deleted_response_ends_its_job_and_its_readers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as responses:
            journal = Journal(responses, JobOwner(responses.store))
            seq = await journal.begin("t", stored("a"))
            assert await goes_on(journal, seq, 0, event(0))
            await responses.delete("t", "a")
            assert not await goes_on(journal, seq, 1, event(1))
            assert not await goes_on(journal, seq, 1, b"")
            await journal.end("t", seq, stored("a"), 1, event(1))
            assert await responses.find("t", "a") is None
            assert await read_all(JournalReader(JournalWatch(journal), "t", "a")) == []

    asyncio.run(scenario())


def test_fault_full_disk_events_of_running_jobs_count_with_their_responses(tmp_path: Path) -> None:
    """The longest unused go, as with responses that have ended."""

    async def scenario() -> None:
        async with opened(tmp_path, max_stored_bytes=20_000) as responses:
            journal = Journal(responses, JobOwner(responses.store))
            jobs = [await journal.begin("t", stored(name)) for name in "ab"]
            assert (await journal.append([NewEvents(seq, 0, b"x" * 9000) for seq in jobs])).going == {*jobs}
            assert await goes_on(journal, jobs[1], 1, b"x" * 9000)
            assert not await goes_on(journal, jobs[0], 1, b"")
            assert await responses.find("t", "a") is None

    asyncio.run(scenario())


def test_fault_stalls_all_responses_in_the_background_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_jobs = 30
    together: list[int] = []
    append = Journal.append

    async def noted(journal: Journal, jobs: Sequence[NewEvents]) -> Appended:
        together.append(len(jobs))
        return await append(journal, jobs)

    monkeypatch.setattr(Journal, "append", noted)
    settings = settings_for(write_model_folder(tmp_path / "model"), data_dir=str(tmp_path / "data"))
    body = {"model": "tiny", "input": "hi", "background": True}
    with serve(FakeClient(always([]), hang=True), settings) as url, httpx.Client(base_url=url) as http:
        begun = [http.post("/v1/responses", json=body).json()["id"] for _ in range(num_jobs)]
        end = time.monotonic() + PATIENCE
        while not together or together[-1] != num_jobs:
            assert time.monotonic() < end
            threading.Event().wait(0.01)
        for response_id in begun:
            assert http.post(f"/v1/responses/{response_id}/cancel").json()["status"] == "cancelled"


def test_fault_stalls_all_readers_of_responses_in_the_background_are_looked_for_together(tmp_path: Path) -> None:
    num_readers = 50
    looks: list[int] = []

    class Noted(Journal):
        async def read(self, asked: Sequence[AskedEvents]) -> list[JournalPart | None]:
            looks.append(len(asked))
            return await super().read(asked)

    async def scenario() -> None:
        async with opened(tmp_path) as responses:
            journal = Noted(responses, JobOwner(responses.store))
            seq = await journal.begin("t", stored("a"))
            watch = JournalWatch(journal)
            readers = [asyncio.ensure_future(read_all(JournalReader(watch, "t", "a"))) for _ in range(num_readers)]
            while num_readers not in looks:
                await asyncio.sleep(0.01)
            assert await goes_on(journal, seq, 0, event(0))
            await journal.end("t", seq, stored("a"), 1, event(1))
            for found in await asyncio.gather(*readers):
                assert [each["sequence_number"] for each in found] == [0, 1]
            await watch.close()

    asyncio.run(scenario())


def test_a_long_journal_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "READ_BYTES", 100)

    async def scenario() -> None:
        async with opened(tmp_path) as responses:
            journal = Journal(responses, JobOwner(responses.store))
            seq = await journal.begin("t", stored("a"))
            for number in range(30):
                assert await goes_on(journal, seq, number, event(number))
            await journal.end("t", seq, stored("a"), 30, event(30))
            (part,) = await journal.read([AskedEvents("t", "a", 0)])
            assert part is not None
            assert len(part.pieces) < 10
            found = await read_all(JournalReader(JournalWatch(journal), "t", "a"))
            assert [each["sequence_number"] for each in found] == list(range(31))

    asyncio.run(scenario())


def test_processes_and_restarts_share_what_is_stored(tmp_path: Path) -> None:
    """Each request has a connection of its own, to either process; then all processes are killed."""
    data = ("--data-dir", str(tmp_path / "data"))
    with running_server(None, tmp_path / "log", "--api-workers", "2", "--log-format", "json", *data) as server:
        url = f"{server.url}/v1/responses"
        server.until(lambda: server.children("tessera.app.server.worker"), "the second process")
        body = {"model": server.model, "input": "What is 2 + 3?", "max_output_tokens": 8, "temperature": 0}
        first = httpx.post(url, json=body, timeout=PATIENCE).json()
        assert first["store"] is True
        later = {**body, "previous_response_id": first["id"]}
        for _ in range(4):
            assert httpx.get(f"{url}/{first['id']}", timeout=PATIENCE).json() == first
            answer = httpx.post(url, json=later, timeout=PATIENCE).json()
            assert answer["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        # What both have done is in one log, of which each line is an object, and in one count.
        server.until(lambda: server.log.count('"endpoint": "/v1/responses"') == 5, "the lines of 5 requests")
        log = [json.loads(line) for line in server.log.splitlines()]
        requests = [line for line in log if line.get("endpoint") == "/v1/responses"]
        assert [(line["status"], line["output_tokens"]) for line in requests] == [(200, 8)] * 5
        counted = 'http_requests_total{endpoint="/v1/responses",status="200"}'
        assert [server.metrics()[counted] for _ in range(4)] == [5] * 4
        endless = {"model": server.model, "input": "hi", "background": True, "ignore_eos": True}
        stopped = httpx.post(url, json=endless, timeout=PATIENCE).json()
        assert httpx.post(f"{url}/{stopped['id']}/cancel", timeout=PATIENCE).json()["status"] == "cancelled"
        begun = httpx.post(url, json=endless, timeout=PATIENCE).json()
        for _ in range(4):
            assert httpx.get(f"{url}/{begun['id']}", timeout=PATIENCE).json()["status"] == "in_progress"
    with running_server(None, tmp_path / "later.log", *data) as server:
        url = f"{server.url}/v1/responses"
        assert httpx.get(f"{url}/{first['id']}").json() == first
        assert (
            httpx.post(url, json=later, timeout=PATIENCE).json()["output"][0]["content"]
            == answer["output"][0]["content"]
        )
        failed = httpx.get(f"{url}/{begun['id']}").json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        events = httpx.get(f"{url}/{begun['id']}", params={"stream": "true"}, timeout=PATIENCE).text
        found = [json.loads(block.partition("data: ")[2]) for block in events.split("\n\n")[:-1]]
        assert [each["sequence_number"] for each in found] == list(range(len(found)))
        assert found[-1]["type"] == "response.failed"
        assert "Traceback" not in server.log
