"""gpt-oss's form: prompts as its description has them, and completions of messages through every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import llguidance
import pytest
from tokenizers import AddedToken

from tessera.app.generate.reader import CompletionReader
from tessera.app.reasoning.harmony import HARMONY
from tessera.app.settings import AppSettings
from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.app.text.harmony import TEMPLATE, prepared_variables
from tessera.app.text.typescript import tool_namespace
from tessera.app.tools.harmony.parser import HarmonyParser
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning
from tessera.engine.contract.sampling_params import Grammar, ReasoningBudget
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import byte_level_tokenizer, call, events, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import ROOMY

SEED = 20
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
TOKENIZER.add_tokens([AddedToken("analysis")])
IDS: dict[str, int] = {mark: TOKENIZER.encode(mark).ids[0] for mark in (*MARKS, "analysis")}

LOCATION = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
FORMAT = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_location", "description": "Gets the location of the user."},
    {
        "name": "get_current_weather",
        "description": "Gets the current weather in the provided location.",
        "parameters": {
            "type": "object",
            "properties": {"location": LOCATION, "format": FORMAT},
            "required": ["location"],
        },
    },
    {
        "name": "get_multiple_weathers",
        "description": "Gets the current weather in the provided list of locations.",
        "parameters": {
            "type": "object",
            "properties": {
                "locations": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]',
                },
                "format": FORMAT,
            },
            "required": ["locations"],
        },
    },
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
# The example of docs/format.md in openai/harmony, "Handling tool calls".
NAMESPACE = """\
## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

// Gets the current weather in the provided list of locations.
type get_multiple_weathers = (_: {
// List of city and state, e.g. ["San Francisco, CA", "New York, NY"]
locations: string[],
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

} // namespace functions"""
SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
TOOLS_LINE = "\nCalls to these tools must go to the commentary channel: 'functions'."
SF_CALL = {"location": "San Francisco"}
SF_RESULT = '{"sunny": true, "temperature": 20}'


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shown_call(name: str, arguments: str) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def shown_result(name: str, text: str) -> str:
    return f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    made = ChatTemplate({"default": TEMPLATE}, {}, now=lambda: datetime(2025, 6, 28))
    yield made
    made.close()


def render(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    """What follows the system message."""
    text = template.render(messages, extra={"reasoning_effort": "high"}, **options)
    head = SYSTEM + (TOOLS_LINE if options.get("tools") else "") + "<|end|>"
    assert text.startswith(head), text
    return text[len(head) :]


# As far as it is looked at.
PUBLISHED = "<|start|>assistant<|channel|>analysis<|message|>{% set call = message.tool_calls[0] %}"
USER = {"role": "user", "content": "hi"}
SHOWN_USER = "<|start|>user<|message|>hi<|end|>"


def test_tools_and_a_call_are_rendered_as_the_format_says(template: ChatTemplate) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use a friendly tone."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "thinking": "Need to use function get_current_weather.",
            "tool_calls": [tool_call("a", "get_current_weather", SF_CALL)],
        },
        {"role": "tool", "tool_call_id": "a", "content": SF_RESULT},
    ]
    assert render(template, messages, tools=TOOLS) == (
        f"<|start|>developer<|message|># Instructions\n\nUse a friendly tone.\n\n# Tools\n\n{NAMESPACE}<|end|>"
        f"{SHOWN_USER}<|start|>assistant<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|>"
        + shown_call("get_current_weather", '{"location": "San Francisco"}')
        + shown_result("get_current_weather", SF_RESULT)
        + "<|start|>assistant"
    )


def test_reasoning_before_an_answer_is_dropped_and_text_before_calls_is_kept(template: ChatTemplate) -> None:
    calls = [tool_call("a", "f", {}), tool_call("b", "g", "broken {")]
    turn: list[dict[str, Any]] = [
        {"role": "assistant", "content": "I look.", "thinking": "two calls", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "of g"},
        {"role": "tool", "tool_call_id": "a", "content": "of f"},
    ]
    answer = {"role": "assistant", "content": "Done.", "thinking": "so"}
    text = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    shown = text + shown_call("f", "{}") + shown_call("g", "broken {") + shown_result("g", "of g")
    shown += shown_result("f", "of f")
    thought = "<|start|>assistant<|channel|>analysis<|message|>two calls<|end|>"
    assert render(template, [USER, *turn]) == f"{SHOWN_USER}{thought}{shown}<|start|>assistant"
    done = f"{SHOWN_USER}{shown}<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
    assert render(template, [USER, *turn, answer, USER]) == f"{done}{SHOWN_USER}<|start|>assistant"
    second = f"{done}{SHOWN_USER}{thought}{shown}<|start|>assistant"
    assert render(template, [USER, *turn, answer, USER, *turn]) == second


