"""The prompt of a response, with the oldest items left away where `truncation` is `auto` and the context short."""

from __future__ import annotations

from tessera.app.generate.sampling import checked_prompt
from tessera.app.generate.service import ChatPrompt, Service
from tessera.app.openai.responses.conversation import ResponsesChat, cuts, without_oldest
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.engine.contract.errors import ContextLengthError, RequestError


async def response_prompt(service: Service, request: ResponsesRequest, chat: ResponsesChat) -> ChatPrompt:
    """With truncation as few of the oldest messages as possible are dropped, always up to a user's.

    Raises:
        RequestError: what the chat template refuses, or a prompt that does not fit in any case.
    """
    try:
        if request.truncation != "auto":
            return await _encode(service, chat)
        return await _encode_newest(service, chat)
    except RequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def _encode_newest(service: Service, chat: ResponsesChat) -> ChatPrompt:
    candidates = cuts(chat)
    low, high = 0, len(candidates) - 1
    fitting: ChatPrompt | None = None
    while low < high:  # the least cut that fits is within [low, high]
        middle = (low + high) // 2 if fitting is not None or low > 0 else 0
        found = await _encode_if_it_fits(service, without_oldest(chat, candidates[middle]))
        if found is None:
            low = middle + 1
        else:
            high, fitting = middle, found
    return fitting if fitting is not None else await _encode(service, without_oldest(chat, candidates[high]))


async def _encode_if_it_fits(service: Service, chat: ResponsesChat) -> ChatPrompt | None:
    try:
        prompt = await _encode(service, chat)
        checked_prompt(prompt.token_ids, service.info, "input")
    except ContextLengthError:
        return None
    limit, _ = chat.token_limit
    return prompt if len(prompt.token_ids) + (limit or 1) <= service.info.max_model_len else None


async def _encode(service: Service, chat: ResponsesChat) -> ChatPrompt:
    return await service.prepare_chat(chat, add_special_tokens=False, param="input")
