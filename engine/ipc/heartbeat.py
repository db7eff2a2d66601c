"""The engine's heartbeats: sent by a thread of the engine process, watched by clients and the supervisor.

The thread goes on while a step runs, falls silent when the process is stopped or killed, and shows
`num_steps` standing still when a step hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tessera.engine.contract.messages import Heartbeat, heartbeat_address
from tessera.engine.ipc.sockets.listener import Listener

if TYPE_CHECKING:
    import asyncio

    from tessera.engine.ipc.sockets.connection import Connection

INTERVAL = 0.5  # seconds between heartbeats


class HeartbeatSender:
    """Publishes `make_heartbeat()` every half second from a thread of its own until stopped.

    The same thread watches `lifeline_fd`, a pipe held open by the parent process: when it ends, `on_orphaned` is
    called in this thread, even while the main thread is inside a step.
    """

    def __init__(
        self,
        run_dir: str | Path,
        make_heartbeat: Callable[[], Heartbeat],
        lifeline_fd: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        self._make_heartbeat = make_heartbeat
        self._lifeline_fd = lifeline_fd
        self._on_orphaned = on_orphaned
        self._listener = Listener(heartbeat_address(run_dir))
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        poller = select.poll()
        for descriptor in (self._listener.fileno(), self._lifeline_fd, self._stop_reader):
            poller.register(descriptor, select.POLLIN)
        due = time.monotonic()
        while True:
            if (now := time.monotonic()) >= due:
                self._listener.send_to_all(encoder.encode(self._make_heartbeat()))
                due = now + INTERVAL
            ready = dict(poller.poll(max(0.0, due - time.monotonic()) * 1000))
            if self._stop_reader in ready:
                break
            if self._lifeline_fd in ready and not os.read(self._lifeline_fd, 4096):
                self._on_orphaned()
                break
            self._listener.receive()  # no messages come, but connections open and close
        self._listener.close()


class HeartbeatReceiver:
    """Remembers when the engine last showed life and when its steps last moved on."""

    def __init__(
        self,
        run_dir: str | Path,
        on_heartbeat: Callable[[Heartbeat], None] | None = None,
    ) -> None:
        self.last: Heartbeat | None = None
        self._on_heartbeat = on_heartbeat
        self._heard_at = self._progress_at = time.monotonic()
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._path = heartbeat_address(run_dir)
        import asyncio  # the engine process, which only sends, need not

        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._connection = self._connect()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._connection.close()

    def note_life(self) -> None:
        """The engine has said something else, which is a sign of life before its first heartbeat arrives."""
        self._heard_at = time.monotonic()

    @property
    def silent_for(self) -> float:
        """Seconds since the last heartbeat, or since watching began."""
        seconds = time.monotonic() - self._heard_at
        if seconds > 2 * INTERVAL:  # one may be unread because this event loop was busy
            self._connection.read()
            seconds = time.monotonic() - self._heard_at
        return seconds

    @property
    def stalled_for(self) -> float:
        """Seconds for which the engine has had work without finishing a step."""
        if self.last is None or not self.last.has_work:
            return 0.0
        return time.monotonic() - self._progress_at

    def _connect(self) -> Connection:
        from tessera.engine.ipc.sockets.connection import Connection

        return Connection(self._path, self._receive)

    def _receive(self) -> None:
        connection = self._connection
        while connection.received and not connection.is_closed:
            self._note(self._decoder.decode(connection.received.popleft()))
        if connection.is_lost and not connection.is_closed:
            connection.close()
            self._reconnect()

    def _reconnect(self) -> None:
        """Connect to the next engine, now or as soon as there are descriptors for it."""
        self._timer = None
        with contextlib.suppress(OSError):
            self._connection = self._connect()
            return
        self._timer = self._loop.call_later(INTERVAL, self._reconnect)

    def _note(self, heartbeat: Heartbeat) -> None:
        now = time.monotonic()
        last = self.last
        self._heard_at = now
        if (
            last is None
            or not heartbeat.has_work
            or not last.has_work
            or (heartbeat.epoch, heartbeat.num_steps) != (last.epoch, last.num_steps)
        ):
            self._progress_at = now
        self.last = heartbeat
        if self._on_heartbeat is not None:
            self._on_heartbeat(heartbeat)
