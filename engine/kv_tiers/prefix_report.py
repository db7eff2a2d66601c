"""The changes of the prefix cache since the last heartbeat, for routers that choose among several engines."""

from __future__ import annotations

from collections import deque

from tessera.engine.contract.messages import PREFIX_KEY_BYTES, PrefixChanges

MAX_CHANGES = 2**15  # between two heartbeats; the oldest go first, which costs hits alone


class PrefixReport:
    """Written by the engine's thread, read by the one that sends heartbeats."""

    def __init__(self) -> None:
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=MAX_CHANGES)

    def note_stored(self, digest: bytes) -> None:
        self._changes.append((digest, True))

    def note_evicted(self, digest: bytes) -> None:
        self._changes.append((digest, False))

    def take(self) -> PrefixChanges:
        """The last change of each block, and forget them."""
        last: dict[bytes, bool] = {}
        for _ in range(len(self._changes)):
            digest, is_stored = self._changes.popleft()
            key = digest[:PREFIX_KEY_BYTES]
            last.pop(key, None)  # the order is that of the last changes
            last[key] = is_stored
        return PrefixChanges(
            b"".join(key for key, is_stored in last.items() if is_stored),
            b"".join(key for key, is_stored in last.items() if not is_stored),
        )
