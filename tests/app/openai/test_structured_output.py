"""WIRE.md 14 and `structured_outputs`, through the SDK and raw HTTP, on the built-in model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.conversations.tools import offered_tools
from tessera.app.openai.responses.conversation import chat_request
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.schema.request import parse_request
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder
from tests.support.servers.server_fixture import Server

NO_TOOLS = offered_tools([])
MESSAGES: list[Any] = [{"role": "user", "content": "My name is Anna, I am 31 and live in Bonn. Who am I?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "shy"]}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


def json_schema(definition: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": definition, "strict": True, **fields}}


@pytest.fixture(scope="module")
def client(builtin_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{builtin_server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def refusal(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    common = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    response = server.http.post(path, json={"model": server.model, "max_tokens": 20, **common, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# ---- over HTTP ----------------------------------------------------------------------------------


def test_wire_14_answers_validate_at_a_high_temperature(client: openai.OpenAI, builtin_server: Server) -> None:
    answer = client.chat.completions.create(
        model=builtin_server.model,
        messages=MESSAGES,
        n=8,
        temperature=1.5,
        seed=3,
        max_completion_tokens=200,
        logprobs=True,
        top_logprobs=2,
        response_format=json_schema(PERSON),  # type: ignore[call-overload]
    )
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(whole) >= 4
    for choice in whole:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_wire_14_json_object(client: openai.OpenAI, builtin_server: Server) -> None:
    answer = client.chat.completions.create(
        model=builtin_server.model,
        messages=MESSAGES,
        n=4,
        temperature=0.7,
        seed=5,
        max_completion_tokens=200,
        response_format={"type": "json_object"},
    )
    for choice in answer.choices:
        assert choice.message.content is not None
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_wire_14_text_asks_for_nothing(client: openai.OpenAI, builtin_server: Server) -> None:
    def text(**fields: Any) -> str | None:
        answer = client.chat.completions.create(
            model=builtin_server.model, messages=MESSAGES, temperature=0, max_completion_tokens=12, **fields
        )
        return answer.choices[0].message.content

    assert text(response_format={"type": "text"}) == text()


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[0-9]{4}"}, r"\d{3}-\d{4}"),
        ({"choice": ["red", "green", "dark blue"]}, "red|green|dark blue"),
        ({"grammar": 'root ::= "a" ("b" | "c"){2} "."'}, r"a[bc]{2}\."),
        ({"grammar": 'start: "a" /[bc]{2}/ "."'}, r"a[bc]{2}\."),
        ({"json": {"enum": ["x", 1]}}, '"x"|1'),
        ({"json": '{"enum": ["x", 1]}'}, '"x"|1'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_structured_outputs(builtin_server: Server, path: str, spec: dict[str, Any], pattern: str) -> None:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Say"}
    body = {"model": builtin_server.model, "n": 4, "temperature": 1.5, "max_tokens": 40, **prompt}
    answer = builtin_server.post({**body, "structured_outputs": spec}, path)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["message"]["content"] if "chat" in path else choice["text"])


def test_a_streamed_answer_is_the_same_text(builtin_server: Server) -> None:
    spec = {"regex": "[a-z]{4,8} [0-9]{2}"}
    fields = {"temperature": 1.5, "seed": 11, "structured_outputs": spec, "ignore_eos": False}
    whole = builtin_server.complete("Say", 40, **fields)
    assert re.fullmatch(spec["regex"], whole.text)
    assert builtin_server.streamed("Say", 40, **fields) == whole


def test_stop_strings_and_penalties_go_with_a_grammar(builtin_server: Server) -> None:
    spec = {"regex": "[abc]{3}-[abc]{3}"}
    answer = builtin_server.complete(
        "Say",
        40,
        temperature=1.5,
        structured_outputs=spec,
        stop="-",
        frequency_penalty=2,
        presence_penalty=1,
        top_p=0.9,
    )
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[abc]{3}", answer.text)


def test_bad_words(builtin_server: Server) -> None:
    """Of an answer that is sure, one word after the other is forbidden, until none of them comes."""
    body = {"model": builtin_server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    words: list[str] = []
    for _ in range(3):
        answer = builtin_server.post({**body, "bad_words": words}, "/v1/chat/completions")
        content = answer["choices"][0]["message"]["content"]
        found = content.split()
        assert not set(found) & set(words)
        words.append(found[0])


def test_allowed_token_ids(builtin_server: Server) -> None:
    answer = builtin_server.complete("Say", 20, temperature=1.5, allowed_token_ids=[100, 101, 102])
    assert set(answer.token_ids) <= {100, 101, 102}
    assert len(answer.token_ids) == 20


# ---- refusals -----------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    definition: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        definition = {"items": definition}
    return definition


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": json_schema({"not": {}})}, "response_format", "not"),
        ({"response_format": json_schema({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"regex": r"\w?" * 4000}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", "characters"),
        ({"response_format": json_schema(nested(100))}, None, "64"),
    ],
    ids=["not", "uniqueItems", "regex", "huge regex", "lark", "long", "deep"],
)
def test_wire_14_what_cannot_be_enforced_is_refused(
    builtin_server: Server, fields: dict[str, Any], param: str | None, named: str, stream: bool
) -> None:
    error = refusal(builtin_server, stream=stream, **fields)
    assert error["param"] == param
    assert named in error["message"]
    assert builtin_server.complete("Hi", 2).finish_reason == "length"


# ---- fields -------------------------------------------------------------------------------------


def grammar_of(kind: type[Any], body: dict[str, Any]) -> Grammar | None:
    request = parse_request(kind, body)
    request.check()
    grammar: Grammar | None = request.grammar
    return grammar


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": json_schema({}, name="")}, "response_format.json_schema.name"),
    ({"response_format": json_schema({}, name="x" * 65)}, "response_format.json_schema.name"),
    ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": json_schema([])}, "response_format.json_schema.schema"),  # type: ignore[arg-type]
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [str(i) for i in range(1025)]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "not json"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "backend": "other"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"json_schema": []}, "json_schema"),
    ({"regex": 1}, "regex"),
    ({"grammar": {}}, "grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_FIELDS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_wrong_fields_are_named(kind: type[Any], fields: dict[str, Any], param: str) -> None:
    prompt = {"messages": MESSAGES} if kind is ChatCompletionRequest else {"prompt": "Hi"}
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(kind, {"model": "m", **prompt, **fields})
    assert refused.value.param == param
    assert param.split("[")[0] in refused.value.message


FORMS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "json_schema": {},
    "regex": "a",
    "ebnf": "root ::= a",
    "grammar": "root ::= a",
}


@pytest.mark.parametrize(("first", "second"), list(combinations(FORMS, 2)))
def test_two_forms_of_one_answer_are_refused_by_both_names(first: str, second: str) -> None:
    body = {"model": "m", "prompt": "Hi", first: FORMS[first], second: FORMS[second]}
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(CompletionRequest, body)
    assert refused.value.param == second
    assert f"{first} and {second} cannot both be given" in refused.value.message
    assert grammar_of(CompletionRequest, {**body, first: None}) is not None


def test_responses_name_their_own_field_beside_an_older_one() -> None:
    body: dict[str, Any] = {"model": "m", "input": "Hi", "guided_regex": "a"}
    request = parse_request(ResponsesRequest, {**body, "text": {"format": {"type": "json_object"}}})
    with pytest.raises(InvalidRequestError, match=r"text\.format and guided_regex"):
        chat_request(request, NO_TOOLS, []).check()
    grammar = chat_request(parse_request(ResponsesRequest, body), NO_TOOLS, []).grammar
    assert grammar == Grammar("regex", "a", "guided_regex")
    body = {"model": "m", "input": "Hi", "grammar": "root ::= a"}
    grammar = chat_request(parse_request(ResponsesRequest, body), NO_TOOLS, []).grammar
    assert grammar == Grammar("gbnf", "root ::= a", "grammar")


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"guided_json": {"enum": [1]}}, Grammar("json_schema", '{"enum":[1]}', "guided_json")),
        ({"guided_json": '{"enum": [1]}'}, Grammar("json_schema", '{"enum":[1]}', "guided_json")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]', "guided_choice")),
        ({"guided_grammar": "root ::= a"}, Grammar("gbnf", "root ::= a", "guided_grammar")),
        ({"json_schema": {"enum": [1]}, "grammar": ""}, Grammar("json_schema", '{"enum":[1]}', "json_schema")),
        ({"regex": "a+", "ebnf": None}, Grammar("regex", "a+", "regex")),
        ({"ebnf": "root ::= a"}, Grammar("gbnf", "root ::= a", "ebnf")),
        ({"grammar": "root ::= a", "json_schema": ""}, Grammar("gbnf", "root ::= a", "grammar")),
    ],
)
def test_other_names_mean_the_same(fields: dict[str, Any], grammar: Grammar) -> None:
    assert grammar_of(CompletionRequest, {"model": "m", "prompt": "Hi", **fields}) == grammar


def test_bad_words_are_forbidden_at_a_beginning_and_after_a_space(tmp_path: Path) -> None:
    client = FakeClient(always(play([5, 0], stop_token_id=0)))
    body = {"model": "tiny", "prompt": "Hi", "bad_words": ["hello", " wo"]}
    folder = write_model_folder(tmp_path)
    assert call(client, settings_for(folder), "POST", "/v1/completions", json=body).status_code == 200
    spelled = {tuple(ids(text)) for text in ("hello", " hello", "wo", " wo")}
    assert set(client.submissions[0].params.bad_words) == spelled


def test_the_order_of_a_schemas_keys_is_kept() -> None:
    definition = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["z", "a"]}
    body = {"model": "m", "prompt": "Hi", "response_format": json_schema(definition)}
    grammar = parse_request(CompletionRequest, body).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("json_schema", json.dumps(definition, separators=(",", ":")))


@pytest.mark.parametrize(
    ("spec", "grammar"),
    [
        ({"json_object": True}, Grammar("json_object", "", "structured_outputs")),
        ({"regex": "a+", "disable_any_whitespace": False}, Grammar("regex", "a+", "structured_outputs")),
        ({"choice": ["é", "b"]}, Grammar("choice", '["é","b"]', "structured_outputs")),
        ({"grammar": "# x\nroot ::= a"}, Grammar("gbnf", "# x\nroot ::= a", "structured_outputs")),
        ({"grammar": 'start: "::="'}, Grammar("lark", 'start: "::="', "structured_outputs")),
    ],
)
def test_structured_outputs_become_grammars(spec: dict[str, Any], grammar: Grammar) -> None:
    request = parse_request(CompletionRequest, {"model": "m", "prompt": "Hi", "structured_outputs": spec})
    assert request.grammar == grammar
