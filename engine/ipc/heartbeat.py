"""The engine's heartbeats: sent by a thread of the engine process, watched by clients and the supervisor.

The thread goes on while a step runs, falls silent when the process is stopped or killed, and shows
`num_steps` standing still when a step hangs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tessera.engine.contract.messages import Heartbeat, heartbeat_address
from tessera.engine.ipc.sockets import has_message

INTERVAL = 0.5  # seconds between heartbeats


class HeartbeatSender:
    """Publishes `make_heartbeat()` every half second from a thread of its own until stopped.

    The same thread watches `lifeline_fd`, a pipe held open by the parent process: when it ends, `on_orphaned` is
    called in this thread, even while the main thread is inside a step.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: str | Path,
        make_heartbeat: Callable[[], Heartbeat],
        lifeline_fd: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        self._make_heartbeat = make_heartbeat
        self._lifeline_fd = lifeline_fd
        self._on_orphaned = on_orphaned
        self._socket = context.socket(zmq.PUB)
        self._socket.bind(heartbeat_address(run_dir))
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
        poller = zmq.Poller()
        poller.register(self._lifeline_fd, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        while True:
            self._socket.send(encoder.encode(self._make_heartbeat()))
            ended = dict(poller.poll(int(INTERVAL * 1000)))
            if self._stop_reader in ended:
                break
            if self._lifeline_fd in ended and not os.read(self._lifeline_fd, 4096):
                self._on_orphaned()
                break
        self._socket.close(linger=0)


class HeartbeatReceiver:
    """Remembers when the engine last showed life and when its steps last moved on."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: str | Path,
        on_heartbeat: Callable[[Heartbeat], None] | None = None,
    ) -> None:
        self.last: Heartbeat | None = None
        self._on_heartbeat = on_heartbeat
        self._heard_at = self._progress_at = time.monotonic()
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._socket = context.socket(zmq.SUB)
        import asyncio  # the engine process, which only sends, need not

        self._loop = asyncio.get_running_loop()
        try:
            self._socket.subscribe(b"")
            self._socket.connect(heartbeat_address(run_dir))
            self._loop.add_reader(self._socket.FD, self._receive)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self._loop.call_soon(self._receive)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=0)

    def note_life(self) -> None:
        """The engine has said something else, which is a sign of life before its first heartbeat arrives."""
        self._heard_at = time.monotonic()

    @property
    def silent_for(self) -> float:
        """Seconds since the last heartbeat, or since watching began."""
        seconds = time.monotonic() - self._heard_at
        if seconds > 2 * INTERVAL:  # one may be unread because this event loop was busy
            self._receive()
            seconds = time.monotonic() - self._heard_at
        return seconds

    @property
    def stalled_for(self) -> float:
        """Seconds for which the engine has had work without finishing a step."""
        if self.last is None or not self.last.has_work:
            return 0.0
        return time.monotonic() - self._progress_at

    def _receive(self) -> None:
        # A ZMQ descriptor is edge-triggered: it signals again only after everything has been read.
        while not self._socket.closed and has_message(self._socket):
            self._note(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))

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
