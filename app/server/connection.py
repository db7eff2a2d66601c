"""One connection of uvicorn's, with bounds on what it may hold, which uvicorn leaves open."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sized
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tessera.app.http.body import BODY_ARRIVED
from tessera.app.http.dialect import error_object
from tessera.app.http.errors import UNAVAILABLE_RETRY_AFTER, BodyTimeoutError, ShutdownError
from tessera.app.server.connection_limit import ConnectionLimit
from tessera.engine.contract.errors import EngineUnavailableError, InvalidRequestError, RequestError
from tessera.engine.contract.logs import request_context
from tessera.engine.contract.passes.pass_queue import PassQueue

MAX_HEAD_BYTES = 2**16
MAX_FIELDS = 256  # of a head, parameters of its query, and cookies: each is looked at several times
MAX_FRAMING_BYTES = 2**16  # chunk sizes, chunk extensions and trailer fields of one body
FRAMING_PER_BODY_BYTE = 16  # allowed on top: chunks may be small
# Of what a connection has received at once, so many bytes are parsed at a time, until the time in seconds is over.
MAX_PIECE = 2**13
PIECES_SECONDS = 0.0005
MAX_QUEUED = 32  # requests sent ahead, while the answer to an earlier one is under way
# A host of RFC 3986, or an address in brackets, and a port.
HOST = re.compile(rb"([\w.~%!$&'()*+,;=-]*|\[[\w:.%]*\])(:\d*)?", re.ASCII)
HEALTH_PATHS = frozenset({b"/health", b"/ready", b"/metrics"})  # answered even where no place is left


class HeadTooLargeError(InvalidRequestError):
    """Path and headers beyond the limit."""

    status = 431
    code = "request_header_fields_too_large"


class FramingTooLargeError(HeadTooLargeError):
    """Chunk extensions and trailer fields beyond the limit."""


class NoPlaceError(EngineUnavailableError):
    """All connections have a request under way."""

    code = "too_many_connections"


class HttpVersionError(InvalidRequestError):
    """Neither HTTP/1.1 nor HTTP/1.0."""

    status = 505
    code = "http_version_not_supported"


def head_error(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> RequestError | None:
    """Why a head is refused, as RFC 9112 (3.2, and 2.3 of the version) asks; None if it is not."""
    if version not in ("1.0", "1.1"):
        return HttpVersionError("This server speaks HTTP/1.1 and HTTP/1.0.")
    hosts = []
    num_cookies = 0
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"cookie":
            num_cookies += value.count(b";")
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return InvalidRequestError("A request has one Host field.", code="invalid_host")
    if hosts and not HOST.fullmatch(hosts[0]):
        return InvalidRequestError("The Host field is not a host and a port.", code="invalid_host")
    if url.count(b"&") >= MAX_FIELDS:
        return HeadTooLargeError(f"A query may have at most {MAX_FIELDS} parameters.")
    if num_cookies >= MAX_FIELDS:
        return HeadTooLargeError(f"A request may have at most {MAX_FIELDS} cookies.")
    return None


class BodyToTheEnd:
    """The `send` of an answer to HTTP/1.0, which knows no chunks (RFC 9112, 6.1): the connection's end is the body's.

    Uvicorn would send chunks where an answer has no length.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)


