"""Tool calling over HTTP and through the official SDK: messages, streams, choices, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.servers.http_fixtures import (
    TEMPLATE,
    byte_level_tokenizer,
    call,
    events,
    ids,
    serve,
    settings_for,
    write_model_folder,
)

HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
MISTRAL = "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + TEMPLATE
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, PING]}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PONG = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def saying(text: str, *, finish: str = "stop") -> FakeClient:
    """A model that says a text, and ends it itself unless it is cut."""
    return playing(ids(text) if finish == "length" else [*ids(text), 0], finish)


def playing(token_ids: list[int], finish: str = "stop") -> FakeClient:
    outputs = play(token_ids, finish=finish, stop_token_id=0 if finish == "stop" else None)
    return FakeClient(always(outputs), info=replace(INFO, max_model_len=2048))


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path, template=HERMES))


def post(client: FakeClient, settings: AppSettings, **fields: Any) -> Any:
    response = call(client, settings, "POST", "/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def sdk(client: FakeClient, settings: AppSettings) -> Iterator[openai.OpenAI]:
    with (
        serve(client, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as api,
    ):
        yield api


def test_sdk_calls(settings: AppSettings) -> None:
    with sdk(saying(f"I look.\n{PARIS}\n{PONG}"), settings) as api:
        choice = api.chat.completions.create(**CHAT).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        first, second = choice.message.tool_calls or []
        assert first.id.startswith("call_")
        assert first.id != second.id
        assert (first.type, first.function.name, first.function.arguments) == (
            "function",
            "weather",
            '{"city": "Paris"}',
        )
        assert (second.function.name, second.function.arguments) == ("ping", "{}")


def test_tools_reach_the_template_as_they_were_given(settings: AppSettings) -> None:
    client = saying("ok")
    post(client, settings)
    prompt = ids(json.dumps([WEATHER, PING]))
    assert client.submissions[0].prompt[: len(prompt)] == prompt
    post(client, settings, tool_choice="none")
    assert client.submissions[1].prompt[: len(prompt)] != prompt, "tools that may not be called are not shown"


def test_without_tools_or_with_none_a_call_is_text(settings: AppSettings) -> None:
    without: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for fields in without:
        choice = post(saying(PARIS), settings, **fields)["choices"][0]
        assert choice["message"]["content"] == PARIS
        assert choice["finish_reason"] == "stop"


def test_no_call_no_fields(settings: AppSettings) -> None:
    choice = post(saying("Sunny. "), settings)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Sunny. ", "refusal": None, "annotations": []}
    assert choice["finish_reason"] == "stop"


def test_malformed_calls_are_content(settings: AppSettings) -> None:
    text = "<tool_call>{nothing}</tool_call>"
    choice = post(saying(text), settings)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_cut_call_is_not_completed(tmp_path: Path) -> None:
    template = "{% if tools %}<tool_call><function=f><parameter=p>{% endif %}" + TEMPLATE
    settings = settings_for(write_model_folder(tmp_path, template=template))
    text = "<tool_call><function=weather><parameter=city>Par"
    for finish, arguments in (("length", '{"city": "Par'), ("stop", '{"city": "Par"}')):
        made = post(saying(text, finish=finish), settings)["choices"][0]["message"]["tool_calls"][0]
        assert made["function"] == {"name": "weather", "arguments": arguments}


def test_an_automatic_choice_is_not_forced(settings: AppSettings) -> None:
    client = saying("ok")
    post(client, settings, tool_choice="auto")
    assert client.submissions[0].params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_not_parallel_end_after_the_first(settings: AppSettings, stream: bool) -> None:
    client = saying(PARIS + PONG)
    body = {**CHAT, "parallel_tool_calls": False, "stream": stream}
    response = call(client, settings, "POST", "/v1/chat/completions", json=body)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.content)]
        names = [c["function"].get("name") for delta in deltas for c in delta.get("tool_calls", [])]
        assert [name for name in names if name] == ["weather"]
    else:
        choice = response.json()["choices"][0]
        assert [made["function"]["name"] for made in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert response.json()["usage"]["completion_tokens"] < len(ids(PARIS + PONG))
    assert client.submissions[0].aborted.is_set(), "the engine does not go on"


def test_each_of_several_answers_has_its_own_calls(settings: AppSettings) -> None:
    choices = post(saying(PARIS), settings, n=3)["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_special_tokens_reach_the_parser_and_others_stay_hidden(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=MISTRAL)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[OTHER]", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = '[OTHER]On it.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}][OTHER]'
    client = playing([*tokenizer.encode(text).ids, 0])
    choice = post(client, settings_for(folder))["choices"][0]
    assert choice["message"]["content"] == "On it."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    plain = post(client, settings_for(folder), tools=None)["choices"][0]
    assert "[TOOL_CALLS]" not in plain["message"]["content"]


def test_models_whose_template_shows_no_tools_refuse_them(tmp_path: Path) -> None:
    for template in (TEMPLATE, "{{ tools }}" + TEMPLATE):
        settings = settings_for(write_model_folder(tmp_path, template=template))
        response = call(saying("ok"), settings, "POST", "/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
    settings = settings_for(tmp_path, tool_call_parser="hermes")
    assert post(saying(PARIS), settings)["choices"][0]["finish_reason"] == "tool_calls"


def test_tokenize_counts_tools(settings: AppSettings) -> None:
    def count(body: dict[str, Any]) -> int:
        return int(call(saying("ok"), settings, "POST", "/tokenize", json=body).json()["count"])

    assert count(CHAT) > count({**CHAT, "tools": None}) + len(ids(json.dumps([WEATHER, PING])))
