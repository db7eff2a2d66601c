"""Vectors of megabytes between engine and app, in pieces: one message of all would hold up both for as long."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from tessera.engine.contract.messages import EmbeddingOutput
from tessera.engine.ipc.request_stream import error_of

if TYPE_CHECKING:
    import numpy as np

MAX_VECTOR_BYTES = 2**21  # in one turn: as long as a millisecond or two, here and in the event loop that reads them


class VectorsOutbox:
    """What the engine has not sent yet. True while there is any. Requests take turns."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, str, memoryview]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, client: bytes, output: EmbeddingOutput) -> EmbeddingOutput | None:
        """-> the output if it can be sent at once; else None, and `take` gives it in pieces."""
        if len(output.vectors) <= MAX_VECTOR_BYTES:
            return output
        self._waiting.append((client, output.request_id, output.vectors))
        return None

    def take(self) -> tuple[bytes, EmbeddingOutput] | None:
        """What is sent in this turn, and to whom."""
        if not self._waiting:
            return None
        client, request_id, vectors = self._waiting.popleft()
        rest = vectors[MAX_VECTOR_BYTES:]
        if rest:
            self._waiting.append((client, request_id, rest))
        return client, EmbeddingOutput(request_id, vectors[:MAX_VECTOR_BYTES], num_bytes_left=len(rest))

    def drop(self, client: bytes, request_ids: list[str]) -> None:
        """These requests have been aborted, or nobody reads their vectors."""
        if self._waiting:
            kept = [one for one in self._waiting if one[0] != client or one[1] not in request_ids]
            self._waiting = deque(kept)


class VectorsInbox:
    """What has come of one request's vectors.

    Attributes:
        whole: all of them, little-endian float32, or why there are none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.whole: asyncio.Future[memoryview] = loop.create_future()
        self._received: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def deliver(self, output: EmbeddingOutput) -> None:
        if self.whole.done():
            return
        if output.refusal is not None:
            self.whole.set_exception(error_of(output.refusal))
        elif self._received is None and not output.num_bytes_left:
            self.whole.set_result(output.vectors)
        else:
            self._gather(output)

    def fail(self, error: Exception) -> None:
        """Does nothing where there is an answer already."""
        if not self.whole.done():
            self.whole.set_exception(error)

    def _gather(self, output: EmbeddingOutput) -> None:
        import numpy as np  # other requests need none of it

        vectors = np.frombuffer(output.vectors, np.uint8)
        if self._received is None:
            self._received = np.empty(vectors.size + output.num_bytes_left, np.uint8)
        end = self._received.size - output.num_bytes_left
        self._received[end - vectors.size : end] = vectors
        if not output.num_bytes_left:
            self.whole.set_result(self._received.data)
