"""Chats to tokens, by the model's chat template; the assistant's messages alone have weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from tessera.app.text.chat_template import ChatTemplate
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.training.conversations import TrainingConversation
from tessera.engine.contract.errors import ConfigError, InvalidRequestError


class EncodedChat(NamedTuple):
    """Tokens, and whether each counts in the loss."""

    token_ids: list[int]
    counted: list[bool]


class _Span(NamedTuple):
    """Where an assistant's message stands in a rendered text: from the end of the prompt for it to its own end."""

    start: int
    stop: int


class ConversationEncoder:
    """Encodes as the server does: the prompt up to an assistant's message, then what the model should write.

    A message counts up to its end-of-sequence token. Where the template shows an earlier message otherwise than it
    showed it as the last one, as templates do that drop reasoning, each message of the assistant becomes an example of
    its own.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def encode(self, conversation: TrainingConversation) -> Iterator[EncodedChat]:
        """Holds a few texts at a time, however many messages there are.

        Raises: ConfigError where the template cannot render the messages, or tell where the assistant's begin.
        """
        messages = [message.for_template() for message in conversation.messages]
        tools = [tool.for_template() for tool in conversation.shown_tools] or None
        text, is_one = "", True
        spans: list[_Span] = []  # of `text`, while every text begins with the one before
        for index in (index for index, message in enumerate(conversation.messages) if message.is_trained):
            before, (text, start) = text, self._render(messages, index, tools)
            span = _Span(start, len(text))
            if is_one and not text.startswith(before):
                is_one = False
                for earlier in spans:
                    yield self._encode(before, [earlier])
            if is_one:
                spans.append(span)
            else:
                yield self._encode(text, [span])
        if is_one:
            yield self._encode(text, spans)

    def _render(
        self, messages: list[dict[str, Any]], index: int, tools: list[dict[str, Any]] | None
    ) -> tuple[str, int]:
        """The text up to and with the message, and where that begins."""
        try:
            prompt = self._template.render(messages[:index], tools=tools)
            text = self._template.render(messages[: index + 1], tools=tools, add_generation_prompt=False)
        except InvalidRequestError as error:
            raise ConfigError(error.message) from None
        if not text.startswith(prompt):
            raise ConfigError(
                f"The model's chat template shows messages[{index}] otherwise than it asks for one, so it cannot be "
                "told where the assistant's words begin."
            )
        return text, len(prompt)

    def _encode(self, text: str, spans: list[_Span]) -> EncodedChat:
        """The text up to the end of the last span.

        Prompts and messages are encoded apart, since a prompt ends where the model begins to write."""
        token_ids: list[int] = []
        counted: list[bool] = []
        end = 0
        for span in spans:
            before, own = (
                self._tokenizer.encode(piece, add_special_tokens=False)
                for piece in (text[end : span.start], text[span.start : span.stop])
            )
            last = next((place for place, token_id in enumerate(own) if token_id in self._eos), len(own) - 1)
            token_ids += [*before, *own]
            counted += [False] * len(before) + [place <= last for place in range(len(own))]
            end = span.stop
        return EncodedChat(token_ids, counted)
