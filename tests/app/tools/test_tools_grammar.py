"""Grammars of forced calls: whatever they let through, the parser of the same format reads as the right calls."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random
from typing import Any

import llguidance
import pytest
import tokenizers
from tokenizers import AddedToken

from tessera.app.generate.reader import CompletionReader
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.reasoning.format import ReasoningStart
from tessera.app.reasoning.splitter import ReasoningSplitter
from tessera.app.schema.request import parse_request
from tessera.app.tools.choice import tool_grammar
from tessera.app.tools.formats.registry import FORMATS, choose_format
from tessera.app.tools.grammar import CallableFunction, calls_grammar
from tessera.app.tools.json_text import UnsupportedGrammarError
from tessera.app.tools.lark_terminals import lark_terminals, regex_grammar
from tessera.app.tools.parts import CallArguments, Content, Part
from tessera.app.tools.tool_format import ToolFormat
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar
from tests.support.cases.tool_texts import message_of
from tests.support.servers.http_fixtures import byte_level_tokenizer

SEED = 20
# Qwen3-Coder's tags within a call are text, and so is a fence of Markdown.
TEXTS = {"<function=", "</function>", "<parameter=", "</parameter>"}
MARKERS = {text for form in FORMATS.values() for text in form.parser.markers}
SPECIAL = tuple(sorted({"<think>", "</think>", *MARKERS} - TEXTS))
MISTRAL_TEMPLATE = "{{ tools }}[TOOL_CALLS]f[ARGS]{}"
ALL_FORMATS = {
    **{str(name): form for name, form in FORMATS.items()},
    "mistral_marked": choose_format("auto", [MISTRAL_TEMPLATE]),
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Bad Kissingen"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F", None]}},
}
THOUGHTS: dict[ReasoningStart, str] = {
    "none": "",
    "possible": "<think>\nhm <b>\n</think>\n\n",
    "open": "hm</think>",
}


def byte_tokenizer(*special: str) -> tokenizers.Tokenizer:
    inner = byte_level_tokenizer()
    inner.add_special_tokens([AddedToken(text, special=True) for text in special])
    return inner


DECODERS = {False: byte_tokenizer(), True: byte_tokenizer(*SPECIAL)}
FUNCTIONS = [CallableFunction("weather", WEATHER, strict=True), CallableFunction("ping", None)]


@cache
def tokenizer(with_special: bool) -> tuple[llguidance.LLTokenizer, dict[int, str], dict[str, int]]:
    """Bytes as tokens, and the markers as added tokens or not -> (for grammars, texts of ids, ids of markers)."""
    inner = DECODERS[with_special]
    texts = {
        token_id: inner.decode([token_id], skip_special_tokens=False) for token_id in range(inner.get_vocab_size())
    }
    markers = {text: token_id for text in SPECIAL if (token_id := inner.token_to_id(text)) is not None}
    return llguidance.LLTokenizer(inner.to_str(), eos_token=[0]), texts, markers


def random_answer(grammar: str, rng: Random, prefix: str, *, with_special: bool) -> str:
    """Any tokens that the grammar allows after a prefix, the end where it allows that."""
    inner, texts, _ = tokenizer(with_special)
    matcher = llguidance.LLMatcher(inner, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    answer = inner.tokenize_str(prefix)
    assert matcher.consume_tokens(inner.tokenize_str(prefix)), f"{prefix!r} is not allowed"
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [i for i in texts if mask[i // 8] >> i % 8 & 1]
        plain = [i for i in allowed if texts[i].isprintable() and texts[i].isascii()]
        assert allowed, f"nothing can follow {answer!r}"
        token_id = rng.choice(plain if plain and rng.random() < 0.8 else allowed)
        assert len(answer) < 20000, answer
        if len(answer) > 500 and 0 in allowed:
            token_id = 0
        assert matcher.consume_token(token_id)
        if token_id != 0:
            answer.append(token_id)
    assert matcher.is_accepting()
    return DECODERS[with_special].decode(answer, skip_special_tokens=False)


def read(form: ToolFormat, text: str, reasoning: ReasoningStart = "none") -> list[Part]:
    tools = {function.name: function.parameters or {} for function in FUNCTIONS}
    splitter = None if reasoning == "none" else ReasoningSplitter(opened=reasoning == "open")
    reader = CompletionReader(splitter, form.parser(tools))
    reader.read_text(text)
    reader.finish(cut=False)
    return reader.take_parts()


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "ping":
        assert arguments == {}
        return
    assert name == "weather"
    assert {"city", "days"} <= set(arguments) <= set(WEATHER["properties"])
    assert arguments["city"] in ("Paris", "Bad Kissingen")
    assert type(arguments["days"]) is int
    assert 1 <= arguments["days"] <= 9
    assert type(arguments.get("exact", True)) is bool
    assert arguments.get("unit") in ("C", "F", None)


@pytest.mark.parametrize("with_special", [False, True])
@pytest.mark.parametrize("reasoning", ["none", "possible", "open"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_forced_calls_cannot_fail(name: str, several: bool, reasoning: ReasoningStart, with_special: bool) -> None:
    form = ALL_FORMATS[name]
    assert form is not None
    markers = tokenizer(with_special)[2]
    grammar = calls_grammar(form.syntax, FUNCTIONS, markers.get, several=several, reasoning=reasoning)
    rng = Random(SEED)
    print("seed", SEED)
    counts: set[int] = set()
    for attempt in range(64):
        if attempt >= 8 and (not several or max(counts) > 1):
            break
        text = random_answer(grammar, rng, THOUGHTS[reasoning], with_special=with_special)
        parts = read(form, text, reasoning)
        _, calls = message_of(parts)
        assert not [part for part in parts if isinstance(part, Content)], text
        assert calls, text
        counts.add(len(calls))
        for called, arguments in calls:
            check_arguments(called, json.loads(arguments))
    assert several or counts == {1}
    assert not several or max(counts) > 1


def test_text_values_of_qwen_coder_are_free() -> None:
    form = FORMATS["qwen3_coder"]
    function = CallableFunction("ping", {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}})
    grammar = calls_grammar(form.syntax, [function], tokenizer(True)[2].get, several=False)
    assert accepts(
        grammar, '<tool_call><function=ping><parameter=text>\na <b>\n"c"\n</parameter></function></tool_call>'
    )
    assert accepts(grammar, "<tool_call>\n<function=ping>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>")
    assert not accepts(grammar, "<tool_call><function=ping><parameter=n>\ntwelve\n</parameter></function></tool_call>")
    assert not accepts(grammar, "I would rather not.")


def accepts(grammar: str, text: str) -> bool:
    inner = tokenizer(True)[0]
    matcher = llguidance.LLMatcher(inner, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = inner.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def grammar_of(**fields: Any) -> Grammar | None:
    tools = [
        {"type": "function", "function": {"name": f.name, "parameters": f.parameters, "strict": strict}}
        for f, strict in zip(FUNCTIONS, (fields.pop("strict", None), None), strict=True)
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    request = parse_request(ChatCompletionRequest, body)
    request.check()
    return tool_grammar(request, FORMATS["hermes"], "none", tokenizer(True)[2].get)


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


RIGHT = call_of("weather", {"city": "Paris", "days": 2})
WRONG = call_of("weather", {"city": "Rome", "days": 2})


def test_a_named_choice_allows_one_call_of_that_function() -> None:
    grammar = grammar_of(tool_choice={"type": "function", "function": {"name": "ping"}})
    assert grammar is not None
    assert grammar.param == "tools"
    assert accepts(grammar.text, call_of("ping", {}))
    assert not accepts(grammar.text, call_of("ping", {}) * 2)
    assert not accepts(grammar.text, RIGHT)


def test_a_required_choice_allows_calls_and_nothing_else() -> None:
    grammar = grammar_of(tool_choice="required")
    assert grammar is not None
    assert accepts(grammar.text, RIGHT + call_of("ping", {}))
    assert not accepts(grammar.text, "It is sunny.")
    assert not accepts(grammar.text, f"It is sunny.{RIGHT}")
    single = grammar_of(tool_choice="required", parallel_tool_calls=False)
    assert single is not None
    assert accepts(single.text, RIGHT)
    assert not accepts(single.text, RIGHT * 2)


def test_an_automatic_choice_is_the_models_unless_functions_are_strict() -> None:
    assert grammar_of() is None
    assert grammar_of(tool_choice="none", strict=True) is None
    grammar = grammar_of(strict=True)
    assert grammar is not None
    assert accepts(grammar.text, "It is sunny.")
    assert accepts(grammar.text, f"Let me see.\n{RIGHT}")
    assert not accepts(grammar.text, WRONG)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            '{"a": 1}',
            '{"a": "b"}',
        ),
        ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"structured_outputs": {"regex": "a/b+"}}, "a/bbb", "a/c"),
    ],
)
def test_an_answer_is_of_the_asked_form_or_calls(fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = grammar_of(**fields)
    assert grammar is not None
    assert accepts(grammar.text, right)
    assert accepts(grammar.text, RIGHT)
    assert not accepts(grammar.text, wrong)
    forced = grammar_of(**fields, tool_choice="required")
    assert forced is not None
    assert not accepts(forced.text, right)


def test_a_grammar_of_ones_own_and_tools_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs cannot be a grammar while tools may be called"):
        grammar_of(structured_outputs={"grammar": 'start: "a"'})


# Grammars of custom tools' inputs.

PATCH = r"""
start: line+ END
?line.2: sign TEXT? LF -> changed  // with a comment: "
sign: "+" | "-" | "a".."c" | "[" "x"~2..3 ["!"] "]"
TEXT: /[^\n]{1,8}/
END: "end \"q\"\\" | "STOP"i
%import common.LF
"""
PATCH_TEXT = re.compile(r"""(?:(?:[-+abc]|\[x{2,3}!?\])[^\n]{0,8}\n)+(?:end "q"\\|(?i:stop))""")
SPACED = r"""
start: "set" NAME "=" (NUMBER | /['\\"]/)
%import common (CNAME, NUMBER)
%import common.WS
%ignore WS
NAME: CNAME
"""
SPACED_TEXT = re.compile(r"""\s*set\s*[_a-zA-Z]\w*\s*=\s*(?:[\d.]+(?:[eE][-+]?\d+)?|['"\\])\s*""", re.ASCII)
EXPRESSION = r"""(?:[a-z"\\\n/]{1,9}|\S\d+\.|\t\x22(?i:ok)/)"""
INPUTS: dict[str, tuple[str, str, re.Pattern[str]]] = {
    "rules": ("lark", PATCH, PATCH_TEXT),
    "ignored": ("lark", SPACED, SPACED_TEXT),
    "expression": ("regex", EXPRESSION, re.compile(EXPRESSION)),
}


def noting(syntax: str, definition: str, **fields: Any) -> ChatCompletionRequest:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tools = [{"type": "custom", "custom": {"name": "note", "format": grammar}}]
    messages = [{"role": "user", "content": "hi"}]
    return parse_request(ChatCompletionRequest, {"model": "m", "messages": messages, "tools": tools, **fields})


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("with_special", [False, True])
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_the_input_of_a_custom_tool_matches_its_grammar(name: str, with_special: bool, kind: str) -> None:
    form, (syntax, definition, expected) = ALL_FORMATS[name], INPUTS[kind]
    assert form is not None
    request = noting(syntax, definition, tool_choice="required", parallel_tool_calls=False)
    grammar = tool_grammar(request, form, "none", tokenizer(with_special)[2].get)
    assert grammar is not None
    rng = Random(SEED)
    print("seed", SEED)
    for _ in range(3):
        text = random_answer(grammar.text, rng, "", with_special=with_special)
        parser = form.parser({"note": request.shown_tools[0].function.parameters or {}})
        reader = CompletionReader(None, parser, custom_tools=frozenset({"note"}))
        reader.read_text(text)
        reader.finish(cut=False)
        written = "".join(part.text for part in reader.take_parts() if isinstance(part, CallArguments))
        assert expected.fullmatch(written), text


def test_an_input_may_be_free_to_come_or_not() -> None:
    form = FORMATS["hermes"]
    grammar = tool_grammar(noting("lark", 'start: "yes"'), form, "none", tokenizer(True)[2].get)
    assert grammar is not None
    text = 'so <tool_call>\n{"name": "note", "arguments": {"input": "'
    assert random_answer(grammar.text, Random(SEED), text, with_special=True).startswith(text + 'yes"}')


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ('start: "(" start ")" | "x"', "start, which refers to itself"),
        ("start: a\na: b\nb: a", "a, which refers to itself"),
        ("start: missing", "missing, which is not defined"),
        ('begin: "x"', "no rule start"),
        ('start: %json {"type": "object"}', "'%'"),
        ("start: /\\p{L}/", "p"),
        ("start: /[[:alpha:]]/", "[["),
        ("start: /[a-z&&b]/", "[a-z&&b]"),
        ("start: /[z-a]/", "z-a"),
        ("%import common.SQL_COMMENT\nstart: SQL_COMMENT", "common.SQL_COMMENT"),
        ("start: <[5]>", "'<'"),
        ('start: "' + "x" * 2**14 + '"', "more than 16384 characters"),
    ],
)
def test_grammars_that_are_only_shown(definition: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """They do not end a session: the call is valid, its input is any text."""
    request = noting("lark", definition, tool_choice="required")
    with pytest.raises(UnsupportedGrammarError, match=re.escape(reason)):
        lark_terminals(definition, "X", quoted=True)
    grammar = tool_grammar(request, FORMATS["hermes"], "none", tokenizer(True)[2].get)
    assert grammar is not None
    assert '"type": "string"' in grammar.text


SETS = (".", r"[^\n]", r"\s", r"\S", r'["\\]', r"[^\x00-\x1e]", r"[\t-\r]")


@pytest.mark.parametrize("pattern", SETS)
def test_a_set_matches_the_same_characters_in_json(pattern: str) -> None:
    inner = tokenizer(False)[0]
    name, terminals = lark_terminals(regex_grammar(pattern), "X", quoted=True)
    lines = "\n".join(f"{terminal}: {body}" for terminal, body in terminals)
    source = llguidance.LLMatcher.grammar_from_lark(f"start: X\nX: {name}\n{lines}")
    first = llguidance.LLMatcher(inner, source, log_level=0)
    for character in (*map(chr, range(64)), *map(chr, range(90, 100)), "€", "🙂"):
        if pattern in (r"\s", r"\S") and character in "\x1c\x1d\x1e\x1f":
            continue  # white space for Python, not for Unicode
        matcher = first.deep_copy()
        tokens = inner.tokenize_str(json.dumps(character, ensure_ascii=False)[1:-1])
        matches = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert matches == (re.fullmatch(pattern, character) is not None), repr(character)


def test_a_long_chain_of_rules_is_read() -> None:
    chain = "\n".join(f"r{number}: r{number + 1}" for number in range(1000))
    name, terminals = lark_terminals(f'start: r0\n{chain}\nr1000: "x"', "X", quoted=True)
    assert (name, len(terminals)) == ("X_R_START", 1002)
