"""Server-sent events of a streamed message, in the order in which Anthropic sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from tessera.app.anthropic.errors import message_error_object
from tessera.app.anthropic.message import BlockWriter, Event, MessageHead, messages_usage, stop_reason
from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Delta, FinishReason, Generation
from tessera.engine.contract.errors import RequestError


class MessageEvents:
    """Events of one message; also makes the whole message where it is not streamed."""

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self,
        model: str,
        generation: Generation,
        *,
        applied_edits: list[dict[str, Any]] | None = None,
        fills_context: bool = False,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """
        Args:
            applied_edits: edits of the history to report; None where the request asked for none.
            fills_context: the completion's token limit is what the context has room for.
            seal: makes the signature of reasoning that is omitted; None shows it.
        """
        self._head = MessageHead(model)
        self._generation = generation
        self._report = {} if applied_edits is None else {"context_management": {"applied_edits": applied_edits}}
        self._fills_context = fills_context
        self._writer = BlockWriter(seal)
        self._finish_reason: FinishReason | None = None

    def opening(self) -> bytes:
        usage = {**messages_usage(self._generation.usage()), "output_tokens": 0}
        message = self._head.message([], None, None, usage)
        return _event_bytes([{"type": "message_start", "message": message}, {"type": "ping"}])

    def delta(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        return _event_bytes(self._writer.write_parts(delta.as_parts()))

    def closing(self) -> bytes:
        events = self._writer.finish()
        reason, sequence = self._stop()
        events.append(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": messages_usage(self._generation.usage()),
                **self._report,
            }
        )
        events.append({"type": "message_stop"})
        return _event_bytes(events)

    def failure(self, error: RequestError) -> bytes:
        return _event_bytes([message_error_object(error)])

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The finished message where it is not streamed."""
        self.delta(completion.as_delta())
        self._writer.finish()
        message = self._head.message(self._writer.blocks, *self._stop(), messages_usage(self._generation.usage()))
        return {**message, **self._report}

    def _stop(self) -> tuple[str, str | None]:
        sequence = self._generation.choices[0].stop_string
        reason = stop_reason(self._finish_reason, sequence, uses_tools=self._writer.uses_tools)
        if reason == "max_tokens" and self._fills_context:
            reason = "model_context_window_exceeded"
        return reason, sequence


def _event_bytes(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
