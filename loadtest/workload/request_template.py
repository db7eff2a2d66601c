"""The JSON of a request, by endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class RequestTemplate:
    """The fields that all requests of a run share.

    Attributes:
        model: name sent.
        endpoint: path below the base URL; one that ends in chat/completions gets messages, any other a prompt.
        stream: stream the completion, with its usage at the end.
        ignore_eos: generate the full number of tokens, whatever the model says.
        temperature: None leaves it to the server.
        extra: further fields; they win over all others.
    """

    model: str
    endpoint: str = COMPLETIONS
    stream: bool = True
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("chat/completions")

    def completion_body(self, prompt: str | list[int], output_len: int) -> bytes:
        return self._body({"prompt": prompt, "max_tokens": output_len})

    def chat_body(self, messages: list[dict[str, str]], output_len: int) -> bytes:
        return self._body({"messages": messages, "max_completion_tokens": output_len})

    def _body(self, fields: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {"model": self.model, **fields, "stream": self.stream}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body | self.extra)
