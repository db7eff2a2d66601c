"""The sockets between the engine's client, its process and its supervisor, without sockets, on virtual time.

A connection keeps its messages in order. What was sent to a process that dies is lost; what it sent arrives. What is
sent before the next process listens waits for it.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable

from tests.simulation.virtual_loop import VirtualLoop

TICK = 1e-6  # seconds between two messages of a connection, as timers of one time are in no order
LATENCY = 0.002  # seconds at most
NOTICE = 0.05  # seconds at most until a disconnection is noticed
RECONNECT = 0.2  # seconds at most until a connection is made


class Wire:
    """All sockets of one history.

    Attributes:
        has_descriptors: False makes every new socket fail.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.has_descriptors = True
        self.open: set[Listener | Connection] = set()
        self.listening: dict[str, Listener] = {}
        self.waiting: dict[str, list[Connection]] = {}  # connections that a listener will have

    def delay(self, most: float) -> float:
        return self.rng.random() * most

    def kill(self, address: str) -> None:
        """The process that listens there has died."""
        self.listening.pop(address).close()

    def take_descriptor(self) -> None:
        if not self.has_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def listener(self, path: str) -> Listener:
        """In place of the class."""
        return Listener(self, path)

    def connection(self, path: str, on_received: Callable[[], object]) -> Connection:
        """In place of the class."""
        return Connection(self, path, on_received)

    def send_once(self, path: str, payload: bytes) -> None:
        """In place of the function."""
        self.take_descriptor()
        listener = self.listening.get(path)
        if listener is None:
            raise FileNotFoundError(path)
        self.loop.call_later(self.delay(LATENCY), listener.arrive, b"once", payload)


class Listener:
    """Attributes: `received`: what has arrived; `on_arrival`: called when something does."""

    def __init__(self, wire: Wire, path: str) -> None:
        wire.take_descriptor()
        self.wire = wire
        self.received: deque[tuple[bytes, bytes]] = deque()
        self.on_arrival: Callable[[], object] = lambda: None
        self.is_closed = False
        self._peers: dict[bytes, Connection] = {}
        self._busy_until: dict[bytes, float] = {}
        self._num_accepted = 0
        wire.open.add(self)
        wire.listening[path] = self
        for connection in wire.waiting.pop(path, []):
            wire.loop.call_later(wire.delay(RECONNECT), self.accept, connection)

    def accept(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        if self.is_closed:
            connection.find()
            return
        self._num_accepted += 1
        name = b"%d" % self._num_accepted
        self._peers[name] = connection
        connection.reach(self, name)

    def arrive(self, name: bytes, payload: bytes) -> None:
        if not self.is_closed:
            self.received.append((name, payload))
            self.on_arrival()

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.received.popleft() if self.received else None

    def send(self, client: bytes, payload: bytes) -> bool:
        peer = self._peers.get(client)
        if peer is None or peer.is_closed:
            return False
        loop = self.wire.loop
        at = max(self._busy_until.get(client, 0.0) + TICK, loop.now + self.wire.delay(LATENCY))
        self._busy_until[client] = at
        loop.call_at(at, peer.arrive, payload)
        return True

    def send_to_all(self, payload: bytes) -> None:
        for client in list(self._peers):
            self.send(client, payload)

    def close(self, linger: float = 0.0) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.wire.open.discard(self)
            for name, peer in self._peers.items():
                # After what has been sent, at the earliest.
                sent = max(self._busy_until.get(name, 0.0), self.wire.loop.now)
                self.wire.loop.call_at(sent + TICK + self.wire.delay(NOTICE), peer.lose)
            self._peers.clear()


class Connection:
    def __init__(self, wire: Wire, path: str, on_received: Callable[[], object]) -> None:
        wire.take_descriptor()
        self.wire = wire
        self.received: deque[bytes] = deque()
        self.is_lost = self.is_closed = False
        self._path = path
        self._on_received = on_received
        self._listener: Listener | None = None
        self._name = b""
        self._unsent: list[bytes] = []
        self._busy_until = 0.0
        wire.open.add(self)
        self.find()

    def find(self) -> None:
        """Reach who listens, or will."""
        listener = self.wire.listening.get(self._path)
        if listener is None:
            self.wire.waiting.setdefault(self._path, []).append(self)
        else:
            listener.accept(self)

    def reach(self, listener: Listener, name: bytes) -> None:
        self._listener, self._name = listener, name
        unsent, self._unsent = self._unsent, []
        for payload in unsent:
            self.send(payload)

    def send(self, payload: bytes) -> None:
        if self.is_closed or self.is_lost:
            return
        if self._listener is None:
            self._unsent.append(payload)
            return
        self._busy_until = max(self._busy_until + TICK, self.wire.loop.now + self.wire.delay(LATENCY))
        self.wire.loop.call_at(self._busy_until, self._listener.arrive, self._name, payload)

    def arrive(self, payload: bytes) -> None:
        if not self.is_closed:
            self.received.append(payload)
            self._on_received()

    def lose(self) -> None:
        if not self.is_closed:
            self.is_lost = True
            self._on_received()

    def read(self) -> None:
        pass

    def take_rest(self) -> deque[bytes]:
        return self.received

    def close(self) -> None:
        self.is_closed = True
        self.wire.open.discard(self)
