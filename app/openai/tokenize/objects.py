"""Models of what /tokenize and /detokenize return, for /openapi.json."""

from __future__ import annotations

from pydantic import ConfigDict

from tessera.app.http.description import ApiObject


class TokenList(ApiObject):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(ApiObject):
    """Whatever tokenizer_config.json has, besides these."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)
    tokenizer_class: str | None
    chat_template: str | None


class DetokenizedText(ApiObject):
    prompt: str
