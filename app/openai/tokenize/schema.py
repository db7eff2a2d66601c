"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from tessera.app.schema.chat import ConversationFields
from tessera.app.schema.examples import HELLO
from tessera.app.schema.fields import MAX_NAME, MAX_PROMPT_IDS, MAX_TOKEN_ID, Off, On, Text, TokenId, at_most
from tessera.app.schema.request import RequestModel

_TokenIds = list[Annotated[int, msgspec.Meta(ge=-MAX_TOKEN_ID, le=MAX_TOKEN_ID - 1)]]  # as msgspec has it: 64 bits


def _validate_token_ids(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """For a million ids pydantic holds the interpreter's lock for 50 ms, msgspec for 10; errors are pydantic's."""
    if type(value) is list and len(value) <= MAX_PROMPT_IDS:
        try:
            return msgspec.convert(value, _TokenIds)
        except msgspec.ValidationError:
            pass
    return validate(value)


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
        WrapValidator(_validate_token_ids),
    ]
