"""Answers that are kept for `previous_response_id` and for reading them again: in memory, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from app.protocol.chat import ChatMessage

MESSAGE_OVERHEAD = 512  # bytes, about what a message takes besides its texts


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """An answer, and the whole conversation up to and with it, without its instructions."""

    response: dict[str, Any]
    messages: tuple[ChatMessage, ...]

    def num_bytes(self) -> int:
        """An upper estimate; messages that several answers share are counted for each."""
        return len(orjson.dumps(self.response)) + sum(map(_message_bytes, self.messages))


@dataclass(slots=True)
class _Shelf:
    """What one API key's holder keeps, the longest unused first."""

    entries: OrderedDict[str, tuple[StoredResponse, int]]
    num_bytes: int = 0


class ResponseStore:
    """Per tenant at most `max_count` answers and `max_bytes`; beyond either the longest unused ones go."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}

    @property
    def keeps_anything(self) -> bool:
        return self._max_count > 0

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep an answer, unless it alone is beyond the bounds."""
        size = stored.num_bytes()
        if size > self._max_bytes or not self.keeps_anything:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf(OrderedDict()))
        shelf.entries[stored.response["id"]] = (stored, size)
        shelf.num_bytes += size
        while len(shelf.entries) > self._max_count or shelf.num_bytes > self._max_bytes:
            _, (_, dropped) = shelf.entries.popitem(last=False)
            shelf.num_bytes -= dropped

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.entries:
            return None
        shelf.entries.move_to_end(response_id)
        return shelf.entries[response_id][0]

    def delete(self, tenant: str, response_id: str) -> bool:
        """-> whether it was there."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.entries:
            return False
        shelf.num_bytes -= shelf.entries.pop(response_id)[1]
        return True


def _message_bytes(message: ChatMessage) -> int:
    texts = [message.content, message.refusal, message.reasoning, message.reasoning_content]
    for call in message.tool_calls or ():
        texts += [call.function.name, call.function.arguments]
    return MESSAGE_OVERHEAD + sum(4 * len(text) for text in texts if text)
