"""Grammars that force tool calls, in llguidance's dialect of Lark. The syntax of calls stands beside each parser."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.app.reasoning.format import THINK, ReasoningFormat, ReasoningStart
from tessera.app.reasoning.harmony import (
    ANALYSIS,
    ASSISTANT,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    START,
)
from tessera.app.schema.custom_tools import INPUT
from tessera.app.tools.lark_terminals import lark_terminals

TokenIdOf: TypeAlias = Callable[[str], int | None]

MAX_CALLS = 128
# Between parts of JSON. Models write arguments on one line; without a bound, a model may never stop.
ARGUMENTS_SPACE = r"\x20"
CONTENT_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
ANY_TEXT = r"/(.|\n)*/"
ESCAPED_SLASH = r"\/"

_COMMON_RULES = r"""
line_end: "\n"?
space: /[ \n]{0,4}/
"""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallableFunction:
    """A function that may be called; with `strict` every keyword of its schema must be enforced.

    `input_grammar`: the Lark grammar of its one argument `input`, of a custom tool.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False
    input_grammar: str | None = None


class GrammarWriter:
    """Collects the rules of one grammar.

    Args:
        token_id_of: the token that is spelled by a text and is one of the vocabulary's added tokens, or
            None: grammars must name such tokens, because their spelling does not stand for them.
    """

    def __init__(self, token_id_of: TokenIdOf) -> None:
        self._token_id_of = functools.cache(token_id_of)  # of the same few texts for each of many functions
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.removesuffix("[lazy]")

    def marker(self, text: str) -> str:
        token_id = self._token_id_of(text)
        return literal(text) if token_id is None else f"(<[{token_id}]> | {literal(text)})"

    def until(self, name: str, text: str) -> str:
        """A rule for any text up to and with a marker."""
        token_id = self._token_id_of(text)
        if token_id is not None:
            return f"{self.rule(name, ANY_TEXT)} <[{token_id}]>"
        return self.rule(f"{name}[lazy]", f"/(.|\\n)*{text.replace('/', ESCAPED_SLASH)}/")

    def ended(self, name: str, terminal: str, text: str) -> str:
        """A rule for a terminal that ends with a marker."""
        token_id = self._token_id_of(text)
        if token_id is not None:
            return f"{self.rule(name, terminal)} <[{token_id}]>"
        return self.rule(f"{name}[lazy]", f"{terminal} {literal(text)}")

    def text(self) -> str:
        return "\n".join(self._rules) + _COMMON_RULES


@dataclass(frozen=True)
class CallSyntax:
    """How a format writes its calls.

    Attributes:
        call: the expression for one call of a function, which may add rules under the given name.
        around: expressions before the first and after the last call.
        separator: expression between two calls.
    """

    call: Callable[[GrammarWriter, CallableFunction, str], str]
    around: Callable[[GrammarWriter], tuple[str, str]] = lambda writer: ("", "")
    separator: str = "line_end"


def calls_grammar(
    syntax: CallSyntax,
    functions: Sequence[CallableFunction],
    token_id_of: TokenIdOf,
    *,
    several: bool,
    reasoning: ReasoningStart = "none",
    reasoning_format: ReasoningFormat = THINK,
    otherwise: str | None = None,
) -> str:
    """A grammar of one call, or of up to MAX_CALLS calls.

    Args:
        functions: those that may be called; at least one.
        several: more than one call may be made.
        reasoning: whether reasoning may come before the calls, or has been begun by the prompt.
        otherwise: a Lark expression for completions without calls.
    """
    writer = GrammarWriter(token_id_of)
    calls = _calls(writer, syntax, functions, several=several)
    completion = f"{_before_calls(writer, reasoning, reasoning_format)} {calls}"
    if otherwise is not None:
        completion = f"({completion} | {_before_text(writer, reasoning, reasoning_format)} {otherwise})"
    return _grammar(writer, completion, reasoning, reasoning_format)


def text_and_calls_grammar(
    syntax: CallSyntax,
    functions: Sequence[CallableFunction],
    token_id_of: TokenIdOf,
    *,
    several: bool,
    reasoning: ReasoningStart = "none",
    reasoning_format: ReasoningFormat = THINK,
) -> str:
    """A grammar of any text, then valid calls or none, for formats whose calls begin with a token of their own."""
    writer = GrammarWriter(token_id_of)
    calls = _calls(writer, syntax, functions, several=several)
    text = writer.rule("content", ANY_TEXT)
    if reasoning_format.has_channels:
        text = f"{_before_text(writer, reasoning, reasoning_format)} {text}"
        completion = f"({text} | {_before_calls(writer, reasoning, reasoning_format)} {calls})"
    else:
        completion = f"{text} {calls}?"
    return _grammar(writer, completion, reasoning, reasoning_format)


def text_grammar(
    expression: str, token_id_of: TokenIdOf, *, reasoning: ReasoningStart, reasoning_format: ReasoningFormat
) -> str:
    """A grammar of completions whose answer matches a Lark expression."""
    writer = GrammarWriter(token_id_of)
    completion = f"{_before_text(writer, reasoning, reasoning_format)} {expression}"
    return _grammar(writer, completion, reasoning, reasoning_format)


