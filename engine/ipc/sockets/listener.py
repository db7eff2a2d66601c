"""The server's end of all clients' connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque

from tessera.engine.ipc.sockets.frames import READ_BYTES, SEND_BUFFER, FrameError, FrameReader
from tessera.engine.ipc.sockets.outgoing import Outgoing

logger = logging.getLogger("tessera.engine")

BACKLOG = 128  # connections that wait to be accepted
MAX_UNSENT = 2**30  # bytes for a client, which counts as gone if it leaves more unread
WRITER_LOOK_MS = 20  # until the writing thread notices one more client that reads slowly
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE = 0.1  # seconds without accepting connections, where descriptors or memory are short


class Peer:
    """One client's connection."""

    def __init__(self, name: bytes, connection: socket.socket) -> None:
        self.name = name
        self.socket = connection
        self.reader = FrameReader()
        self.outgoing = Outgoing()


class Listener:
    """Messages from clients and to them, by their names, which are given as they connect.

    `send` may be called by any thread, all else by one. What a socket does not take at once is sent by a thread of this
    object's own, so that it goes on during a step.

    Raises:
        OSError: the path cannot be listened at, or descriptors are short.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()  # of peers' names and of what is unsent
        self._peers: dict[bytes, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self._received: deque[tuple[bytes, bytes]] = deque()
        self._num_accepted = 0
        self._accepts_at: float | None = None  # the end of a pause
        self._writer: threading.Thread | None = None
        self._scratch = memoryview(bytearray(READ_BYTES))
        with contextlib.ExitStack() as opened:
            self._socket = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a process that has died
            self._socket.bind(path)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
            self._epoll = select.epoll()
            self._epoll.register(self._socket, select.EPOLLIN)
            opened.pop_all()

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._epoll.fileno()

    def watch(self, descriptor: int) -> None:
        """`wait` ends when this one can be read, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def wait(self, patience: float, timeout: float | None = None) -> list[int]:
        """Return when there is something to receive; -> the descriptors that can be read, those watched among them.

        Args:
            patience: seconds for which the thread looks without sleeping: a core that has slept is slow at first.
            timeout: seconds after them; None: any number.
        """
        if self._received:
            return []
        if self._accepts_at is not None:
            timeout = PAUSE
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if ready := self._epoll.poll(0):
                return [descriptor for descriptor, _ in ready]
        return [descriptor for descriptor, _ in self._epoll.poll(timeout)]

    @property
    def has_received(self) -> bool:
        """Whether `receive` gives a message at once; False where one has arrived that has not been read yet."""
        return bool(self._received)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message and who sent it; None if there is none now."""
        received = self._received
        if not received:
            self._read()
        return received.popleft() if received else None

    def send(self, client: bytes, payload: bytes) -> bool:
        """Returns at once; False if the client is gone."""
        with self._lock:
            peer = self._peers.get(client)
            if peer is None:
                return False
            try:
                peer.outgoing.send(peer.socket, payload)
            except OSError:
                self._forget(peer)
                return False
            if peer.outgoing.num_bytes > MAX_UNSENT:
                logger.warning("a client that has left %d bytes unread counts as gone", peer.outgoing.num_bytes)
                self._forget(peer)
                return False
            if peer.outgoing and self._writer is None:
                self._writer = threading.Thread(target=self._write, name="unsent", daemon=True)
                self._writer.start()
            return True

    def send_to_all(self, payload: bytes) -> None:
        for client in list(self._peers):
            self.send(client, payload)

    def close(self, linger: float = 0.0) -> None:
        """End all connections; clients have `linger` seconds to take what is unsent."""
        writer = self._writer
        if writer is not None:
            writer.join(linger)
        with self._lock:
            self._peers.clear()
        for peer in self._by_descriptor.values():
            peer.socket.close()
        self._by_descriptor.clear()
        self._epoll.close()
        self._socket.close()

    def _read(self) -> None:
        """Take what has come, at most READ_BYTES of a client."""
        if self._accepts_at is not None and time.monotonic() >= self._accepts_at:
            self._accepts_at = None
            self._epoll.modify(self._socket, select.EPOLLIN)
        for descriptor, _ in self._epoll.poll(0):
            peer = self._by_descriptor.get(descriptor)
            if peer is not None:
                self._read_peer(peer)
            elif descriptor == self._socket.fileno():
                self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in SHORT:
                self._accepts_at = time.monotonic() + PAUSE
                self._epoll.modify(self._socket, 0)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._num_accepted += 1
        peer = Peer(b"%d" % self._num_accepted, connection)
        self._by_descriptor[connection.fileno()] = peer
        with self._lock:
            self._peers[peer.name] = peer
        self._epoll.register(connection, select.EPOLLIN)

    def _read_peer(self, peer: Peer) -> None:
        try:
            frames = peer.reader.receive(peer.socket, self._scratch)
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            if isinstance(error, FrameError):
                logger.warning("a client's connection is closed: %s", error)
            with self._lock:
                self._forget(peer)
            del self._by_descriptor[peer.socket.fileno()]
            peer.socket.close()
            return
        self._received.extend([(peer.name, frame) for frame in frames])

    def _forget(self, peer: Peer) -> None:
        """It is sent nothing more; the reading thread closes its socket."""
        self._peers.pop(peer.name, None)
        peer.outgoing.clear()
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """Send what is unsent until nothing is."""
        while True:
            poller = select.poll()
            with self._lock:
                waiting = {peer.socket.fileno(): peer for peer in self._peers.values() if peer.outgoing}
                if not waiting:
                    self._writer = None
                    return
                for descriptor in waiting:
                    poller.register(descriptor, select.POLLOUT)
            for descriptor, _ in poller.poll(WRITER_LOOK_MS):
                with self._lock:
                    peer = waiting[descriptor]
                    try:
                        peer.outgoing.send_kept(peer.socket)
                    except OSError:
                        self._forget(peer)
