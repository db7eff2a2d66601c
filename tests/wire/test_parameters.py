"""The parameters beyond OpenAI's: each has its effect on the prompt, on what the engine is asked, or on the answer."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from tests.support.fakes.fake_client import play
from tests.support.servers.http_fixtures import ids
from tests.wire.conftest import TEXT, Scripted
from tests.wire.requests import ASK, CHAT

BOTH = pytest.mark.parametrize("kind", ["chat", "text"])


def ask(server: Scripted, kind: str, /, *, stream: bool = False, **fields: Any) -> Any:
    """The answer to a request with the fields, through the SDK as its users send what it does not know."""
    api: Any = server.openai.chat.completions if kind == "chat" else server.openai.completions
    return api.create(**(CHAT if kind == "chat" else ASK), stream=stream, extra_body=fields)


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def changed(server: Scripted, kind: str, **fields: Any) -> dict[str, Any]:
    """What the fields change of the sampling parameters that the engine gets."""
    ask(server, kind, seed=1)
    before = msgspec.structs.asdict(server.params)
    ask(server, kind, seed=1, **fields)
    after = msgspec.structs.asdict(server.params)
    return {name: after[name] for name in after if after[name] != before[name]}


def refuses(server: Scripted, kind: str, name: str, value: Any) -> bool:
    """Whether the value is a 400 that names the parameter, before the engine is asked."""
    asked = len(server.engine.submissions)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, kind, **{name: value})
    return (refused.value.param or "").startswith(name) and len(server.engine.submissions) == asked


@BOTH
def test_wire_parameter_top_k(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, top_k=3) == {"top_k": 3}
    assert changed(plain, kind, top_k=-1) == changed(plain, kind, top_k=0) == {}, "off"
    assert refuses(plain, kind, "top_k", -2)


@BOTH
def test_wire_parameter_min_p(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, min_p=0.125) == {"min_p": 0.125}
    assert refuses(plain, kind, "min_p", 1.5)


@BOTH
def test_wire_parameter_top_n_sigma(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, top_n_sigma=1.5) == {"top_n_sigma": 1.5}
    assert changed(plain, kind, top_n_sigma=0) == changed(plain, kind, top_n_sigma=None) == {}, "off"
    assert refuses(plain, kind, "top_n_sigma", -1)


@BOTH
def test_wire_parameter_repetition_penalty(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, repetition_penalty=1.5) == {"repetition_penalty": 1.5}
    assert refuses(plain, kind, "repetition_penalty", 0)


@BOTH
def test_wire_parameter_min_tokens(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, min_tokens=9) == {"min_tokens": 9}
    assert text_of(ask(plain, kind, stop="hell")) == ""
    assert text_of(ask(plain, kind, min_tokens=5, stop="hell")) == TEXT, "a stop string counts only after them"
    assert refuses(plain, kind, "min_tokens", 4096)


@BOTH
def test_wire_parameter_stop_token_ids(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, stop_token_ids=[7]) == {"stop_token_ids": (7,)}
    (end,) = ids("d")
    plain.plays(play(ids("word"), finish="stop", stop_token_id=end))
    assert text_of(ask(plain, kind, stop_token_ids=[end])) == "wor", "it does not leak"
    assert refuses(plain, kind, "stop_token_ids", [512])


@BOTH
def test_wire_parameter_ignore_eos(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, ignore_eos=True) == {"ignore_eos": True}
    assert refuses(plain, kind, "ignore_eos", "yes")


@BOTH
def test_wire_parameter_skip_special_tokens(plain: Scripted, kind: str) -> None:
    plain.plays(play([*ids("a"), 1, *ids("b")], finish="length"))
    assert text_of(ask(plain, kind)) == text_of(ask(plain, kind, skip_special_tokens=True)) == "ab"
    assert text_of(ask(plain, kind, skip_special_tokens=False)) == "a<|im_start|>b"


@BOTH
def test_wire_parameter_include_stop_str_in_output(plain: Scripted, kind: str) -> None:
    assert text_of(ask(plain, kind, stop="wö")) == "hello "
    assert text_of(ask(plain, kind, stop="wö", include_stop_str_in_output=True)) == "hello wö"


def test_wire_parameter_chat_template_kwargs(tool: Scripted) -> None:
    ask(tool, "chat", chat_template_kwargs={"enable_thinking": False})
    assert tool.prompt.endswith("<think>\n\n</think>\n\n"), "they reach the template"
    for reserved in ("messages", "tools", "add_generation_prompt", "chat_template"):
        assert refuses(tool, "chat", "chat_template_kwargs", {reserved: []}), reserved


@BOTH
def test_wire_parameter_priority(plain: Scripted, kind: str) -> None:
    ask(plain, kind)
    ask(plain, kind, priority=-2)
    assert [submission.priority for submission in plain.engine.submissions] == [0, -2]
    assert refuses(plain, kind, "priority", 2**40)


@BOTH
def test_wire_parameter_cache_salt(plain: Scripted, kind: str) -> None:
    for salt in ("a", "a", "b", None):
        ask(plain, kind, cache_salt=salt)
    first, same, other, none = [submission.cache_salt for submission in plain.engine.submissions]
    assert first == same
    assert len({first, other, none}) == 3, "prefixes are shared between equal salts only"
    assert refuses(plain, kind, "cache_salt", "")


def test_wire_parameter_add_generation_prompt(plain: Scripted) -> None:
    ask(plain, "chat", add_generation_prompt=False)
    assert plain.prompt == "<|im_start|>user\nhi<|im_end|>\n"
    ask(plain, "chat", add_generation_prompt=True)
    assert plain.prompt.endswith("<|im_start|>assistant\n")


def test_wire_parameter_continue_final_message(plain: Scripted) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "so "}]
    ask(plain, "chat", messages=begun, continue_final_message=True)
    assert plain.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso "
    assert refuses(plain, "chat", "continue_final_message", True), "the last message is the user's"


@BOTH
def test_wire_parameter_return_token_ids(plain: Scripted, kind: str) -> None:
    answer = ask(plain, kind, return_token_ids=True)
    prompt = plain.engine.submissions[-1].prompt
    assert answer.choices[0].token_ids == [*ids(TEXT), 0]
    assert (answer if kind == "chat" else answer.choices[0]).prompt_token_ids == prompt
    chunks = list(ask(plain, kind, stream=True, return_token_ids=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert (chunks if kind == "chat" else choices)[0].prompt_token_ids == prompt
    assert [i for choice in choices for i in choice.model_extra.get("token_ids", [])] == [*ids(TEXT), 0]


@BOTH
def test_wire_parameter_prompt_logprobs(plain: Scripted, kind: str) -> None:
    """Their answers are tested in tests/app/openai/test_prompt_scores.py."""
    assert changed(plain, kind, prompt_logprobs=1) == {"prompt_logprobs": 1}
    assert refuses(plain, kind, "prompt_logprobs", 21)


@BOTH
def test_wire_parameter_bad_words(plain: Scripted, kind: str) -> None:
    words = changed(plain, kind, bad_words=["hello"])["bad_words"]
    assert words
    assert all(words), "each word as token ids"
    assert refuses(plain, kind, "bad_words", ["w"] * 129)


@BOTH
@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"type": "object"}},
        {"regex": "[0-9]{3}"},
        {"choice": ["red", "green"]},
        {"grammar": 'start: "a"'},
    ],
    ids=str,
)
def test_wire_parameter_structured_outputs(plain: Scripted, kind: str, spec: Any) -> None:
    grammar = changed(plain, kind, structured_outputs=spec)["grammar"]
    assert grammar.param == "structured_outputs"
    (value,) = spec.values()
    assert not isinstance(value, str) or value in grammar.text
    assert refuses(plain, kind, "structured_outputs", {**spec, "regex": "a", "choice": ["b"]}), "one at a time"


@pytest.mark.parametrize("stream", [False, True])
def test_wire_parameter_thinking(tool: Scripted, stream: bool) -> None:
    """Thinking turned off: the prompt says so, and the answer is read as an answer from its first token."""
    tool.says("hm</think>Hello")
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    answer: Any = tool.openai.chat.completions.create(**CHAT, extra_body=off, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(part.content or "" for part in parts) == "hm</think>Hello"
    assert all("reasoning" not in part.model_extra for part in parts)
    tool.says("<think>hm</think>Hello")
    on: Any = tool.openai.chat.completions.create(**CHAT).choices[0].message
    assert (on.reasoning, on.content) == ("hm", "Hello")


@BOTH
def test_wire_parameter_continuous_usage_stats(plain: Scripted, kind: str) -> None:
    for others in ({"include_usage": True}, {}):
        options = {"continuous_usage_stats": True, **others}
        chunks = list(ask(plain, kind, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0 if kind == "chat" else 1, len(ids(TEXT)) + 1)
        assert bool(chunks[-1].choices) != bool(others), "a chunk of its own only with include_usage"


@BOTH
def test_wire_parameter_allowed_token_ids(plain: Scripted, kind: str) -> None:
    assert changed(plain, kind, allowed_token_ids=[5, 6]) == {"allowed_token_ids": (5, 6)}
    assert refuses(plain, kind, "allowed_token_ids", [-1])


@BOTH
def test_wire_parameter_truncate_prompt_tokens(plain: Scripted, kind: str) -> None:
    ask(plain, kind)
    whole = plain.engine.submissions[-1].prompt
    ask(plain, kind, truncate_prompt_tokens=1)
    assert plain.engine.submissions[-1].prompt == whole[-1:]
    ask(plain, kind, truncate_prompt_tokens=-1)
    assert plain.engine.submissions[-1].prompt == whole, "it fits the context"
    assert refuses(plain, kind, "truncate_prompt_tokens", 0)
