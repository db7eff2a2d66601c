"""Server-sent events of a streamed response, in the order in which OpenAI sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Delta, FinishReason, Generation, TokenEntry
from tessera.app.openai.logprobs import chat_logprobs
from tessera.app.openai.responses.output import Event, OutputWriter
from tessera.app.openai.responses.response import ResponseStates
from tessera.app.text.tokenizer import Tokenizer
from tessera.engine.contract.errors import RequestError

NUM_OPENING_EVENTS = 2


class ResponseEvents:
    """Events of one response; also makes the whole response where it is not streamed.

    Args:
        num_logprobs: alternatives per token; None reports no log-probabilities.
        on_finish: called with the finished response, completed or cut.
    """

    def __init__(
        self,
        response: ResponseStates,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        num_logprobs: int | None,
        on_finish: Callable[[dict[str, Any]], None],
    ) -> None:
        self._response = response
        self._generation = generation
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._on_finish = on_finish
        self._writer = OutputWriter(first_sequence_number=NUM_OPENING_EVENTS)
        self._finish_reason: FinishReason | None = None

    def opening(self) -> bytes:
        response = self._response.in_progress()
        kinds = ("response.created", "response.in_progress")
        return _event_bytes(
            [{"type": kind, "sequence_number": i, "response": response} for i, kind in enumerate(kinds)]
        )

    def delta(self, delta: Delta) -> bytes:
        return _event_bytes(self._write(delta))

    def closing(self) -> bytes:
        events, response = self._finish()
        events.append(self._writer.event(f"response.{response['status']}", response=response))
        return _event_bytes(events)

    def failure(self, error: RequestError) -> bytes:
        events = self._writer.finish("incomplete") if self._writer.items else []
        response = self._response.failed(self._writer.items, error)
        return _event_bytes([*events, self._writer.event("response.failed", response=response)])

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The finished response where it is not streamed."""
        self._write(completion.as_delta())
        return self._finish()[1]

    def _write(self, delta: Delta) -> list[Event]:
        self._finish_reason = delta.finish_reason
        return self._writer.write_parts(delta.as_parts(), self._logprobs(delta.entries))

    def _finish(self) -> tuple[list[Event], dict[str, Any]]:
        events = self._writer.finish("incomplete" if self._finish_reason == "length" else "completed")
        response = self._response.finished(self._writer.items, self._finish_reason, self._generation.usage())
        self._on_finish(response)
        return events, response

    def _logprobs(self, entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        if self._num_logprobs is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(entries, self._tokenizer, self._num_logprobs)["content"]
        return content


def _event_bytes(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
