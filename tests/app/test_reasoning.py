"""Reasoning is told from the answer, however the text is cut, and models without think tags are left alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from tessera.app.settings import AppSettings
from tessera.app.text.reasoning import ReasoningSplitter, has_reasoning, reasoning_start
from tests.support.fake_client import FakeClient, always, play
from tests.support.http_fixtures import (
    TEMPLATE,
    byte_level_tokenizer,
    call,
    events,
    ids,
    settings_for,
    write_model_folder,
)

SEED = 20
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

# Like Qwen3's: the model opens the section itself, unless thinking is turned off.
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
# Like Qwen3-Thinking's: the prompt opens it.
OPENED = TEMPLATE + "<think>\n{# </think> #}"

CASES = [
    (False, "<think>\nhm\n</think>\n\nHello", "hm", "Hello"),
    (False, "\n<think>hm</think>Hello", "hm", "Hello"),
    (False, "<think>\n\n</think>\n\nHello", "", "Hello"),
    (False, "Hello <think>x</think>", "", "Hello <think>x</think>"),
    (False, "  Hello\n", "", "  Hello\n"),
    (False, "<thin air", "", "<thin air"),
    (False, "", "", ""),
    (False, "<think>a </th b\n\n c</think>  d", "a </th b\n\n c", "  d"),
    (False, "<think>and so on", "and so on", ""),
    (True, "hm\n</think>\n\nHello", "hm", "Hello"),
    (True, "<think>\nhm</think>Hello", "hm", "Hello"),
    (True, "hm</think>a</think>b", "hm", "a</think>b"),
    (True, "and so on </th", "and so on </th", ""),
    (True, "</think>Hello", "", "Hello"),
]


def split(opened: bool, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    results = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in results), "".join(answer for _, answer in results)


@pytest.mark.parametrize(("opened", "text", "reasoning", "answer"), CASES)
def test_splits_wherever_the_text_is_cut(opened: bool, text: str, reasoning: str, answer: str) -> None:
    assert split(opened, [text]) == (reasoning, answer)
    assert split(opened, list(text)) == (reasoning, answer)
    rng = Random(SEED)
    print("seed", SEED)
    for _ in range(50):
        ends = [0, *sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6))), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
        assert split(opened, pieces) == (reasoning, answer), pieces


def test_how_a_prompt_stands_to_reasoning() -> None:
    assert reasoning_start("<|im_start|>assistant\n<think>\n", None) == "open"
    assert reasoning_start("<|im_start|>assistant\n<think>\n\n</think>\n\n", None) == "none"
    assert reasoning_start("what does <think> do?<|im_start|>assistant\n", None) == "possible"
    assert reasoning_start("...", "<think>so far") == "open"
    assert reasoning_start("...", "<think>x</think> so far") == "none"
    assert reasoning_start("...", "so far") == "none"


def test_auto_looks_for_the_tags_in_the_template() -> None:
    assert has_reasoning("auto", [THINKING])
    assert not has_reasoning("auto", [TEMPLATE])
    assert has_reasoning("think", [TEMPLATE])
    assert not has_reasoning("none", [THINKING])


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path, template=THINKING))


def answer_of(settings: AppSettings, text: str, *, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    client = FakeClient(always(play([*ids(text), 0], finish=finish, stop_token_id=0)))
    response = call(client, settings, "POST", "/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_wire_16_reasoning_has_both_names_and_its_tokens_are_counted(settings: AppSettings) -> None:
    answer = answer_of(settings, "<think>\nhm\n</think>\n\nHello")
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert message["content"] == "Hello"
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(ids("\nhm\n</think>")) + 1, "from the whole opening tag to the whole closing one"
    assert answer["usage"]["completion_tokens"] > counted


def test_a_prompt_may_open_the_reasoning(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path, template=OPENED))
    message = answer_of(settings, "hm</think>\n\nHello")["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hello")
    cut = answer_of(settings, "hm and", finish="length")["choices"][0]
    assert (cut["message"]["reasoning"], cut["message"]["content"]) == ("hm and", None)
    assert cut["finish_reason"] == "length"


def test_thinking_can_be_turned_off(settings: AppSettings) -> None:
    client = FakeClient(always(play([*ids("Hello"), 0], stop_token_id=0)))
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    message = call(client, settings, "POST", "/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert client.submissions[0].prompt[-len(ids("</think>\n\n")) :] == ids("</think>\n\n")
    assert message["content"] == "Hello"
    assert "reasoning" not in message


@pytest.mark.parametrize(
    ("fields", "prefix", "may_wait"),
    [
        ({}, "", True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "", False),
        ({}, "<think>", False),
    ],
    ids=["up to the model", "off", "opened"],
)
def test_the_form_of_an_answer_holds_from_the_end_of_the_reasoning(
    tmp_path: Path, fields: dict[str, Any], prefix: str, may_wait: bool
) -> None:
    """The model may still think first: where the prompt leaves it open, its first token decides."""
    folder = write_model_folder(tmp_path, template=OPENED if prefix else THINKING)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    client = FakeClient(always(play([5, 0], stop_token_id=0)))
    body = {**CHAT, "response_format": {"type": "json_object"}, **fields}
    assert call(client, settings_for(folder), "POST", "/v1/chat/completions", json=body).status_code == 200
    grammar = client.submissions[0].params.grammar
    assert grammar is not None
    assert grammar.start_token_id == (end if prefix or may_wait else None)
    assert grammar.section_token_id == (begin if may_wait else None)


def test_logprobs_and_token_ids_cover_reasoning_and_answer(settings: AppSettings) -> None:
    text = "<think>hm</think>Hello"
    client = FakeClient(always(play([*ids(text), 0], stop_token_id=0, logprobs=True)))
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    whole = call(client, settings, "POST", "/v1/chat/completions", json=body).json()["choices"][0]
    assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == text
    assert whole["token_ids"] == [*ids(text), 0]
    streamed = call(client, settings, "POST", "/v1/chat/completions", json={**body, "stream": True})
    choices = [chunk["choices"][0] for chunk in events(streamed.content)]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == [*ids(text), 0]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == text


def test_models_without_think_tags_are_untouched(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    message = answer_of(settings, "<think>hm</think>Hello")["choices"][0]["message"]
    assert message["content"] == "<think>hm</think>Hello"
    assert set(message) == {"role", "content", "refusal", "annotations"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_wire_16_reasoning_is_accepted_back(settings: AppSettings, field: str) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", field: "hm"}, {"role": "user", "content": "so?"}]
    assert answer_of(settings, "Hello", messages=messages)["choices"][0]["message"]["content"] == "Hello"
