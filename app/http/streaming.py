"""Event streams. A disconnect, a stalled reader or a deadline ends the work behind a response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessera.app.http.access_log import trace_of
from tessera.app.http.body import MAX_INLINE_VALUES, built
from tessera.app.http.description import EVENT_STREAM
from tessera.app.http.errors import (
    ClientDisconnectedError,
    GenerationTimeoutError,
    InternalError,
    ShutdownError,
    error_response,
)
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import RequestError

logger = logging.getLogger("tessera.app")

T = TypeVar("T")

HEAD_PATIENCE = 5.0  # seconds
MAX_SENT = 2**20  # bytes at once: they are copied on the event loop
COMMENT = b": keep-alive\n\n"

STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T], timeout: float) -> T:
    """The result of `work`, which is cancelled when its client leaves or the time is up.

    It runs in the caller's task: one of its own would have the result wait for several turns of the event loop. Work
    that is resumed often has one all the same, as each resumption goes through all that the caller's task is in.

    Raises:
        ClientDisconnectedError: the client left.
        GenerationTimeoutError: no result within `timeout` seconds.
    """
    task = asyncio.current_task()
    assert task is not None, "it is awaited in a task"
    reasons: list[Exception] | None = []  # why it has been cancelled here; None: it has ended

    def end(error: Exception) -> None:
        if reasons == []:
            reasons.append(error)
            task.cancel()

    def end_if_left(watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled():
            end(ClientDisconnectedError())

    def end_late() -> None:
        end(GenerationTimeoutError(f"The response was not complete within {timeout:g} seconds."))

    watcher = asyncio.ensure_future(_disconnected(receive))
    watcher.add_done_callback(end_if_left)
    timer = asyncio.get_running_loop().call_later(timeout, end_late)
    try:
        return await work
    except asyncio.CancelledError:
        if not reasons:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise reasons.pop() from None  # kept in no variable: its frames would have it, for a collection of garbage
    finally:
        reasons = None
        timer.cancel()
        watcher.cancel()


async def _ended(task: asyncio.Task[T]) -> T:
    """The result of `task`, which is cancelled with its caller's and has then ended."""
    return await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Source(Protocol):
    """A running generation."""

    async def wait_accepted(self, seconds: float) -> None: ...

    def deltas(self) -> AsyncGenerator[Any, None]: ...

    @property
    def num_values(self) -> Callable[[Any], int] | None:
        """Counts what a delta's events list, and is called once for each; None where that is little."""

    async def abort(self) -> None: ...


class Events(Protocol):
    """Events of one completion, in the order they are sent."""

    @property
    def keepalive(self) -> bytes:
        """Sent where nothing else is for a while."""

    def opening(self) -> bytes: ...

    def delta(self, delta: Any) -> bytes: ...

    def closing(self) -> bytes: ...

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that breaks off."""


class EventStream(Response):
    """A streamed response.

    Its head waits until the engine has taken the request, so that a refusal still gets its own HTTP status, but at most
    HEAD_PATIENCE seconds, because proxies give up on a response that does not begin.
    """

    def __init__(
        self,
        source: Source,
        events: Events,
        settings: AppSettings,
        *,
        media_type: str = f"{EVENT_STREAM}; charset=utf-8",
    ) -> None:
        super().__init__(media_type=media_type)
        self._content_type = media_type.encode()
        self._source = source
        self._events = events
        self._settings = settings
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        patient_send = _PatientSend(send, self._settings.stall_timeout, self._settings.keepalive)
        try:
            writer = asyncio.ensure_future(self._write(patient_send))
            await run_while_connected(receive, _ended(writer), self._settings.request_timeout)
        except ClientDisconnectedError:
            return
        except asyncio.CancelledError:
            if patient_send.stalled:
                return
            await self._fail(ShutdownError(), scope, receive, send)
        except RequestError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            logger.exception("a streamed response failed")
            await self._fail(InternalError(), scope, receive, send)
        finally:
            patient_send.close()
            await self._source.abort()

    async def _write(self, send: _PatientSend) -> None:
        send.watch(asyncio.current_task())
        events = self._events
        await self._source.wait_accepted(HEAD_PATIENCE)
        headers = [(b"content-type", self._content_type), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True
        if opening := events.opening():
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        send.keep_alive(events.keepalive)
        num_values, write_delta = self._source.num_values, events.delta
        async with contextlib.aclosing(self._source.deltas()) as deltas:
            async for delta in deltas:
                if num_values is None or (count := num_values(delta)) <= MAX_INLINE_VALUES:
                    await send({"type": "http.response.body", "body": write_delta(delta), "more_body": True})
                    continue
                body = await built(count, partial(write_delta, delta))
                for begin in range(0, len(body), MAX_SENT):
                    piece = body[begin : begin + MAX_SENT]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": events.closing(), "more_body": False})

    async def _fail(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_of(scope)
        trace.error = error
        if self._started:
            last = send({"type": "http.response.body", "body": self._events.failure(error), "more_body": False})
            with contextlib.suppress(asyncio.TimeoutError):  # the reader has stalled as well
                await asyncio.wait_for(last, self._settings.stall_timeout)
        else:
            await error_response(error, trace.dialect)(scope, receive, send)


class _PatientSend:
    """ASGI send that cancels the writing task when one send takes longer than `timeout` seconds, and that sends a sign
    of life where nothing else was sent for `keepalive` seconds.

    Timers watch the whole response; a timeout per send would cost more than the send.
    """

    def __init__(self, send: Send, timeout: float, keepalive: float) -> None:
        self.stalled = False
        self._send = send
        self._timeout = timeout
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._sent_at = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._sign: asyncio.Task[None] | None = None

    def watch(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self._check_stall()

    def keep_alive(self, sign: bytes) -> None:
        """Begin to send `sign` in silence."""
        self._check_silence(sign)

    async def __call__(self, message: dict[str, Any]) -> None:
        if self._sign is not None:  # one writer at a time
            await self._sign
        self._waiting_since = self._sent_at = self._loop.time()
        await self._send(message)
        self._waiting_since = None

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._sign is not None:
            self._sign.cancel()
        self._task = None  # a cancelled task has its frames, which have this object: a cycle for each disconnect

    def _check_stall(self) -> None:
        waiting_since = self._waiting_since
        if waiting_since is not None and self._loop.time() - waiting_since > self._timeout and self._task is not None:
            self.stalled = True
            self._task.cancel()
            return
        self._timers["stall"] = self._loop.call_later(self._timeout / 2, self._check_stall)

    def _check_silence(self, sign: bytes) -> None:
        rest = self._sent_at + self._keepalive - self._loop.time()
        if rest <= 0:
            rest = self._keepalive
            if self._waiting_since is None:
                self._sign = self._loop.create_task(self._send_sign(sign))
        self._timers["silence"] = self._loop.call_later(rest, self._check_silence, sign)

    async def _send_sign(self, sign: bytes) -> None:
        try:
            self._waiting_since = self._sent_at = self._loop.time()
            await self._send({"type": "http.response.body", "body": sign, "more_body": True})
            self._waiting_since = None
        finally:
            self._sign = None
