"""The JSON of a request, by endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True)
class RequestTemplate:
    """The fields that all requests of a run share.

    Attributes:
        model: name sent.
        endpoint: path below the base URL; one that ends in chat/completions gets messages, one in embeddings input,
            any other a prompt.
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

    @property
    def embeds(self) -> bool:
        return self.endpoint.endswith("/embeddings")

    @property
    def takes_text(self) -> bool:
        """Prompts are texts, not token ids."""
        return self.chat or self.embeds

    def body(self, prompt: str | list[int], output_len: int) -> bytes:
        """One prompt, for any endpoint; token ids for completions alone."""
        if self.embeds:
            return self.embeddings_body([str(prompt)])
        if self.chat:
            return self.chat_body([{"role": "user", "content": str(prompt)}], output_len)
        return self.completion_body(prompt, output_len)

    def completion_body(self, prompt: str | list[int], output_len: int) -> bytes:
        return self._body({"prompt": prompt, "max_tokens": output_len})

    def chat_body(self, messages: list[dict[str, str]], output_len: int) -> bytes:
        return self._body({"messages": messages, "max_completion_tokens": output_len})

    def embeddings_body(self, texts: Sequence[str]) -> bytes:
        return orjson.dumps({"model": self.model, "input": list(texts), **self.extra})

    def _body(self, fields: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {"model": self.model, **fields, "stream": self.stream}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body | self.extra)