def test_instructions_keep_their_places(template: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        USER,
        {"role": "system", "content": "C"},
    ]
    first, late = ("<|start|>developer<|message|># Instructions\n\n" + text + "<|end|>" for text in ("A\n\nB", "C"))
    assert render(template, messages) == f"{first}{SHOWN_USER}{late}<|start|>assistant"


def test_an_answer_is_continued(template: ChatTemplate) -> None:
    messages = [USER, {"role": "assistant", "content": "Once "}]
    text = render(template, messages, continue_final_message=True, add_generation_prompt=False)
    assert text == f"{SHOWN_USER}<|start|>assistant<|channel|>final<|message|>Once "


def test_efforts_are_those_of_the_model_and_none_leaves_the_reasoning_empty(template: ChatTemplate) -> None:
    assert prepared_variables({"reasoning_effort": "xhigh"}) == {"reasoning_effort": "high"}
    text = template.render([USER], extra={"reasoning_effort": "none", "model_identity": "You are Tess."})
    assert "You are Tess.\n" in text
    assert "Reasoning: low\n" in text
    assert text.endswith("<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant")
    assert "Reasoning: medium\n" in template.render([USER])


def test_types_beyond_the_example() -> None:
    schema = {
        "type": "object",
        "properties": {
            "who": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": ["string", "integer"]}},
            "level": {"enum": [1, "high", None]},
            "deep": {"$ref": "#/$defs/loop"},
            "note": {"type": "string", "default": "a", "nullable": True, "description": "one\ntwo"},
            "any": {},
        },
        "$defs": {
            "person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
        },
    }
    text = tool_namespace([{"name": "f", "parameters": schema}])
    assert "who?: {\n    name: string,\n    } | null,\n" in text
    assert "tags?: (string | number)[],\n" in text
    assert 'level?: 1 | "high" | null,\n' in text
    assert '// one\n// two\nnote?: string | null, // default: "a"\n' in text
    assert "deep?: any,\nnote" in text.replace("// one\n// two\n", "")


def test_references_cannot_make_much_of_little() -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 2**17}}}
    schema = {
        "type": "object",
        "properties": {f"p{index}": {"$ref": "#/$defs/long"} for index in range(2000)},
        "$defs": {"long": long},
    }
    text = tool_namespace([{"name": "f", "parameters": schema}])
    assert len(text) < 2**21
    assert "p0?: {" in text
    assert "p1999?: any," in text


def test_a_template_that_shows_one_call_of_a_turn_is_replaced(tmp_path: Path) -> None:
    other = PUBLISHED.replace("[0]", "")
    for given, expected in ((PUBLISHED, TEMPLATE), (other, other)):
        (tmp_path / "chat_template.jinja").write_text(given)
        found = load_chat_template(tmp_path, None, {})
        assert found is not None
        assert found.sources["default"] == expected
    override = tmp_path / "own.jinja"
    override.write_text(PUBLISHED)
    chosen = load_chat_template(tmp_path, str(override), {})
    assert chosen is not None
    assert chosen.sources["default"] == PUBLISHED


# Completions.

THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Hello"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
PARIS = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

Message = tuple[str, str, list[tuple[str, str]]]


def message_of(parts: list[Part]) -> Message:
    calls = [[part.name, ""] for part in parts if isinstance(part, CallStart)]
    for part in parts:
        if isinstance(part, CallArguments):
            calls[part.index][1] += part.text
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def read(pieces: list[str], *, tools: bool = True, continues: bool = False, cut: bool = False) -> Message:
    reader = CompletionReader(None, HarmonyParser({"weather": WEATHER} if tools else {}, continues=continues))
    parts: list[Part] = []
    for piece in pieces:
        reader.read_text(piece)
        parts += reader.take_parts()
    reader.finish(cut=cut)
    return message_of(parts + reader.take_parts())


