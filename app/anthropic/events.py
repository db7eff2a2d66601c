"""Server-sent events of a streamed message, in the order in which Anthropic sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tessera.app.anthropic.message import BlockWriter, Event, MessageHead, messages_usage, stop_reason
from tessera.app.generate.generation import Delta, FinishReason, Generation
from tessera.app.generate.service import Answer
from tessera.app.http.errors import anthropic_error_object
from tessera.engine.contract.errors import RequestError


class MessageFrames:
    """Frames of one message's events; also makes the whole message for those who do not stream."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._head = MessageHead(model)
        self._generation = generation
        self._writer = BlockWriter()
        self._finish_reason: FinishReason | None = None

    def opening(self) -> bytes:
        usage = {**messages_usage(self._generation.usage()), "output_tokens": 0}
        message = self._head.message([], None, None, usage)
        return _frames([{"type": "message_start", "message": message}, {"type": "ping"}])

    def delta(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        return _frames(self._writer.write(delta.read_parts()))

    def closing(self) -> bytes:
        events = self._writer.finish()
        reason, sequence = self._stop()
        events.append(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": messages_usage(self._generation.usage()),
            }
        )
        events.append({"type": "message_stop"})
        return _frames(events)

    def failure(self, error: RequestError) -> bytes:
        return _frames([anthropic_error_object(error)])

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The message of an answer that is not streamed."""
        self.delta(Delta(0, answer.text, answer.token_ids, answer.entries, answer.finish_reason, answer.parts))
        self._writer.finish()
        return self._head.message(self._writer.blocks, *self._stop(), messages_usage(self._generation.usage()))

    def _stop(self) -> tuple[str, str | None]:
        sequence = self._generation.choices[0].stop_string
        reason = stop_reason(self._finish_reason, sequence, uses_tools=self._writer.uses_tools)
        return reason, sequence


def _frames(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
