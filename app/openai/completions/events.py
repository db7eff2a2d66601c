"""Server-sent events of a streamed text completion."""

from __future__ import annotations

from typing import Any

import orjson

from tessera.app.generate.generation import Delta, Generation
from tessera.app.http.json_pieces import json_in_pieces
from tessera.app.http.streaming import COMMENT
from tessera.app.openai.completions.logprobs import Echo, completion_logprobs, echo_logprobs
from tessera.app.openai.envelope import ChunkOptions, ChunkWriter, CompletionHead, choice_json
from tessera.app.text.tokenizer import Tokenizer
from tessera.engine.contract.errors import RequestError
from tessera.engine.contract.messages import rows_of


class CompletionEvents:
    """Events with `text_completion` objects.

    Args:
        echoes: per choice the prompt to begin with; None without `echo`. Log-probabilities cover its tokens as well.
        prompt_token_ids: per choice, reported in its first chunk; None reports no token ids.
    """

    keepalive = COMMENT

    def __init__(
        self,
        head: CompletionHead,
        generation: Generation,
        tokenizer: Tokenizer,
        options: ChunkOptions,
        *,
        echoes: list[Echo] | None = None,
        prompt_token_ids: list[list[int]] | None = None,
    ) -> None:
        fields = head.as_dict("text_completion")
        self._writer = ChunkWriter(fields, generation, options)
        self._tokenizer = tokenizer
        self._num_logprobs = options.num_logprobs
        self._names_ids = options.names_ids
        self._generation = generation
        self._echoes = echoes
        # The prompt's log-probabilities come with a choice's first tokens.
        self._opens_late = echoes is not None and options.num_logprobs is not None
        self._unopened = set(range(len(generation.choices))) if self._opens_late else set[int]()
        self._prompt_token_ids = prompt_token_ids
        self._plain = options.num_logprobs is None and prompt_token_ids is None
        self._ends = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % index for index in range(len(generation.choices))
        ]

    def opening(self) -> bytes:
        """The echoed prompts and the prompts' tokens, if asked for."""
        if self._opens_late or (self._echoes is None and self._prompt_token_ids is None):
            return b""
        return b"".join(map(self._opening_of, range(len(self._ends))))

    def delta(self, delta: Delta) -> bytes:
        if delta.index in self._unopened:
            self._unopened.discard(delta.index)
            return self._opening_of(delta.index) + self._delta(delta)
        return self._delta(delta)

    def closing(self) -> bytes:
        return self._writer.closing()

    def failure(self, error: RequestError) -> bytes:
        return self._writer.failure(error)

    def _opening_of(self, index: int) -> bytes:
        echo = self._echoes[index] if self._echoes is not None else None
        choice = _choice_object(index, echo.text if echo is not None else "")
        if echo is not None and self._num_logprobs is not None:
            found = rows_of(self._generation.choices[index].prompt_logprobs)
            choice["logprobs"] = echo_logprobs(echo, found, self._tokenizer, self._num_logprobs, as_ids=self._names_ids)
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"] = self._prompt_token_ids[index]
        return self._writer.chunk(json_in_pieces(choice))

    def _delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._plain:
            return self._writer.chunk(b'{"text":' + orjson.dumps(delta.text) + self._ends[delta.index])
        events = b""
        if delta.text or not self._plain:
            events = self._writer.chunk(choice_json(self._choice(delta), delta))
        if delta.finish_reason is not None:
            end = _choice_object(delta.index, "", delta.finish_reason)
            events += self._writer.chunk(orjson.dumps(end))
        return events

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice = _choice_object(delta.index, delta.text)
        if self._num_logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                delta.entries, self._tokenizer, self._num_logprobs, as_ids=self._names_ids
            )
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice


def _choice_object(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": finish_reason}
