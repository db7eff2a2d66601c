"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tessera.app.schema.chat import ConversationFields
from tessera.app.schema.examples import HELLO
from tessera.app.schema.fields import MAX_NAME, MAX_PROMPT_IDS, MAX_TOKEN_ID, Off, On, Text, TokenId, at_most, ids_from
from tessera.app.schema.request import RequestModel


class TokenizeTextRequest(RequestModel):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"text": {"prompt": "Hello!"}}

    model: str | None = Field(default=None, max_length=MAX_NAME)
    prompt: Text
    add_special_tokens: On = True
    return_token_strs: Off = False


class TokenizeChatRequest(ConversationFields):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "conversation": {"messages": HELLO, "return_token_strs": True}
    }

    model: str | None = Field(default=None, max_length=MAX_NAME)
    add_special_tokens: Off = False
    return_token_strs: Off = False

    def check(self) -> None:
        self.check_conversation()


class DetokenizeRequest(RequestModel):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"tokens": [5, 6, 7]}}

    model: str | None = Field(default=None, max_length=MAX_NAME)
    tokens: Annotated[
        list[TokenId],
        Field(max_length=MAX_PROMPT_IDS),
        at_most(MAX_PROMPT_IDS),
        ids_from(-MAX_TOKEN_ID),
    ]
