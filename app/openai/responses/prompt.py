"""The prompt of a response; with `truncation: auto` the oldest items are dropped if the context is too short."""

from __future__ import annotations

from tessera.app.generate.prompt import ChatPrompt, checked_prompt, render_chat
from tessera.app.generate.served_model import ServedModel
from tessera.app.openai.responses.conversation import ResponsesChat, cuts, without_oldest
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.engine.contract.errors import ContextLengthError, RequestError


async def response_prompt(model: ServedModel, request: ResponsesRequest, chat: ResponsesChat) -> ChatPrompt:
    """Truncation drops as few of the oldest messages as possible, always up to a message of the user.

    Raises:
        RequestError: the chat template refuses the messages, or the prompt does not fit in any case.
    """
    try:
        if request.truncation != "auto":
            return await _encode(model, chat)
        return await _encode_newest(model, chat)
    except RequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def _encode_newest(model: ServedModel, chat: ResponsesChat) -> ChatPrompt:
    candidates = cuts(chat)
    low, high = 0, len(candidates) - 1
    fitting: ChatPrompt | None = None
    while low < high:  # the smallest cut that fits is within [low, high]
        middle = (low + high) // 2 if fitting is not None or low > 0 else 0
        found = await _encode_if_it_fits(model, without_oldest(chat, candidates[middle]))
        if found is None:
            low = middle + 1
        else:
            high, fitting = middle, found
    return fitting if fitting is not None else await _encode(model, without_oldest(chat, candidates[high]))


async def _encode_if_it_fits(model: ServedModel, chat: ResponsesChat) -> ChatPrompt | None:
    try:
        prompt = await _encode(model, chat)
        checked_prompt(prompt.token_ids, model.info, "input")
    except ContextLengthError:
        return None
    limit, _ = chat.token_limit
    return prompt if len(prompt.token_ids) + (limit or 1) <= model.info.max_model_len else None


async def _encode(model: ServedModel, chat: ResponsesChat) -> ChatPrompt:
    return await render_chat(model, chat, param="input")
