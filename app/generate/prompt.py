"""Prompts: from texts, token ids and conversations to token ids that the engine takes."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tessera.app.generate.sampling import bad_word_ids, spellings_of
from tessera.app.generate.served_model import ServedModel
from tessera.app.reasoning.format import ReasoningStart
from tessera.app.schema.chat import ChatRequest, ConversationFields
from tessera.app.schema.generation_fields import GenerationRequest
from tessera.app.text.chat_template import ChatTemplate, check_kwargs
from tessera.app.text.tokenizer import are_small, check_text_length, prompt_too_long
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import EmbeddingInfo, EngineInfo, ScorerInfo, TokenIds

PROMPT_TIMEOUT = 60.0  # seconds for a prompt to be prepared, waiting for a thread included
MAX_INLINE_IDS = 1024  # up to so many are checked or decoded on the event loop, in well under a millisecond
IDS_AT_A_TIME = 2**14  # that are packed in one call, which keeps the interpreter's lock
TEMPLATE_OVERHEAD = 2**20  # characters that a template may add to the messages


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    """A rendered conversation; `reasoning` says whether the completion begins with reasoning."""

    token_ids: list[int]
    reasoning: ReasoningStart


async def encode_text(model: ServedModel, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text. Raises ContextLengthError for one that cannot fit the context."""
    (token_ids,) = await encode_texts(model, [text], add_special_tokens=add_special_tokens, param=param)
    return token_ids


async def encode_texts(
    model: ServedModel, texts: Sequence[str], *, add_special_tokens: bool, param: str
) -> list[list[int]]:
    """Token ids of each text. Raises ContextLengthError for one that cannot fit the context."""
    for text in texts:
        check_text_length(model.tokenizer, len(text), model.info.max_model_len, param)
    encode = partial(model.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)
    return encode() if are_small(texts) else await model.workers.run(encode, timeout=PROMPT_TIMEOUT)


async def encode_bad_words(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that completions must not have. Raises InvalidRequestError for one without tokens."""
    spellings = spellings_of(words)
    encode = partial(bad_word_ids, words, spellings, model.tokenizer)
    return encode() if are_small(spellings) else await model.workers.run(encode, timeout=PROMPT_TIMEOUT)


async def encode_prediction(model: ServedModel, text: str) -> TokenIds:
    """Token ids of a text that is expected to come, as far as the context could hold it."""
    text = text[: model.info.max_model_len * model.tokenizer.max_token_chars]
    found = await model.workers.run(model.tokenizer.encode, text, add_special_tokens=False, timeout=PROMPT_TIMEOUT)
    return array("i", found[: model.info.max_model_len])


async def render_chat(
    model: ServedModel, request: ConversationFields, *, add_special_tokens: bool = False, param: str = "messages"
) -> ChatPrompt:
    """A conversation through the chat template; `param` is the field that it comes from, for errors.

    Raises:
        InvalidRequestError: the model has no template, or it cannot render these messages or tools.
        ContextLengthError: the messages cannot fit the context.
    """
    model.check_generates()
    template = _checked_template(model, request)
    tokenizer, max_model_len = model.tokenizer, model.info.max_model_len
    num_chars = sum(len(message.content or "") for message in request.messages)
    check_text_length(tokenizer, num_chars, max_model_len, param)

    def render_and_encode() -> ChatPrompt:
        text = template.render(
            [message.for_template() for message in request.messages],
            tools=[tool.for_template() for tool in request.shown_tools] or None,
            documents=request.documents or None,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=request.continue_final_message,
            extra=_template_variables(template, request),
            source=request.template_source,
            seconds=model.settings.template_timeout,
            max_chars=max_model_len * tokenizer.max_token_chars + TEMPLATE_OVERHEAD,
        )
        check_text_length(tokenizer, len(text), max_model_len, param)
        continued = request.messages[-1].content if request.continue_final_message else None
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ChatPrompt(
            token_ids, model.reasoning.start_of(text, continued) if model.reasoning is not None else "none"
        )

    return await model.workers.run(render_and_encode, timeout=PROMPT_TIMEOUT)


def _template_variables(template: ChatTemplate, request: ConversationFields) -> dict[str, Any]:
    """The request's own, and the schema of its structured output where the template shows it to the model."""
    grammar = request.grammar if template.shows_schemas and isinstance(request, ChatRequest) else None
    if grammar is None or grammar.kind != "json_schema":
        return request.template_variables
    return {"response_schema": grammar.text, **request.template_variables}


def truncated(request: GenerationRequest, token_ids: list[int], info: EngineInfo) -> list[int]:
    """As many of the prompt's tokens as `truncate_prompt_tokens` says, from the side that `truncation_side` leaves."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, info.max_model_len - (request.token_limit[0] or 1))
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def checked_token_ids(token_ids: list[int], info: EngineInfo | EmbeddingInfo | ScorerInfo, param: str) -> TokenIds:
    """The ids in the engine's form. Raises InvalidRequestError for ids outside the vocabulary."""
    with contextlib.suppress(OverflowError):
        unsigned = array("I")  # takes no negative ids, and is packed in a third of the time of "i"
        for begin in range(0, len(token_ids), IDS_AT_A_TIME):
            unsigned.fromlist(token_ids[begin : begin + IDS_AT_A_TIME])
        if np.frombuffer(unsigned, np.uint32).max(initial=0) < info.vocab_size:  # compares them all at once
            return array("i", unsigned.tobytes())
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size)
    raise InvalidRequestError(f"{param} has token id {wrong}, but ids go from 0 to {info.vocab_size - 1}.", param=param)


def checked_prompt(token_ids: list[int], info: EngineInfo, param: str) -> TokenIds:
    """A prompt in the engine's form.

    Raises:
        InvalidRequestError: it is empty or has ids outside the vocabulary.
        ContextLengthError: it fills the context.
    """
    if not token_ids:
        raise InvalidRequestError(f"{param} must not be empty: it has no tokens.", param=param)
    checked = checked_token_ids(token_ids, info, param)
    if len(token_ids) >= info.max_model_len:
        raise prompt_too_long(len(token_ids), info.max_model_len, param)
    return checked


def _checked_template(model: ServedModel, request: ConversationFields) -> ChatTemplate:
    """The model's template. Raises InvalidRequestError where it cannot take the request's arguments or tools."""
    if model.template is None:
        raise InvalidRequestError(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
            code="no_chat_template",
        )
    check_kwargs(request.chat_template_kwargs or {})
    if request.template_source is not None and not model.settings.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is only accepted where the server was started with --trust-request-chat-template.",
            param="chat_template",
        )
    if request.documents and request.template_source is None and "documents" not in model.template.variables:
        raise InvalidRequestError(
            "documents are not supported by this model: its chat template does not show them.", param="documents"
        )
    if request.shown_tools and model.tool_format is None:
        raise InvalidRequestError(
            "tools are not supported by this model: its chat template shows no format of calls that is known"
            " here (see --tool-call-parser).",
            param="tools",
        )
    return model.template