def _calls(writer: GrammarWriter, syntax: CallSyntax, functions: Sequence[CallableFunction], *, several: bool) -> str:
    calls = [
        writer.rule(f"call_{index}", syntax.call(writer, function, f"call_{index}_part"))
        for index, function in enumerate(functions)
    ]
    writer.rule("call", " | ".join(calls))
    before, after = syntax.around(writer)
    repeated = f"call ({syntax.separator} call){{0,{MAX_CALLS - 1}}}" if several else "call"
    return writer.rule("calls", f"{before} {repeated} {after}")


def _grammar(writer: GrammarWriter, completion: str, reasoning: ReasoningStart, format: ReasoningFormat) -> str:
    if format.has_channels:
        completion = completion if reasoning == "none" else f"{_sections(writer)} {completion}"
    elif reasoning != "none":
        thoughts = writer.rule("thoughts", writer.until("thinking", format.end))
        prefix = thoughts if reasoning == "open" else f"(space {writer.marker(format.begin)} {thoughts})?"
        completion = f"{prefix} {completion}"
    return f"start: {completion}\n{writer.text()}"


def _before_calls(writer: GrammarWriter, reasoning: ReasoningStart, format: ReasoningFormat) -> str:
    """Where the answer has been begun, a message of its own has to end before the calls."""
    if not format.has_channels:
        return "space"
    return next_message(writer) if reasoning == "none" else ""


def _before_text(writer: GrammarWriter, reasoning: ReasoningStart, format: ReasoningFormat) -> str:
    if not format.has_channels or reasoning == "none":
        return ""
    return f"{writer.marker(CHANNEL)} {literal(FINAL)} {json_mark(writer)} {writer.marker(MESSAGE)}"


def _sections(writer: GrammarWriter) -> str:
    """Messages before the answer: reasoning, and text that announces calls."""
    channel = f"({literal(ANALYSIS)} | {literal(COMMENTARY)})"
    body = writer.until("section_text", END)
    head = f"{writer.marker(CHANNEL)} {channel} {writer.marker(MESSAGE)}"
    return f"{writer.rule('section', f'{head} {body} {writer.marker(START)} {literal(ASSISTANT)}')}*"


def next_message(writer: GrammarWriter) -> str:
    """The end of a message of harmony and the beginning of another."""
    return f"{writer.marker(END)} {writer.marker(START)} {literal(ASSISTANT)}"


def json_mark(writer: GrammarWriter) -> str:
    """The optional mark of a JSON message in a harmony header."""
    return f'(" "? {writer.marker(CONSTRAIN)} "json" | " json")?'


def literal(text: str) -> str:
    return json.dumps(text)


def json_expression(schema: Mapping[str, Any], *, strict: bool, space: str = ARGUMENTS_SPACE) -> str:
    """JSON that satisfies a schema; keywords that cannot be enforced are an error only with `strict`."""
    options = {"lenient": not strict, "whitespace_pattern": space}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def input_terminal(writer: GrammarWriter, function: CallableFunction, part: str, *, quoted: bool) -> str:
    """The terminal of a custom tool's input; `quoted`: as it stands in a JSON string, without its quotes."""
    assert function.input_grammar is not None
    name, terminals = lark_terminals(function.input_grammar, part.upper(), quoted=quoted)
    for terminal, body in terminals:
        writer.rule(terminal, body)
    return name


def arguments_expression(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    """A function's arguments as a JSON object; `part` is a name for rules."""
    if function.input_grammar is not None:
        text = input_terminal(writer, function, part, quoted=True)
        return writer.rule(f"{part.upper()}_OBJECT", rf"/\{{ ?\x22{INPUT}\x22 ?: ?\x22/ {text} /\x22 ?\}}/")
    schema = _NO_PARAMETERS if function.parameters is None else {**function.parameters, "type": "object"}
    return json_expression(schema, strict=function.strict)


def json_call(writer: GrammarWriter, function: CallableFunction, part: str, *, key: str = "arguments") -> str:
    """A call as an object with a name and arguments."""
    head = literal(f'{{"name": {json.dumps(function.name)}, "{key}": ')
    return f'{head} {writer.rule(part, arguments_expression(writer, function, part))} "}}"'


def value_expression(writer: GrammarWriter, function: CallableFunction, schema: Any, part: str) -> str:
    """A parameter's value as JSON; `part` is a name for rules."""
    if function.input_grammar is not None:
        text = input_terminal(writer, function, part, quoted=True)
        return writer.rule(f"{part.upper()}_VALUE", rf"/\x22/ {text} /\x22/")
    definitions = definitions_of(function)
    whole = {**schema, **definitions} if isinstance(schema, Mapping) else {}
    return json_expression(whole, strict=function.strict)


def parameters_of(function: CallableFunction) -> list[tuple[str, Any, bool]]:
    """Name, schema and necessity of each parameter, in the order of the schema."""
    schema = function.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    return [(name, value, isinstance(required, list) and name in required) for name, value in properties.items()]


def definitions_of(function: CallableFunction) -> dict[str, Any]:
    """The schemas that references within a function's parameters name."""
    schema = function.parameters or {}
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
