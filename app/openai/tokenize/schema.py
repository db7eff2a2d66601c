"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tessera.app.schema.chat import ConversationFields
from tessera.app.schema.common import MAX_NAME, Off, On, RequestModel
from tessera.app.schema.fields import MAX_PROMPT_IDS, Text, TokenId, at_most


class TokenizeTextRequest(RequestModel):
    model: str | None = Field(default=None, max_length=MAX_NAME)
    prompt: Text
    add_special_tokens: On = True
    return_token_strs: Off = False


class TokenizeChatRequest(ConversationFields):
    model: str | None = Field(default=None, max_length=MAX_NAME)
    add_special_tokens: Off = False
    return_token_strs: Off = False


class DetokenizeRequest(RequestModel):
    model: str | None = Field(default=None, max_length=MAX_NAME)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS), at_most(MAX_PROMPT_IDS)]
