"""/v1/responses through the official SDK: answers, streams, tools, reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineError
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import (
    CALL,
    OTHER_CALL,
    PATIENCE,
    ROOMY,
    WEATHER_PARAMETERS,
    cut_after,
    prompt_of,
    says,
    tool_settings,
)

TEXT = "hello wörld 🙂"
HELLO = play([*ids(TEXT), 0], stop_token_id=0, logprobs=True, num_cached_tokens=16)
ASK: Any = {"model": "tiny", "input": "hi"}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "parameters": WEATHER_PARAMETERS,
    "strict": False,
}


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


@contextmanager
def sdk(client: FakeClient, settings: AppSettings) -> Iterator[openai.OpenAI]:
    with (
        serve(client, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as api,
    ):
        yield api


def test_create(settings: AppSettings) -> None:
    client = FakeClient(always(HELLO))
    with sdk(client, settings) as api:
        answer = api.responses.create(
            **ASK,
            instructions="be kind",
            temperature=0.5,
            top_p=0.9,
            max_output_tokens=20,
            metadata={"a": "b"},
            extra_body={"top_k": 3, "seed": 7},
        )
    assert answer.output_text == TEXT
    assert (answer.object, answer.status) == ("response", "completed")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert answer.metadata == {"a": "b"}
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 20)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(client.submissions[0].prompt), len(HELLO))
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert prompt_of(client) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    params = client.submissions[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k, params.seed) == (0.5, 0.9, 20, 3, 7)


def test_input_items(tmp_path: Path) -> None:
    client = says("ok")
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    with sdk(client, tool_settings(tmp_path)) as api:
        assert api.responses.create(model="tiny", input=items).output_text == "ok"
    assert prompt_of(client) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>let me see"
        "<tool_call>weather Bonn</tool_call><tool_call>weather Ulm</tool_call><|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stream_events_and_their_order(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api:
        events = list(api.responses.create(**ASK, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        first = kinds.index("response.output_text.delta")
        assert kinds[:first] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        num_deltas = kinds.count("response.output_text.delta")
        assert num_deltas > 1
        assert kinds[first + num_deltas :] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        created, completed = events[0], events[-1]
        assert created.type == "response.created"
        assert completed.type == "response.completed"
        assert created.response.status == "in_progress"
        assert created.response.output == []
        assert completed.response.output_text == TEXT
        assert completed.response.id == created.response.id
        item_ids = {getattr(event, "item_id", None) for event in events} - {None}
        assert item_ids == {completed.response.output[0].id}


def test_stream_helper(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api, api.responses.stream(**ASK) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert snapshots[-1] == TEXT
        final = stream.get_final_response()
        assert final.output_text == TEXT
        assert final.usage is not None
        assert final.usage.output_tokens == len(HELLO)


def test_async_client(settings: AppSettings) -> None:
    async def ask(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as api:
            whole = await api.responses.create(**ASK)
            async with api.responses.stream(**ASK) as stream:
                return [whole.output_text, (await stream.get_final_response()).output_text]

    with serve(FakeClient(always(HELLO)), settings) as url:
        assert asyncio.run(ask(url)) == [TEXT, TEXT]


def test_logprobs(settings: AppSettings) -> None:
    with sdk(FakeClient(always(HELLO)), settings) as api:
        answer = api.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
        (part,) = answer.output[0].content
        assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == TEXT
        assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
        events = list(api.responses.create(**ASK, include=["message.output_text.logprobs"], stream=True))
        streamed = [t for event in events if event.type == "response.output_text.delta" for t in event.logprobs]
        assert [token.token for token in streamed] == [token.token for token in part.logprobs]
        assert api.responses.create(**ASK).output[0].content[0].logprobs == []


def test_function_calls(tmp_path: Path) -> None:
    client = says(f"One moment.\n{CALL}\n{OTHER_CALL}")
    with sdk(client, tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK, tools=[TOOL], tool_choice="auto")
    assert "<tool>weather: Tells the weather</tool>" in prompt_of(client)
    message, first, second = answer.output
    assert message.content[0].text.strip() == "One moment."
    assert [(call.type, call.name, call.status) for call in (first, second)] == [
        ("function_call", "weather", "completed")
    ] * 2
    assert [call.arguments.replace(" ", "") for call in (first, second)] == ['{"city":"Köln"}', '{"city":"Bonn"}']
    assert first.call_id != second.call_id
    assert answer.status == "completed"
    assert answer.tools[0].name == "weather"


def test_function_calls_in_a_stream(tmp_path: Path) -> None:
    with sdk(says(CALL + OTHER_CALL), tool_settings(tmp_path)) as api:
        with api.responses.stream(**ASK, tools=[TOOL]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len({event.output_index for event in deltas}) == 2
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        for index, event in enumerate(done):
            whole = "".join(delta.delta for delta in deltas if delta.output_index == index)
            assert whole == event.arguments == final.output[index].arguments
            assert event.name == "weather"
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.type, item.arguments, item.status) for item in added] == [
            ("function_call", "", "in_progress")
        ] * 2
        assert [item.call_id for item in added] == [item.call_id for item in final.output]


def test_one_call_where_parallel_calls_are_not_wanted(tmp_path: Path) -> None:
    with sdk(says(CALL + OTHER_CALL), tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK, tools=[TOOL], parallel_tool_calls=False)
        assert [item.type for item in answer.output] == ["function_call"]


def test_reasoning_items(tmp_path: Path) -> None:
    client = says("<think>\nhm, so\n</think>\n\nfine")
    with sdk(client, tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK)
        reasoning, message = answer.output
        assert reasoning.type == "reasoning"
        assert reasoning.content[0].text == "hm, so"
        assert message.content[0].text == "fine"
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        kinds = [event.type for event in api.responses.create(**ASK, stream=True)]
        order = [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
        ]
        assert list(dict.fromkeys(kinds[2 : kinds.index("response.output_text.delta")])) == order[:6]
        assert [kind for kind in kinds if kind in ("response.output_item.added", "response.output_item.done")] == [
            "response.output_item.added",
            "response.output_item.done",
        ] * 2
        api.responses.create(**ASK, previous_response_id=answer.id)
        assert "<|im_start|>assistant\n<think>hm, so</think>fine<|im_end|>" in prompt_of(client)


def test_an_answer_cut_by_the_limit_is_incomplete(tmp_path: Path) -> None:
    with sdk(cut_after("half"), tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK, max_output_tokens=16)
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"
        *_, last = api.responses.create(**ASK, stream=True)
        assert last.type == "response.incomplete"
        assert last.response.output_text == "half"


def test_a_cut_call_keeps_what_there_is_of_it(tmp_path: Path) -> None:
    with sdk(cut_after(CALL[: CALL.index("Köln") + 2]), tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK, tools=[TOOL])
        assert answer.status == "incomplete"
        assert (answer.output[-1].type, answer.output[-1].status) == ("function_call", "incomplete")


def test_an_empty_answer_is_a_message_without_text(tmp_path: Path) -> None:
    with sdk(FakeClient(always(play([0], stop_token_id=0))), tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK)
        assert answer.output_text == ""
        assert answer.output[0].type == "message"
        with api.responses.stream(**ASK) as stream:
            assert stream.get_final_response().output_text == ""


def test_a_failure_in_mid_stream(settings: AppSettings) -> None:
    outputs = [*play(ids("ab"), finish=None), EngineError("broken off")]
    with sdk(FakeClient(always(outputs)), settings) as api:
        *events, last = api.responses.create(**ASK, stream=True)
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert (last.response.error.code, last.response.error.message) == ("server_error", "broken off")
        assert last.sequence_number == len(events)
        assert last.response.output_text == "ab"
        with pytest.raises(openai.InternalServerError):
            api.responses.create(**ASK)


def test_truncation_drops_the_oldest_turns(tmp_path: Path) -> None:
    client = FakeClient(always(play(ids("ok"))))
    old: Any = [
        {"role": "user", "content": "first " * 12},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "second " * 8},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "third"},
    ]
    settings = settings_for(write_model_folder(tmp_path))
    with sdk(client, settings) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            api.responses.create(model="tiny", input=old, instructions="sys")
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == "input"
        answer = api.responses.create(model="tiny", input=old, instructions="sys", truncation="auto")
        assert answer.truncation == "auto"
        prompt = prompt_of(client)
        assert prompt.startswith("<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\n")
        assert "first" not in prompt
        assert prompt.endswith("third<|im_end|>\n<|im_start|>assistant\n")
        client.info = ROOMY
        api.responses.create(model="tiny", input=old, truncation="auto")
        assert "first" in prompt_of(client)
        too_long: Any = [{"role": "user", "content": "x y " * 2000}]
        with pytest.raises(openai.BadRequestError):
            api.responses.create(model="tiny", input=too_long, truncation="auto")


class City(pydantic.BaseModel):
    name: str
    rivers: list[str]


def test_structured_output(settings: AppSettings) -> None:
    client = says('{"name": "Ulm", "rivers": ["Donau"]}')
    with sdk(client, settings) as api:
        parsed = api.responses.parse(**ASK, text_format=City)
        assert parsed.output_parsed == City(name="Ulm", rivers=["Donau"])
        grammar = client.submissions[-1].params.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.param) == ("json_schema", "text.format")
        assert '"rivers"' in grammar.text
        echoed = parsed.text
        assert echoed is not None
        assert echoed.format.name == "City"
        with api.responses.stream(**ASK, text_format=City) as stream:
            assert stream.get_final_response().output_parsed == City(name="Ulm", rivers=["Donau"])
        api.responses.create(**ASK, text={"format": {"type": "json_object"}})
        assert client.submissions[-1].params.grammar.kind == "json_object"
        api.responses.create(**ASK, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        assert client.submissions[-1].params.grammar.kind == "choice"
        api.responses.create(**ASK, text={"format": {"type": "text"}})
        assert client.submissions[-1].params.grammar is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_a_call_that_is_demanded_is_enforced(tmp_path: Path, choice: Any) -> None:
    client = says(CALL)
    with sdk(client, tool_settings(tmp_path)) as api:
        answer = api.responses.create(**ASK, tools=[TOOL], tool_choice=choice)
    assert answer.tool_choice == choice or answer.tool_choice.model_dump() == choice
    assert [item.type for item in answer.output] == ["function_call"]
    grammar = client.submissions[0].params.grammar
    assert grammar is not None
    assert "weather" in grammar.text
