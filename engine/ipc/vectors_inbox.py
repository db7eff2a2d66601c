"""Vectors on their way to the app, which come in pieces if they are large."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tessera.engine.contract.messages import EmbeddingOutput
from tessera.engine.ipc.request_stream import error_of

if TYPE_CHECKING:
    import numpy as np


class VectorsInbox:
    """Collects the vectors of one request.

    Attributes:
        whole: all of them, little-endian float32; or the error for which there are none.
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
        """Does nothing if the request has ended."""
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
