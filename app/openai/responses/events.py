"""Server-sent events of a streamed response, in the order in which OpenAI sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Delta, FinishReason, Generation, TokenEntry
from tessera.app.http.streaming import COMMENT
from tessera.app.openai.conversations.tools import CalledTool
from tessera.app.openai.logprobs import chat_logprobs
from tessera.app.openai.responses.output import Event, OutputWriter
from tessera.app.openai.responses.response import ResponseStates
from tessera.app.text.tokenizer import Tokenizer
from tessera.engine.contract.errors import RequestError

NUM_OPENING_EVENTS = 2


class ResponseEvents:
    """Events of one response; also makes the whole response where it is not streamed.

    Args:
        tools: the client's tools by the names by which the model knows them.
        seal: makes the `encrypted_content` of reasoning; None leaves it out.
        num_logprobs: alternatives per token; None reports no log-probabilities.
    """

    keepalive = COMMENT

    def __init__(
        self,
        response: ResponseStates,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        tools: Mapping[str, CalledTool],
        seal: Callable[[str], str] | None,
        num_logprobs: int | None,
    ) -> None:
        self._response = response
        self._generation = generation
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._writer = OutputWriter(NUM_OPENING_EVENTS, tools, seal)
        self._finish_reason: FinishReason | None = None
        self._end: tuple[list[Event], dict[str, Any]] | None = None

    def opening(self) -> bytes:
        response = self._response.in_progress()
        kinds = ("response.created", "response.in_progress")
        return _event_bytes(
            [{"type": kind, "sequence_number": i, "response": response} for i, kind in enumerate(kinds)]
        )

    def delta(self, delta: Delta) -> bytes:
        return _event_bytes(self._write(delta))

    def closing(self) -> bytes:
        events, response = self._finished()
        return _event_bytes([*events, self._writer.event(f"response.{response['status']}", response=response)])

    def failure(self, error: RequestError) -> bytes:
        events = self._writer.finish("incomplete") if self._writer.items else []
        response = self._response.failed(self._writer.items, error)
        self._end = events, response
        return _event_bytes([*events, self._writer.event("response.failed", response=response)])

    def cancellation(self) -> bytes:
        """The last events of a response that was cancelled."""
        events = self._writer.finish("incomplete") if self._writer.items else []
        response = self._response.cancelled(self._writer.items)
        self._end = events, response
        return _event_bytes([*events, self._writer.event("response.cancelled", response=response)])

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The finished response where it is not streamed."""
        self._write(completion.as_delta())
        return self.last_state()

    def last_state(self) -> dict[str, Any]:
        """The response once no more deltas come: completed or cut, or failed or cancelled where that was said."""
        return self._finished()[1]

    def _write(self, delta: Delta) -> list[Event]:
        self._finish_reason = delta.finish_reason
        return self._writer.write_parts(delta.as_parts(), self._logprobs(delta.entries))

    def _finished(self) -> tuple[list[Event], dict[str, Any]]:
        """The events that end the output, and the response."""
        if self._end is None:
            events = self._writer.finish("incomplete" if self._finish_reason == "length" else "completed")
            usage = self._generation.usage()
            self._end = events, self._response.finished(self._writer.items, self._finish_reason, usage)
        return self._end

    def _logprobs(self, entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        if self._num_logprobs is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(entries, self._tokenizer, self._num_logprobs)["content"]
        return content


def _event_bytes(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
