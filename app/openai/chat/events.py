"""Server-sent events of a streamed chat completion."""

from __future__ import annotations

from typing import Any

import orjson

from tessera.app.generate.generation import Delta, Generation
from tessera.app.http.streaming import COMMENT
from tessera.app.openai.chat.calls import CallForm
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.envelope import ChunkOptions, ChunkWriter, CompletionHead, choice_json
from tessera.app.openai.logprobs import chat_logprobs
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning
from tessera.engine.contract.errors import RequestError


class ChatEvents:
    """Events with `chat.completion.chunk` objects.

    With `return_token_ids` the first chunk has the prompt's tokens, and each chunk its own.
    """

    keepalive = COMMENT

    def __init__(
        self,
        head: CompletionHead,
        request: ChatCompletionRequest,
        prompt_token_ids: list[int],
        generation: Generation,
        tokenizer: Tokenizer,
    ) -> None:
        fields = head.as_dict("chat.completion.chunk")
        options = ChunkOptions(request.include_usage, request.continuous_usage)
        self._writer = ChunkWriter(fields, generation, options)
        self._num_choices = len(generation.choices)
        self._tokenizer = tokenizer
        self._num_logprobs = request.num_logprobs
        self._names_ids = request.return_tokens_as_token_ids
        self._prompt_token_ids = prompt_token_ids if request.return_token_ids else None
        self._echoed = request.echoed
        self._plain = self._num_logprobs is None and self._prompt_token_ids is None
        self._starts = [b'{"index":%d,"delta":{"content":' % index for index in range(self._num_choices)]
        self._calls = CallForm.of(request)
        self._called: dict[tuple[int, int], str] = {}  # names by choice and call

    def opening(self) -> bytes:
        """For each choice a chunk with the role, the first with the prompt's tokens if asked for; then the echo."""
        events = []
        for index in range(self._num_choices):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            choice["finish_reason"] = None
            body = orjson.dumps(choice)
            if self._prompt_token_ids is not None and index == 0:
                events.append(self._writer.chunk_with(body, "prompt_token_ids", self._prompt_token_ids))
            else:
                events.append(self._writer.chunk(body))
            if self._echoed:
                events.append(self._writer.chunk(orjson.dumps({**choice, "delta": {"content": self._echoed}})))
        return b"".join(events)

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._plain and delta.parts is None:
            text = orjson.dumps(delta.text)
            return self._writer.chunk(self._starts[delta.index] + text + b'},"logprobs":null,"finish_reason":null}')
        events = b""
        if delta.parts is not None:
            events = self._parts(delta, delta.parts)
        elif delta.text or not self._plain:
            events = self._writer.chunk(choice_json(self._choice(delta, {"content": delta.text}), delta))
        if delta.finish_reason is not None:
            reason = self._calls.finish_reason(delta.finish_reason)
            end = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            events += self._writer.chunk(orjson.dumps(end))
        return events

    def closing(self) -> bytes:
        return self._writer.closing()

    def failure(self, error: RequestError) -> bytes:
        return self._writer.failure(error)

    def _parts(self, delta: Delta, parts: list[Part]) -> bytes:
        """A chunk for each part; the first brings the tokens and log-probabilities of all."""
        contents = [self._delta_of(delta.index, part) for part in parts]
        events = b""
        if not self._plain:
            first = contents.pop(0) if contents else {}
            events = self._writer.chunk(choice_json(self._choice(delta, first), delta))
        for content in contents:
            choice = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
            events += self._writer.chunk(orjson.dumps(choice))
        return events

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = chat_logprobs(delta.entries, self._tokenizer, self._num_logprobs, as_ids=self._names_ids)
        choice: dict[str, Any] = {"index": delta.index, "delta": content, "logprobs": logprobs}
        choice["finish_reason"] = None
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice

    def _delta_of(self, index: int, part: Part) -> dict[str, Any]:
        """`delta` of a chunk of choice `index`."""
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning": part.text, "reasoning_content": part.text}
        if isinstance(part, CallArguments):
            return self._calls.arguments(part, self._called[index, part.index])
        assert isinstance(part, CallStart)
        self._called[index, part.index] = part.name
        return self._calls.start(part)