class HeldHead:
    """The transport of an answer until its first bytes are sent: they go out with what follows them at once.

    A head and the first piece of a body are one call of the kernel then, and wake the client once.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            self._held += data
            self.send_held()
        else:
            self._held = data
            self._loop.call_soon(self.send_held)

    def close(self) -> None:
        self.send_held()
        self._transport.close()

    def send_held(self) -> None:
        held, self._held = self._held, b""
        self._cycle.transport = self._transport
        if held and not self._transport.is_closing():
            self._transport.write(held)


class QueueingFlow(FlowControl):
    """Reads nothing more while requests, or bytes, wait in a queue."""

    def __init__(self, transport: asyncio.Transport, *queues: Sized) -> None:
        super().__init__(transport)
        self._queues = queues

    def resume_reading(self) -> None:
        if not any(self._queues):
            super().resume_reading()


class BoundedConnection(HttpToolsProtocol):
    """Refuses what takes too much: 431 for a head or a framing that is too large, 408 for a head that is too late.

    The time counts from the connection's beginning, or from the first byte of a later request; between two
    requests uvicorn's own keep-alive time holds. Trailer fields are dropped.

    What hundreds of connections receive at once is read in turn by `reads`.
    """

    account_id = 0  # whose a request is will be known once it is read

    def __init__(
        self,
        *args: Any,
        head_timeout: float,
        limit: ConnectionLimit,
        reads: PassQueue[BoundedConnection],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout = head_timeout
        self._limit = limit
        self._reads = reads
        self._unread: list[bytes] = []
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_messages = 0
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        self._in_body = False
        self._has_cycle = False  # the newest message has
        self._refused = False
        self._refusal: RequestError | None = None  # to be sent after the answers before it
        self._answering: RequestResponseCycle | None = None
        self._is_spare = False
        self._unsent, self._unsent_since = 0, 0.0
        self._log_context: dict[str, str] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = QueueingFlow(transport, self.pipeline, self._unread)
        if self.client is not None:
            self._log_context = {"client": self.client[0]}
        place = self._limit.enter(self)
        if place is None:
            self.drop()
            return
        self._is_spare = place.is_spare
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.leave(self)
        self._forget_head()
        for cycle in (self.cycle, self._answering, *(queued for queued, _ in self.pipeline)):
            if cycle is None:
                continue
            if isinstance(cycle.transport, HeldHead):
                cycle.transport = self.transport  # each has the other, for a collection of garbage to find
            cycle.disconnected |= not cycle.response_complete  # uvicorn tells the newest alone
            cycle.message_event.set()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once and without a word."""
        self._refused = True
        self._forget_head()
        self.transport.abort()

    def drop_if_unread(self, timeout: float) -> None:
        """Drop it if it waits for its client to read, who has taken nothing for `timeout` seconds."""
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        waits = self.flow.write_paused or self.transport.is_closing()
        if not unsent or not waits or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since >= timeout:
            self.drop()

    def data_received(self, data: bytes) -> None:
        if not self._unread and self._reads.enter():
            self._read(data)
            return
        self._read_rest_later(data)

    def _read_rest_later(self, data: bytes) -> None:
        if not self._unread:
            self._reads.put([self])
        self._unread.append(data)
        self.flow.pause_reading()

    def read_later(self) -> bool:
        """Have the loop read what has come; False if the connection has ended."""
        if self.transport.is_closing():
            return False
        self.loop.call_soon(self._read_unread)
        return True

    def _read_unread(self) -> None:
        data = b"".join(self._unread)
        self._unread.clear()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse it, or as much as may be in one pass of the loop: a short line can be a field, a chunk or a request."""
        if len(data) <= MAX_PIECE:
            self._parse(data)
            return
        end = time.thread_time() + PIECES_SECONDS
        for start in range(0, len(data), MAX_PIECE):
            if start and time.thread_time() >= end:
                self._read_rest_later(data[start:])
                return
            self._parse(data[start : start + MAX_PIECE])
            if self.transport.is_closing():
                return

    def _parse(self, data: bytes) -> None:
        if self._refused:
            return
        was_in_body, num_messages, body_bytes = self._in_body, self._num_messages, self._body_bytes
        context = request_context.set(self._log_context)  # for uvicorn's own lines
        try:
            super().data_received(data)
        finally:
            request_context.reset(context)
        if self._refused:
            return
        num_begun = self._num_messages - num_messages
        if self._in_body:
            if was_in_body and num_begun == 0:
                self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
                self._check_framing()
        elif self._head_timer is not None:
            # A piece that ends one request and begins another says little of either.
            if num_begun + was_in_body <= 1:
                self._head_bytes += len(data)
                self._check_head()
        elif self._is_idle and self.timeout_keep_alive_task is None:
            self._expect_head()  # line ends before a request, say, which have stopped the keep-alive time

    def on_message_begin(self) -> None:
        if self._refused:
            return
        super().on_message_begin()
        self._has_cycle = False
        self._num_messages += 1
        self._body_bytes = self._framing_bytes = 0
        if self._head_timer is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        if not self._refused:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body or self._refused:  # a trailer field
            return
        if len(self.headers) >= MAX_FIELDS:
            self._refuse(HeadTooLargeError(f"A request may have at most {MAX_FIELDS} header fields."))
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._refused:
            return
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_head()
        self._forget_head()
        if error := head_error(self.parser.get_http_version(), self.url, self.headers):
            self._refuse(error)
        elif len(self.pipeline) >= MAX_QUEUED:
            self._refused = True
            self.transport.close()
        elif self._is_spare and self.url.partition(b"?")[0] not in HEALTH_PATHS:
            self._refuse(self._no_place())
        if not self._refused:
            self._limit.make_busy(self)
            super().on_headers_complete()
            self._has_cycle = True
            self.cycle.transport = HeldHead(self.cycle, self.loop)  # type: ignore[assignment]
            if self.parser.get_http_version() == "1.0":
                self.cycle.send = BodyToTheEnd(self.cycle)  # type: ignore[method-assign]
            if not self.pipeline:
                self._answering = self.cycle
            if self._is_spare:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._refused:
            super().on_message_complete()
            self.scope["state"][BODY_ARRIVED] = True

    def send_400_response(self, msg: str) -> None:
        """Uvicorn's answer to what it cannot parse."""
        if not self._refused:
            self._refuse(InvalidRequestError("This is not an HTTP request.", code="invalid_http"))

    def on_response_complete(self) -> None:
        if self._answering is not None and isinstance(self._answering.transport, HeldHead):
            self._answering.transport.send_held()  # a head without a body
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._refusal is not None and self._answering is None:
            self._send_refusal(self._refusal)
        if self._is_idle and not self.transport.is_closing():
            self._limit.make_idle(self)
        self.flow.resume_reading()  # the queue may have become empty

    @property
    def is_spare(self) -> bool:
        """Only health checks are answered on it."""
        return self._is_spare

    def _no_place(self) -> RequestError:
        if self._limit.draining:
            return ShutdownError()
        self._limit.count_dropped()
        return NoPlaceError("All of the server's connections are in use; please try again later.")

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

    def _check_head(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(HeadTooLargeError(f"Path and headers may have at most {MAX_HEAD_BYTES} bytes."))

    def _check_framing(self) -> None:
        allowed = MAX_FRAMING_BYTES + FRAMING_PER_BODY_BYTE * self._body_bytes
        if self._framing_bytes > allowed and not self._refused:
            self._refuse(
                FramingTooLargeError(f"Chunk extensions and trailers may have at most {MAX_FRAMING_BYTES} bytes.")
            )

    def _on_late_head(self) -> None:
        self._refuse(BodyTimeoutError(f"The request did not arrive within {self._head_timeout:g} seconds."))

    def _refuse(self, error: RequestError) -> None:
        """Read nothing more; answer the requests that are complete, then send the error and close."""
        self._refused = True
        self._forget_head()
        if self._in_body and self._has_cycle:
            self._give_up_on_body()
        if self._answering is None:
            self._send_refusal(error)
        else:
            self._refusal = error

    def _give_up_on_body(self) -> None:
        """The newest request's body will not come."""
        if self.pipeline:
            self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._answering
            assert last is not None, "a queue has an answer before it"
            self.cycle = last
        elif self._answering is not None:
            cycle, self._answering = self._answering, None
            if cycle.response_started:
                self.transport.close()  # another answer would garble this one
            cycle.disconnected = cycle.response_complete = True
            cycle.message_event.set()

    def _send_refusal(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        content = orjson.dumps(error_object(error))
        reason = HTTPStatus(error.status).phrase
        fields = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n"
        if isinstance(error, EngineUnavailableError):
            fields += f"retry-after: {UNAVAILABLE_RETRY_AFTER}\r\n"
        self.transport.write(f"HTTP/1.1 {error.status} {reason}\r\n{fields}\r\n".encode() + content)
        self.transport.close()
