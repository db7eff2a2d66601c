"""A connection of uvicorn with bounds on the size and the time of request heads, which uvicorn lacks."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tessera.app.http.dialect import error_object
from tessera.app.http.errors import BodyTimeoutError
from tessera.engine.contract.errors import InvalidRequestError, RequestError

MAX_HEAD_BYTES = 2**16


class HeadTooLargeError(InvalidRequestError):
    """Path and headers beyond the limit."""

    status = 431
    code = "request_header_fields_too_large"


class BoundedConnection(HttpToolsProtocol):
    """Answers a head of more than MAX_HEAD_BYTES with 431 and one that does not arrive in time with 408, and closes.

    The time counts from the connection's beginning, or from the first byte of a later request; between two
    requests uvicorn's own keep-alive time holds.
    """

    def __init__(self, *args: Any, head_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout = head_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        waited = self._head_timer is not None
        super().data_received(data)
        # What came before in other pieces; a head that is whole in its first piece is measured below.
        if waited and self._head_timer is not None:
            self._head_bytes += len(data)
            self._check_size()
        elif self._head_timer is None and self._is_idle and self.timeout_keep_alive_task is None:
            self._expect_head()  # line ends before a request, say, which have stopped the keep-alive time

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_size()
        self._forget_head()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self._head_timeout, self._on_late_head)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_size(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(HeadTooLargeError(f"Path and headers may have at most {MAX_HEAD_BYTES} bytes."))

    def _on_late_head(self) -> None:
        self._refuse(BodyTimeoutError(f"The request did not arrive within {self._head_timeout:g} seconds."))

    def _refuse(self, error: RequestError) -> None:
        self._refused = True
        self._forget_head()
        if not self._is_idle:  # a response is under way, which a second one would garble
            self.transport.close()
            return
        content = orjson.dumps(error_object(error))
        reason = HTTPStatus(error.status).phrase
        fields = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n"
        self.transport.write(f"HTTP/1.1 {error.status} {reason}\r\n{fields}\r\n".encode() + content)
        self.transport.close()
