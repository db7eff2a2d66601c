"""Grammars that force tool calls, in llguidance's dialect of Lark.

They accept exactly the calls that the parser of the same format reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.app.text.reasoning import BEGIN as THINK_BEGIN
from tessera.app.text.reasoning import END as THINK_END
from tessera.app.text.reasoning import ReasoningStart
from tessera.app.tools import hermes, mistral, qwen_coder

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
    """A function that may be called; with `strict` every keyword of its schema must be enforced."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


class GrammarWriter:
    """Collects the rules of one grammar.

    Args:
        token_id_of: the token that is spelled by a text and is one of the vocabulary's added tokens, or
            None: grammars must name such tokens, because their spelling does not stand for them.
    """

    def __init__(self, token_id_of: TokenIdOf) -> None:
        self._token_id_of = token_id_of
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
    calls = f"space {_calls(writer, syntax, functions, several=several)}"
    return _grammar(writer, calls if otherwise is None else f"({calls} | {otherwise})", reasoning)


def text_and_calls_grammar(
    syntax: CallSyntax,
    functions: Sequence[CallableFunction],
    token_id_of: TokenIdOf,
    *,
    several: bool,
    reasoning: ReasoningStart = "none",
) -> str:
    """A grammar of any text, then valid calls or none, for formats whose calls begin with a token of their own."""
    writer = GrammarWriter(token_id_of)
    calls = _calls(writer, syntax, functions, several=several)
    return _grammar(writer, f"{writer.rule('content', ANY_TEXT)} {calls}?", reasoning)


def _calls(writer: GrammarWriter, syntax: CallSyntax, functions: Sequence[CallableFunction], *, several: bool) -> str:
    calls = [
        writer.rule(f"call_{index}", syntax.call(writer, function, f"call_{index}_part"))
        for index, function in enumerate(functions)
    ]
    writer.rule("call", " | ".join(calls))
    before, after = syntax.around(writer)
    repeated = f"call ({syntax.separator} call){{0,{MAX_CALLS - 1}}}" if several else "call"
    return writer.rule("calls", f"{before} {repeated} {after}")


def _grammar(writer: GrammarWriter, completion: str, reasoning: ReasoningStart) -> str:
    if reasoning != "none":
        thoughts = writer.rule("thoughts", writer.until("thinking", THINK_END))
        prefix = thoughts if reasoning == "open" else f"(space {writer.marker(THINK_BEGIN)} {thoughts})?"
        completion = f"{prefix} {completion}"
    return f"start: {completion}\n{writer.text()}"


def literal(text: str) -> str:
    return json.dumps(text)


def json_expression(schema: Mapping[str, Any], *, strict: bool, space: str = ARGUMENTS_SPACE) -> str:
    """JSON that satisfies a schema; keywords that cannot be enforced are an error only with `strict`."""
    options = {"lenient": not strict, "whitespace_pattern": space}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _arguments(function: CallableFunction) -> str:
    schema = _NO_PARAMETERS if function.parameters is None else {**function.parameters, "type": "object"}
    return json_expression(schema, strict=function.strict)


def _json_call(writer: GrammarWriter, function: CallableFunction, part: str, *, key: str = "arguments") -> str:
    head = literal(f'{{"name": {json.dumps(function.name)}, "{key}": ')
    return f'{head} {writer.rule(part, _arguments(function))} "}}"'


def _hermes_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    inner = _json_call(writer, function, part)
    return f"{writer.marker(hermes.BEGIN)} line_end {inner} line_end {writer.marker(hermes.END)}"


def _llama_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    return _json_call(writer, function, part, key="parameters")


def _mistral_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    arguments = writer.rule(part, _arguments(function))
    begin, marked = writer.marker(mistral.BEGIN), writer.marker(mistral.ARGUMENTS)
    return f"{begin} {literal(function.name)} {marked} {arguments}"


def _qwen_coder_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    schema = function.parameters or {}
    properties = schema.get("properties")
    required = schema.get("required")
    pieces = [writer.marker(hermes.BEGIN), "line_end", literal(f"{qwen_coder.FUNCTION}{function.name}>"), "line_end"]
    if isinstance(properties, Mapping):
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for index, (key, value) in enumerate(properties.items()):
            body = _qwen_coder_value(writer, value, definitions, f"{part}_{index}", strict=function.strict)
            parameter = f"{literal(f'{qwen_coder.PARAMETER}{key}>')} {body} line_end"
            is_required = isinstance(required, list) and key in required
            pieces.append(parameter if is_required else f"({parameter})?")
    pieces += [literal(qwen_coder.FUNCTION_END), "line_end", writer.marker(hermes.END)]
    return " ".join(pieces)


def _qwen_coder_value(
    writer: GrammarWriter, schema: Any, definitions: Mapping[str, Any], part: str, *, strict: bool
) -> str:
    """A value and its closing tag: text as it is, everything else as JSON."""
    if qwen_coder.types_of(schema) == {"string"}:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is None:
            return writer.until(part, qwen_coder.PARAMETER_END)
        value = f"({' | '.join(map(literal, choices))})"
    else:
        whole = {**schema, **definitions} if isinstance(schema, Mapping) else {}
        value = writer.rule(part, json_expression(whole, strict=strict))
    return f"line_end {value} line_end {literal(qwen_coder.PARAMETER_END)}"


HERMES = CallSyntax(_hermes_call)
QWEN_CODER = CallSyntax(_qwen_coder_call)
LLAMA = CallSyntax(_llama_call, separator='"; "')
MISTRAL_LIST = CallSyntax(_json_call, lambda writer: (f'{writer.marker(mistral.BEGIN)} space "["', '"]"'), '", "')
MISTRAL_MARKED = CallSyntax(_mistral_call, separator="")
