"""One grammar for `tool_choice`, strict functions and structured output together."""

from __future__ import annotations

import json
from typing import Any

from tessera.app.reasoning.format import THINK, ReasoningFormat, ReasoningStart
from tessera.app.schema.chat import ChatRequest
from tessera.app.schema.custom_tools import GrammarInput
from tessera.app.schema.request import log_once
from tessera.app.schema.tools import Tool
from tessera.app.tools.grammar import (
    CONTENT_SPACE,
    ESCAPED_SLASH,
    CallableFunction,
    TokenIdOf,
    calls_grammar,
    json_expression,
    literal,
    text_and_calls_grammar,
    text_grammar,
)
from tessera.app.tools.json_text import UnsupportedGrammarError
from tessera.app.tools.lark_terminals import lark_terminals, regex_grammar
from tessera.app.tools.tool_format import ToolFormat
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar


def tool_grammar(
    request: ChatRequest,
    tool_format: ToolFormat,
    reasoning: ReasoningStart,
    token_id_of: TokenIdOf,
    reasoning_format: ReasoningFormat = THINK,
) -> Grammar | None:
    """The grammar that forces calls, or valid calls; None where the request leaves both to the model.

    Raises:
        InvalidRequestError: the structured output cannot be combined with tools.
    """
    choice = request.effective_tool_choice
    functions = [
        CallableFunction(
            tool.function.name, tool.function.parameters, tool.function.strict is True, _input_grammar(tool)
        )
        for tool in request.shown_tools
        if choice.name in (None, tool.function.name)
    ]
    several = request.parallel_tool_calls is not False and choice.mode != "function"
    if not functions:
        return None
    options: dict[str, Any] = {"several": several, "reasoning": reasoning, "reasoning_format": reasoning_format}
    if choice.forced:
        text = calls_grammar(tool_format.syntax, functions, token_id_of, **options)
    elif (content := request.grammar) is not None:
        text = calls_grammar(tool_format.syntax, functions, token_id_of, **options, otherwise=_expression(content))
    elif any(function.strict for function in functions) and tool_format.opener_is_token(token_id_of):
        text = text_and_calls_grammar(tool_format.syntax, functions, token_id_of, **options)
    else:
        return None
    return Grammar("lark", text, "tools")


def answer_grammar(
    content: Grammar, reasoning: ReasoningStart, token_id_of: TokenIdOf, reasoning_format: ReasoningFormat
) -> Grammar:
    """The grammar of completions whose final message, of several, matches the request's structured output.

    Raises:
        InvalidRequestError: it is a grammar that cannot be part of another.
    """
    if reasoning == "none":
        return content
    if content.kind in ("lark", "gbnf"):
        raise InvalidRequestError(
            f"{content.param} cannot be a grammar with this model, whose answers are parts of its completions: give a"
            " JSON schema, a regular expression or a choice.",
            param=content.param,
        )
    expression = _expression(content)
    text = text_grammar(expression, token_id_of, reasoning=reasoning, reasoning_format=reasoning_format)
    return Grammar("lark", text, content.param)


def _input_grammar(tool: Tool) -> str | None:
    """The Lark grammar of a custom tool's input; None where there is none, or none that can be enforced."""
    given = tool.custom.format if tool.custom is not None else None
    if not isinstance(given, GrammarInput):
        return None
    text = given.definition if given.syntax == "lark" else regex_grammar(given.definition)
    try:
        lark_terminals(text, "X", quoted=True)
    except UnsupportedGrammarError as error:
        if given.syntax == "lark":  # an expression is in the schema as well
            log_once(f"lark {error}", "a custom tool's Lark grammar is shown to the model, but not enforced: %s", error)
        return None
    return text


def _expression(grammar: Grammar) -> str:
    """A grammar as a Lark expression."""
    if grammar.kind in ("json_schema", "json_object"):
        return json_expression(json.loads(grammar.text or '{"type": "object"}'), strict=True, space=CONTENT_SPACE)
    if grammar.kind == "choice":
        return f"({' | '.join(map(literal, json.loads(grammar.text)))})"
    if grammar.kind == "regex":
        return f"/{grammar.text.replace('/', ESCAPED_SLASH)}/"
    raise InvalidRequestError(
        f"{grammar.param} cannot be a grammar while tools may be called: set tool_choice to none or required.",
        param=grammar.param,
    )
