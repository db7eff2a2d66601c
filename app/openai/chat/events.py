"""Server-sent events of a streamed chat completion."""

from __future__ import annotations

from typing import Any

import orjson

from tessera.app.generate.generation import Delta, Generation
from tessera.app.openai.envelope import ChunkOptions, ChunkWriter, CompletionHead
from tessera.app.openai.logprobs import chat_logprobs
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import CallStart, Content, Part, Reasoning
from tessera.engine.contract.errors import RequestError


class ChatEvents:
    """Events with `chat.completion.chunk` objects.

    Args:
        prompt_token_ids: reported in the first chunk, and each chunk's tokens in it; None reports neither.
    """

    def __init__(
        self,
        head: CompletionHead,
        generation: Generation,
        tokenizer: Tokenizer,
        options: ChunkOptions,
        *,
        prompt_token_ids: list[int] | None = None,
    ) -> None:
        fields = head.as_dict("chat.completion.chunk")
        self._writer = ChunkWriter(fields, generation, options)
        self._num_choices = len(generation.choices)
        self._tokenizer = tokenizer
        self._num_logprobs = options.num_logprobs
        self._prompt_token_ids = prompt_token_ids
        self._plain = options.num_logprobs is None and prompt_token_ids is None
        self._starts = [b'{"index":%d,"delta":{"content":' % index for index in range(self._num_choices)]

    def opening(self) -> bytes:
        """For each choice a chunk with the role, and with the prompt's tokens if asked for."""
        events = []
        for index in range(self._num_choices):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            choice["finish_reason"] = None
            if self._prompt_token_ids is not None:
                choice["prompt_token_ids"] = self._prompt_token_ids
            events.append(self._writer.chunk(orjson.dumps(choice)))
        return b"".join(events)

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._plain and delta.parts is None:
            text = orjson.dumps(delta.text)
            return self._writer.chunk(self._starts[delta.index] + text + b'},"logprobs":null,"finish_reason":null}')
        events = b""
        if delta.parts is not None:
            events = self._parts(delta, delta.parts)
        elif delta.text or not self._plain:
            events = self._writer.chunk(orjson.dumps(self._choice(delta, {"content": delta.text})))
        if delta.finish_reason is not None:
            end = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            events += self._writer.chunk(orjson.dumps(end))
        return events

    def closing(self) -> bytes:
        return self._writer.closing()

    def failure(self, error: RequestError) -> bytes:
        return self._writer.failure(error)

    def _parts(self, delta: Delta, parts: list[Part]) -> bytes:
        """A chunk for each part; the first brings the tokens and log-probabilities of all."""
        contents = [_delta_of(part) for part in parts]
        events = b""
        if not self._plain:
            first = contents.pop(0) if contents else {}
            events = self._writer.chunk(orjson.dumps(self._choice(delta, first)))
        for content in contents:
            choice = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
            events += self._writer.chunk(orjson.dumps(choice))
        return events

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = chat_logprobs(delta.entries, self._tokenizer, self._num_logprobs)
        choice: dict[str, Any] = {"index": delta.index, "delta": content, "logprobs": logprobs}
        choice["finish_reason"] = None
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice


def _delta_of(part: Part) -> dict[str, Any]:
    """`delta` of a chunk."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    call: dict[str, Any] = {"index": part.index}
    if isinstance(part, CallStart):
        call |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
    else:
        call["function"] = {"arguments": part.text}
    return {"tool_calls": [call]}
