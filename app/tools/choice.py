"""One grammar for `tool_choice`, strict functions and structured output together."""

from __future__ import annotations

import json

from tessera.app.schema.chat import ChatRequest
from tessera.app.text.reasoning import ReasoningStart
from tessera.app.tools.formats import ToolFormat
from tessera.app.tools.grammar import (
    CONTENT_SPACE,
    ESCAPED_SLASH,
    CallableFunction,
    TokenIdOf,
    calls_grammar,
    json_expression,
    literal,
    text_and_calls_grammar,
)
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar


def tool_grammar(
    request: ChatRequest, tool_format: ToolFormat, reasoning: ReasoningStart, token_id_of: TokenIdOf
) -> Grammar | None:
    """The grammar that forces calls, or valid calls; None where the request leaves both to the model.

    Raises:
        InvalidRequestError: the structured output cannot be combined with tools.
    """
    choice = request.effective_tool_choice
    functions = [
        CallableFunction(tool.function.name, tool.function.parameters, tool.function.strict is True)
        for tool in request.shown_tools
        if choice.name in (None, tool.function.name)
    ]
    several = request.parallel_tool_calls is not False and choice.mode != "function"
    if not functions:
        return None
    if choice.forced:
        text = calls_grammar(tool_format.syntax, functions, token_id_of, several=several, reasoning=reasoning)
    elif (content := request.grammar) is not None:
        text = calls_grammar(
            tool_format.syntax,
            functions,
            token_id_of,
            several=several,
            reasoning=reasoning,
            otherwise=_expression(content),
        )
    elif any(function.strict for function in functions) and tool_format.opener_is_token(token_id_of):
        text = text_and_calls_grammar(tool_format.syntax, functions, token_id_of, several=several, reasoning=reasoning)
    else:
        return None
    return Grammar("lark", text, "tools")


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
