"""The grammar of a chat's completions: tool calls, or structured output after the reasoning."""

from __future__ import annotations

import msgspec

from tessera.app.generate.prompt import ChatPrompt
from tessera.app.generate.served_model import ServedModel
from tessera.app.reasoning.format import THINK
from tessera.app.schema.chat import ChatRequest
from tessera.app.tools.choice import answer_grammar, tool_grammar
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar


def chat_grammar(model: ServedModel, request: ChatRequest, prompt: ChatPrompt) -> Grammar | None:
    """The grammar that all completions must match; None where they may be any text.

    Raises:
        InvalidRequestError: the request's structured output cannot be combined with its tools or with reasoning.
    """
    if model.tool_format is not None:
        grammar = tool_grammar(
            request, model.tool_format, prompt.reasoning, model.token_id_of, model.reasoning or THINK
        )
        if grammar is not None:
            return grammar
    if model.reasoning is not None and model.reasoning.has_channels and request.grammar is not None:
        return answer_grammar(request.grammar, prompt.reasoning, model.token_id_of, model.reasoning)
    return _grammar_after_reasoning(model, request, prompt)


def _grammar_after_reasoning(model: ServedModel, request: ChatRequest, prompt: ChatPrompt) -> Grammar | None:
    """The request's grammar, in force from the end of the reasoning where there is or may be some."""
    grammar = request.grammar
    if grammar is None or prompt.reasoning == "none":
        return grammar
    reasoning = model.reasoning or THINK
    begin, end = model.token_id_of(reasoning.begin), model.token_id_of(reasoning.end)
    if prompt.reasoning == "open":
        if end is None:
            raise InvalidRequestError(
                f"{grammar.param} cannot be used while this model reasons: turn its thinking off.",
                param=grammar.param,
            )
        return msgspec.structs.replace(grammar, start_token_id=end)
    if begin is None or end is None:
        return grammar
    return msgspec.structs.replace(grammar, start_token_id=end, section_token_id=begin)
