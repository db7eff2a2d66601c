"""Models of what /tokenize and /detokenize return, for /openapi.json."""

from __future__ import annotations

from tessera.app.http.description import ApiObject


class TokenList(ApiObject):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(ApiObject):
    prompt: str