CALL = ("weather", '{"city": "Paris"}')
CASES: list[tuple[str, Message]] = [
    (f"{THOUGHT}{ANSWER}<|return|>", ("hm", "Hello", [])),
    (f"{THOUGHT}{ANSWER}", ("hm", "Hello", [])),
    (f"{THOUGHT}{ANSWER}<|end|><|start|>assistant{ANSWER}", ("hm", "Hello", [])),
    (f"{THOUGHT}{THOUGHT}{PREAMBLE}{THOUGHT}{PARIS}", ("hm\n\nhm\n\nhm", "I look.", [CALL])),
    (f"{PREAMBLE}{ANSWER}", ("", "I look.\n\nHello", [])),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hello", ("hm", "Hello", [])),
    ("<|channel|>analysis<|message|>hm<|start|><|channel|>final <|constrain|>json<|message|>{}", ("hm", "{}", [])),
    ("<|message|>Hello", ("", "Hello", [])),
    ("<|channel|>secret<|message|>Hello", ("", "Hello", [])),
    ("Hello <|channel|>analysis<|message|>hm", ("hm", "Hello ", [])),
    ("  Hello\n", ("", "  Hello\n", [])),
    ("<|channel|>analysis<|message|>hm <|en", ("hm <|en", "", [])),
    (f"{THOUGHT}<|channel|>fin", ("hm", "", [])),
    (f"{THOUGHT}", ("hm", "", [])),
    ("<|channel|>final<|end|>assistant<|channel|>final<|message|>Hello", ("", "Hello", [])),
    (f"<|channel|>{'x' * 600}<|message|>Hello", ("", f"<|channel|>{'x' * 600}<|message|>Hello", [])),
    ("assistant text", ("", "assistant text", [])),
    ('<|channel|>analysis to=python code<|message|>1 + 1<|call|>', ("", "", [("python", "1 + 1")])),
    ("<|channel|>commentary to=assistant<|message|>Hello", ("", "Hello", [])),
    ('<|channel|>commentary to=functions.weather<|message|>{"city": "Pa', ("", "", [("weather", '{"city": "Pa')])),
    ("", ("", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_reads_completions_wherever_they_are_cut(text: str, expected: Message) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    rng = Random(SEED)
    print("seed", SEED)
    for _ in range(20):
        size = rng.randint(1, 12)
        assert read([text[start : start + size] for start in range(0, len(text), size)]) == expected


def test_without_tools_a_call_is_the_text_of_its_channel() -> None:
    assert read([f"{THOUGHT}{PARIS}"], tools=False) == ("hm", '{"city": "Paris"}', [])
    assert read(["<|channel|>analysis to=python<|message|>1"], tools=False) == ("1", "", [])


def test_a_completion_may_begin_within_the_answer() -> None:
    assert read([" more<|end|><|start|>assistant"], continues=True) == ("", " more", [])


def test_random_messages_never_fail_and_are_read_alike_however_cut() -> None:
    rng = Random(SEED)
    print("seed", SEED)
    alphabet = [
        *MARKS,
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.weather",
        "json",
        "{",
        "}",
        " x",
        "\n",
    ]
    for _ in range(300):
        pieces = rng.choices(alphabet, k=rng.randint(1, 20))
        text = "".join(pieces)
        for cut in (False, True):
            assert read([text], cut=cut) == read(list(text), cut=cut) == read(pieces, cut=cut), text


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), template=PUBLISHED)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return settings_for(folder)


def saying(text: str) -> FakeClient:
    stop = IDS["<|call|>" if text.endswith("<|call|>") else "<|return|>"]
    body = text.removesuffix("<|call|>").removesuffix("<|return|>")
    return FakeClient(always(play([*TOKENIZER.encode(body).ids, stop], stop_token_id=stop)), info=ROOMY)


def prompt_of(client: FakeClient, index: int = -1) -> str:
    return TOKENIZER.decode(client.submissions[index].prompt, skip_special_tokens=False)


def post(client: FakeClient, settings: AppSettings, path: str, **body: Any) -> httpx.Response:
    response = call(client, settings, "POST", path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return response


WEATHER_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
# Each API: its path, a request with tools, and what it answers: reasoning, text, calls.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [WEATHER_TOOL]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}]},
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 500,
        "tools": [{"name": "weather", "input_schema": WEATHER}],
    },
    "/api/chat": {"messages": [USER], "tools": [WEATHER_TOOL], "stream": False, "think": True},
}


