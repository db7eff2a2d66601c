"""Reasoning is told from the content, however the text is cut, and models without think tags are left alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from tokenizers import AddedToken

from tessera.app.model_settings import ReasoningParserName
from tessera.app.reasoning.deepseek_r1 import IMPLIED
from tessera.app.reasoning.families import NAMED, choose_reasoning
from tessera.app.reasoning.format import THINK, ReasoningFormat
from tessera.app.reasoning.glm import WITH_ANSWER_TAGS
from tessera.app.reasoning.granite import GRANITE_32, GRANITE_33
from tessera.app.reasoning.harmony import HARMONY
from tessera.app.reasoning.magistral import BRACKETS
from tessera.app.reasoning.minimax import M3
from tessera.app.reasoning.splitter import ReasoningSplitter
from tessera.app.settings import AppSettings
from tessera.engine.contract.sampling_params import ReasoningBudget
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.servers.http_fixtures import (
    TEMPLATE,
    TOKENIZER,
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


def split(opened: bool, pieces: list[str], form: ReasoningFormat = THINK) -> tuple[str, str]:
    splitter = ReasoningSplitter(form, opened=opened)
    results = [*(splitter.split_text(piece) for piece in pieces), splitter.flush()]
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


GRANITE = GRANITE_32.begin, GRANITE_32.end

FORMAT_CASES = [
    (GRANITE_32, False, f"{GRANITE[0]}\n\nhm so\n\n{GRANITE[1]}\nHello", "hm so", "Hello"),
    (GRANITE_32, False, "Here's my thought process: hm Here's my response: Hello", " hm", " Hello"),
    (GRANITE_32, False, "Here is my response: Hello", "", "Here is my response: Hello"),
    (GRANITE_32, False, "Here is my thought", "", "Here is my thought"),
    (GRANITE_33, False, "<think>hm</think>\n<response>\nHello </b>\n</response>\n", "hm", "Hello </b>"),
    (GRANITE_33, False, "<think>hm</think>\n\nHello</response>", "hm", "Hello</response>"),
    (GRANITE_33, False, "<think>hm</think>\n <resp", "hm", " <resp"),
    (GRANITE_33, False, "<think>hm</think><response>a</response>\n b</response>", "hm", "a</response>\n b</response>"),
    (GRANITE_33, False, "<think>hm</think><response>a \n</resp", "hm", "a \n</resp"),
    (BRACKETS, False, "[THINK]hm [1][/THINK]Hello", "hm [1]", "Hello"),
    (M3, False, "<mm:think>hm</think></mm:think>Hello", "hm</think>", "Hello"),
    (IMPLIED, True, "hm\n</think>\n\nHello", "hm", "Hello"),
]


@pytest.mark.parametrize(("form", "opened", "text", "reasoning", "answer"), FORMAT_CASES)
def test_every_format_splits_wherever_the_text_is_cut(
    form: ReasoningFormat, opened: bool, text: str, reasoning: str, answer: str
) -> None:
    rng = Random(SEED)
    print("seed", SEED)
    for attempt in range(50):
        ends = [0, *sorted(rng.choices(range(len(text) + 1), k=attempt)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
        assert split(opened, pieces, form) == (reasoning, answer), pieces
    assert split(opened, list(text), form) == (reasoning, answer)


def test_how_a_prompt_stands_to_reasoning() -> None:
    assert THINK.start_of("<|im_start|>assistant\n<think>\n", None) == "open"
    assert THINK.start_of("<|im_start|>assistant\n<think>\n\n</think>\n\n", None) == "none"
    assert THINK.start_of("what does <think> do?<|im_start|>assistant\n", None) == "possible"
    assert THINK.start_of("...", "<think>so far") == "open"
    assert THINK.start_of("...", "<think>x</think> so far") == "none"
    assert THINK.start_of("...", "so far") == "none"
    assert IMPLIED.start_of("<｜Assistant｜>", None) == "open"
    assert IMPLIED.start_of("<｜Assistant｜></think>", None) == "none"
    assert GRANITE_32.start_of("...", f"{GRANITE[0]} so far") == "open"


# What gives each family away in its public chat template.
FAMILY_TEMPLATES: list[tuple[str, ReasoningFormat | None]] = [
    ("<|im_start|>{{ content.split('</think>')[0] }}<think>", THINK),
    ("<｜Assistant｜>{{ content.split('</think>')[-1] }}", IMPLIED),
    ("<｜Assistant｜><think>\\n{{ content.split('</think>')[-1] }}", THINK),
    ("<|im_start|>{% if '/no_think' in m %}{% endif %}<think>", THINK),
    ("<|im_start|>system<|im_sep|><think> {Thought section} </think> {Solution section}", THINK),
    ("[gMASK]<sop>{{ '<think></think>' }}", THINK),
    ("[gMASK]<sop>{{ '<think>' }}<answer>", WITH_ANSWER_TAGS),
    ("]~b]ai\\n<think>\\n{{ content.split('</think>') }}", THINK),
    ("<beginning_of_sentence>ai name=MiniMax AI", THINK),
    ("]~b]ai{%- set think_begin_token = '<mm:think>' -%}", M3),
    ("Write your thoughts after 'Here is my thought process:' and 'Here is my response:'", GRANITE_32),
    ("Write your thoughts between <think></think> and your response between <response></response>", GRANITE_33),
    ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY),
    ("[SYSTEM_PROMPT][/SYSTEM_PROMPT][INST][/INST]{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", BRACKETS),
    ("[other] <think> </think>", THINK),
    ("[other]", None),
]


@pytest.mark.parametrize(("template", "expected"), FAMILY_TEMPLATES)
def test_auto_knows_the_templates_of_each_family(template: str, expected: ReasoningFormat | None) -> None:
    assert choose_reasoning("auto", [template]) is expected


def test_formats_can_be_asked_for_by_name() -> None:
    assert choose_reasoning("auto", [TEMPLATE]) is None
    assert choose_reasoning("auto", []) is None
    assert choose_reasoning("think", [TEMPLATE]) is THINK
    assert choose_reasoning("none", [THINKING]) is None
    assert {"auto", "none", *NAMED} == set(get_args(ReasoningParserName))


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path, template=THINKING))


def answer_of(settings: AppSettings, text: str, *, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    client = FakeClient(always(play([*ids(text), 0], finish=finish, stop_token_id=0)))
    response = call(client, settings, "POST", "/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


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


def tagged_settings(folder: Path, template: str) -> tuple[AppSettings, int, int]:
    """Settings of a model whose tags are tokens, and their ids."""
    write_model_folder(folder, template=template)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    assert begin is not None
    assert end is not None
    return settings_for(folder), begin, end


HEADLESS = TEMPLATE + "{# <think></think> #}"  # a template that cannot turn reasoning off
OFF = {"reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("path", "template", "fields", "limit"),
    [
        ("/v1/chat/completions", HEADLESS, {"thinking_token_budget": 5}, 5),
        ("/v1/chat/completions", OPENED, {"thinking_token_budget": 5}, 5),
        ("/v1/chat/completions", OPENED, {"thinking_token_budget": -1}, None),
        ("/v1/chat/completions", OPENED, OFF, 0),
        ("/v1/chat/completions", HEADLESS, OFF, 0),
        ("/v1/chat/completions", THINKING, OFF, None),
        ("/v1/chat/completions", HEADLESS, {}, None),
        ("/v1/messages", HEADLESS, {"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
        ("/v1/messages", OPENED, {"thinking": {"type": "disabled"}}, 0),
        ("/v1/messages", OPENED, {"thinking": {"type": "adaptive"}}, None),
        ("/v1/responses", OPENED, {"reasoning": {"effort": "none"}}, 0),
    ],
)
def test_budgets_of_reasoning_reach_the_engine(
    tmp_path: Path, path: str, template: str, fields: dict[str, Any], limit: int | None
) -> None:
    settings, begin, end = tagged_settings(tmp_path, template)
    client = FakeClient(always(play([5, 0], stop_token_id=0)))
    body = {**CHAT, "max_tokens": 9, **fields}
    if path == "/v1/responses":
        body = {"model": "tiny", "input": "hi", **fields}
    assert call(client, settings, "POST", path, json=body).status_code == 200
    expected = None if limit is None else ReasoningBudget(limit, end, None if template is OPENED else begin)
    assert client.submissions[0].params.reasoning_budget == expected


def test_a_budget_needs_a_token_that_ends_the_reasoning(settings: AppSettings) -> None:
    """This tokenizer spells the tag; the request is served, and the log says that its budget is not enforced."""
    client = FakeClient(always(play([5, 0], stop_token_id=0)))
    body = {**CHAT, "thinking_token_budget": 5}
    assert call(client, settings, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert client.submissions[0].params.reasoning_budget is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_reasoning_comes_back_through_every_api_that_has_it(tmp_path: Path, path: str) -> None:
    """What one turn answered is the history of the next, as the API writes it."""
    shows = TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
    )
    settings = settings_for(write_model_folder(tmp_path, template=shows))
    client = FakeClient(
        always(play([*ids("<think>hm</think>Hello"), 0], stop_token_id=0)),
        info=msgspec.structs.replace(INFO, max_model_len=512),
    )
    user = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 64}
    if path == "/v1/responses":
        body = {"model": "tiny", "store": False, "include": ["reasoning.encrypted_content"]}
    key = "input" if path == "/v1/responses" else "messages"
    answer = call(client, settings, "POST", path, json={**body, key: [user]}).json()
    history: list[Any]
    if path == "/v1/responses":
        history = answer["output"]
    elif path == "/v1/messages":
        history = [{"role": "assistant", "content": answer["content"]}]
    else:
        history = [answer["choices"][0]["message"]]
    response = call(client, settings, "POST", path, json={**body, key: [user, *history, user]})
    assert response.status_code == 200, response.text
    prompt = TOKENIZER.decode(client.submissions[1].prompt, skip_special_tokens=False)
    assert "assistant\n<think>hm</think>Hello" in prompt


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
