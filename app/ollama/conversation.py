"""A request of Ollama's API as a chat: fields take the names of Chat Completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ConfigDict

from tessera.app.generate.prompt import ChatPrompt, encode_text, render_chat
from tessera.app.generate.served_model import ServedModel
from tessera.app.ollama.messages import chat_messages
from tessera.app.ollama.options import OllamaOptions
from tessera.app.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from tessera.app.schema.chat import ChatMessage, ChatRequest


class OllamaChat(ChatRequest):
    """The chat that a request amounts to; its fields have been checked under Ollama's names."""

    model_config = ConfigDict(defer_build=True)  # never validated
    response_format_param: ClassVar[str] = "format"
    always_clamps: ClassVar[bool] = True

    @property
    def shows_reasoning(self) -> bool:
        return self.reasoning_effort != "none"


def chat_of(name: str, request: OllamaChatRequest) -> OllamaChat:
    """The chat of /api/chat, checked; `name` is the model's as it is served. Raises InvalidRequestError."""
    messages = chat_messages(request.messages)
    last = messages[-1]
    # As in Ollama, the beginning of an answer is continued.
    continues = last.role == "assistant" and not last.tool_calls
    chat = _chat(request, name, messages, tools=request.tools, continue_final_message=continues)
    chat.check()
    return chat


def generate_chat(request: OllamaGenerateRequest, name: str) -> OllamaChat:
    """The chat of /api/generate: the system message, if there is one, and the prompt."""
    messages = [ChatMessage(role="system", content=request.system)] if request.system else []
    messages.append(ChatMessage(role="user", content=request.prompt))
    return _chat(request, name, messages)


def _chat(request: OllamaRequest, name: str, messages: Sequence[ChatMessage], **fields: Any) -> OllamaChat:
    return OllamaChat.model_construct(
        model=name,
        messages=list(messages),
        stream=request.stream,
        response_format=request.format,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        **_thinking_fields(request.think),
        **(request.options or OllamaOptions()).chat_fields(),
        **fields,
    )


def _thinking_fields(think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if think is True:
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    return {"reasoning_effort": think or "none"}


def takes_prompt_as_it_is(request: OllamaGenerateRequest, model: ServedModel) -> bool:
    """Whether a prompt is continued rather than answered: as it asks, or because the model has no chat template."""
    return request.raw or (model.template is None and not request.system)


async def raw_prompt(model: ServedModel, request: OllamaGenerateRequest) -> list[int]:
    """Token ids of a prompt that is continued, after those of the `context`."""
    context = request.context or []
    ids = await encode_text(model, request.prompt or "", add_special_tokens=not context, param="prompt")
    return context + ids


async def chat_prompt(model: ServedModel, request: OllamaGenerateRequest, chat: OllamaChat) -> ChatPrompt:
    """The prompt through the chat template, after the `context`, in which the text has begun already."""
    prompt = await render_chat(model, chat, param="prompt")
    if not request.context:
        return prompt
    begin = model.token_id_of(model.tokenizer.special_tokens.get("bos_token") or "")
    ids = prompt.token_ids[1:] if begin is not None and prompt.token_ids[:1] == [begin] else prompt.token_ids
    return replace(prompt, token_ids=request.context + ids)