def answer_in(path: str, body: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]], str]:
    """Reasoning, text, the calls' arguments, and how the completion ended."""
    if path == "/v1/chat/completions":
        choice = body["choices"][0]
        message = choice["message"]
        calls = [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or []]
        return message.get("reasoning") or "", message["content"] or "", calls, choice["finish_reason"]
    if path == "/v1/responses":
        output = body["output"]
        texts = dict.fromkeys(("reasoning", "message"), "")
        for item in output:
            for part in item.get("content", []):
                texts[item["type"]] += part["text"]
        calls = [json.loads(item["arguments"]) for item in output if item["type"] == "function_call"]
        return texts["reasoning"], texts["message"], calls, body["status"]
    if path == "/v1/messages":
        blocks = body["content"]
        thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        return thinking, text, [b["input"] for b in blocks if b["type"] == "tool_use"], body["stop_reason"]
    message = body["message"]
    calls = [each["function"]["arguments"] for each in message.get("tool_calls", [])]
    return message.get("thinking", ""), message["content"], calls, body["done_reason"]


@pytest.mark.parametrize("path", BODIES)
def test_every_api_has_reasoning_text_and_calls(settings: AppSettings, path: str) -> None:
    called = post(saying(f"{THOUGHT}{PREAMBLE}{PARIS}"), settings, path, **BODIES[path]).json()
    ends = {"/v1/chat/completions": "tool_calls", "/v1/responses": "completed", "/v1/messages": "tool_use"}
    assert answer_in(path, called) == ("hm", "I look.", [{"city": "Paris"}], ends.get(path, "stop"))
    answered = post(saying(f"{THOUGHT}{ANSWER}<|return|>"), settings, path, **BODIES[path]).json()
    assert answer_in(path, answered)[:3] == ("hm", "Hello", [])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_turn_with_a_call_comes_back_with_its_reasoning(settings: AppSettings, path: str) -> None:
    body = dict(BODIES[path])
    if path == "/v1/responses":
        body |= {"store": False, "include": ["reasoning.encrypted_content"]}
    client = saying(f"{THOUGHT}{PREAMBLE}{PARIS}")
    answer = post(client, settings, path, **body).json()
    if path == "/v1/responses":
        call_id = answer["output"][-1]["call_id"]
        body["input"] = [USER, *answer["output"]]
        body["input"].append({"type": "function_call_output", "call_id": call_id, "output": "7 C"})
    elif path == "/v1/messages":
        result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "7 C"}
        body["messages"] = [USER, {"role": "assistant", "content": answer["content"]}]
        body["messages"].append({"role": "user", "content": [result]})
    else:
        message = answer["choices"][0]["message"]
        body["messages"] = [USER, message]
        body["messages"].append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7 C"})
    post(client, settings, path, **body)
    shown = f"{SHOWN_USER}<|start|>assistant{THOUGHT}{PREAMBLE}{PARIS}" + shown_result("weather", "7 C")
    assert prompt_of(client).endswith(f"{shown}<|start|>assistant")


@pytest.mark.parametrize("path", BODIES)
def test_streams_have_no_marks(settings: AppSettings, path: str) -> None:
    response = post(saying(f"{THOUGHT}{PREAMBLE}{PARIS}"), settings, path, **{**BODIES[path], "stream": True})
    assert "<|" not in response.text
    if path == "/api/chat":
        lines = [json.loads(line)["message"] for line in response.text.splitlines()]
        assert "".join(line.get("thinking", "") for line in lines) == "hm"
        assert "".join(line["content"] for line in lines) == "I look."
        assert [call["function"]["arguments"] for line in lines for call in line.get("tool_calls", [])] == [
            {"city": "Paris"}
        ]
    if path == "/v1/chat/completions":
        deltas = [event["choices"][0]["delta"] for event in events(response.content)]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", ["1 + 1", '{"city": "Par', "[1]"])
def test_what_is_no_object_is_text_where_arguments_are_objects(settings: AppSettings, body: str, stream: bool) -> None:
    """The code of a built-in tool, or broken JSON: Ollama's form of calls has no room for them."""
    text = f"{THOUGHT}<|channel|>commentary to=python<|message|>{body}<|call|>"
    response = post(saying(text), settings, "/api/chat", **{**BODIES["/api/chat"], "stream": stream})
    lines = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(line["content"] for line in lines) == body
    assert not any("tool_calls" in line for line in lines)


def test_reasoning_tokens_are_counted_and_a_call_ends_the_completion(settings: AppSettings) -> None:
    tokens = TOKENIZER.encode(f"{THOUGHT}{PARIS} and more").ids
    client = FakeClient(always(play(tokens, finish="length")), info=ROOMY)
    body = post(client, settings, "/v1/chat/completions", **BODIES["/v1/chat/completions"]).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] == len(TOKENIZER.encode(f"{THOUGHT}{PARIS}").ids)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm") + 2, "and both marks"


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    assert grammar.kind == "lark"
    inner = llguidance.LLTokenizer(TOKENIZER.to_str(), eos_token=[IDS["<|return|>"], IDS["<|call|>"]])
    matcher = llguidance.LLMatcher(inner, llguidance.LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(settings: AppSettings, **fields: Any) -> Grammar | None:
    client = saying(ANSWER)
    post(client, settings, "/v1/chat/completions", messages=[USER], **fields)
    grammar = client.submissions[0].params.grammar
    assert grammar is None or isinstance(grammar, Grammar)
    return grammar


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


def test_structured_output_is_the_final_message(settings: AppSettings) -> None:
    grammar = grammar_of(settings, response_format=RESPONSE_FORMAT)
    assert accepts(grammar, f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}')
    assert accepts(grammar, '<|channel|>final <|constrain|>json<|message|>{"a": 1}')
    assert not accepts(grammar, f"{THOUGHT}{ANSWER}")
    assert not accepts(grammar, '{"a": 1}')
    client = saying(ANSWER)
    post(client, settings, "/v1/chat/completions", messages=[USER], response_format=RESPONSE_FORMAT)
    _, _, shown = prompt_of(client).partition("<|start|>developer<|message|># Response Formats\n\n## response\n\n")
    assert json.loads(shown.partition("<|end|>")[0]) == SCHEMA


def test_a_grammar_of_ones_own_cannot_be_the_final_message(settings: AppSettings) -> None:
    body = {"model": "tiny", "messages": [USER], "structured_outputs": {"grammar": 'start: "a"'}}
    response = call(saying(ANSWER), settings, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "structured_outputs cannot be a grammar with this model" in response.json()["error"]["message"]


def test_calls_are_forced_after_the_reasoning(settings: AppSettings) -> None:
    grammar = grammar_of(settings, tools=[WEATHER_TOOL], tool_choice="required")
    assert accepts(grammar, f"{THOUGHT}{PREAMBLE}{PARIS.removesuffix('<|call|>')}")
    assert accepts(grammar, ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}')
    assert not accepts(grammar, f"{THOUGHT}{ANSWER}")
    strict = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    free = grammar_of(settings, tools=[strict])
    assert accepts(free, f"{THOUGHT}{ANSWER}")
    assert accepts(free, f"{THOUGHT}{PARIS.removesuffix('<|call|>')}")
    assert not accepts(free, THOUGHT + PARIS.removesuffix("<|call|>").replace("city", "town"))
    either = grammar_of(settings, tools=[WEATHER_TOOL], response_format=RESPONSE_FORMAT)
    assert accepts(either, f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}')
    assert accepts(either, PARIS.removesuffix("<|call|>"))
    assert not accepts(either, f"{THOUGHT}{ANSWER}")


def test_budgets_count_from_the_channel(settings: AppSettings) -> None:
    client = saying(ANSWER)
    post(client, settings, "/v1/chat/completions", messages=[USER], thinking_token_budget=5)
    expected = ReasoningBudget(6, IDS["<|end|>"], IDS["analysis"])
    assert client.submissions[0].params.reasoning_budget == expected
    assert HARMONY.start_of("<|start|>assistant", None) == "possible"


def test_a_folder_without_a_template_shows_the_form_by_its_tokens(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=None)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    client = saying(f"{THOUGHT}{ANSWER}<|return|>")
    body = post(client, settings_for(folder), "/v1/chat/completions", messages=[USER]).json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert prompt_of(client).endswith(f"{SHOWN_USER}<|start|>assistant")


def test_a_prefilled_answer_is_continued(settings: AppSettings) -> None:
    client = saying(" time<|return|>")
    messages = [USER, {"role": "assistant", "content": "Once upon a"}]
    body = post(client, settings, "/v1/messages", messages=messages, max_tokens=50).json()
    assert body["content"] == [{"type": "text", "text": " time"}]
    assert prompt_of(client).endswith("<|channel|>final<|message|>Once upon a")
