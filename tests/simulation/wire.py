"""ZeroMQ as far as the engine's client, its process and its supervisor use it, without sockets, on virtual time.

A connection keeps its messages in order. What was sent to a process that dies is lost; what it sent arrives. What is
sent before the next process listens waits for it, as ZeroMQ has it.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from tests.simulation.virtual_loop import VirtualLoop

TICK = 1e-6  # seconds between two messages of a connection, as timers of one time are in no order
LATENCY = 0.002  # seconds at most
NOTICE = 0.05  # seconds at most until a disconnection is noticed
RECONNECT = 0.2  # seconds at most until a connection is made again

AGAIN = zmq.Again()


class Wire:
    """All sockets of one history.

    Attributes:
        has_descriptors: False makes every new socket fail.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.has_descriptors = True
        self.open: set[Socket] = set()
        self.bound: dict[str, Socket] = {}
        self.connected: dict[str, list[Socket]] = {}
        self._next_fd = 100

    def fd(self) -> int:
        self._next_fd += 1
        return self._next_fd

    def delay(self, most: float) -> float:
        return self.rng.random() * most

    def kill(self, address: str) -> None:
        """The process that is bound there has died."""
        self.bound.pop(address).close()

    def module(self) -> ZmqModule:
        return ZmqModule(self)


class ZmqModule:
    """In place of the module `zmq`."""

    Again, ZMQError, EHOSTUNREACH = zmq.Again, zmq.ZMQError, zmq.EHOSTUNREACH
    NOBLOCK, DEALER, ROUTER, PUB, SUB, POLLIN = zmq.NOBLOCK, zmq.DEALER, zmq.ROUTER, zmq.PUB, zmq.SUB, zmq.POLLIN
    SNDHWM, RCVHWM, ROUTER_MANDATORY = zmq.SNDHWM, zmq.RCVHWM, zmq.ROUTER_MANDATORY
    EVENT_DISCONNECTED = zmq.EVENT_DISCONNECTED

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def Context(self) -> Context:
        return Context(self._wire)


class Context:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def socket(self, kind: int) -> Socket:
        if not self._wire.has_descriptors:
            raise zmq.ZMQError(errno.EMFILE)
        return KINDS[kind](self._wire)

    def destroy(self, linger: int = 0) -> None:
        pass

    def term(self) -> None:
        pass


class Socket:
    """One end; `inbox` is what has arrived."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.FD = wire.fd()
        self.inbox: deque[Any] = deque()
        self.closed = False
        self.address = ""
        self.on_arrival: Callable[[], object] = lambda: None
        wire.open.add(self)

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def get(self, option: int) -> int:
        """Of what there is to know of a socket, its events."""
        assert option == zmq.EVENTS
        return int(zmq.POLLIN) if self.inbox else 0

    def bind(self, address: str) -> None:
        self.address = address
        self.wire.bound[address] = self
        for other in list(self.wire.connected.get(address, ())):
            self.wire.loop.call_later(self.wire.delay(RECONNECT), other.reach, self)

    def connect(self, address: str) -> None:
        self.address = address
        self.wire.connected.setdefault(address, []).append(self)
        if address in self.wire.bound:
            self.reach(self.wire.bound[address])

    def reach(self, bound: Socket) -> None:
        """The connection to `bound` is made."""

    def recv(self, flags: int = 0) -> Any:
        assert not self.closed, "a closed socket is read"
        if not self.inbox:
            raise AGAIN.with_traceback(None)  # making another takes longer than the rest
        return self.inbox.popleft()

    recv_multipart = recv

    def arrive(self, message: Any) -> None:
        if not self.closed:
            self.inbox.append(message)
            self.wire.loop.signal(self.FD)
            self.on_arrival()

    def close(self, linger: int = 0) -> None:
        self.closed = True
        self.wire.open.discard(self)
        if self in self.wire.connected.get(self.address, ()):
            self.wire.connected[self.address].remove(self)


class Dealer(Socket):
    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.identity = b""
        self.router: Router | None = None
        self.monitor: Socket | None = None
        self._unsent: list[bytes] = []
        self._busy_until = 0.0

    def get_monitor_socket(self, events: int, address: str) -> Socket:
        if not self.wire.has_descriptors:
            raise zmq.ZMQError(errno.EMFILE)
        self.monitor = Socket(self.wire)
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    def reach(self, bound: Socket) -> None:
        if self.closed or bound.closed:
            return
        assert isinstance(bound, Router)
        self.router = bound
        self.identity = b"%d" % self.wire.fd()
        bound.peers[self.identity] = self
        unsent, self._unsent = self._unsent, []
        for payload in unsent:
            self.send(payload)

    def send(self, payload: bytes, flags: int = 0) -> None:
        assert not self.closed, "a closed socket is written to"
        if self.router is None:
            self._unsent.append(payload)
            return
        self._busy_until = max(self._busy_until + TICK, self.wire.loop.now + self.wire.delay(LATENCY))
        self.wire.loop.call_at(self._busy_until, self.router.arrive, [self.identity, payload])

    def lose_router(self) -> None:
        self.router = None
        if self.monitor is not None:
            self.wire.loop.call_later(self.wire.delay(NOTICE), self.monitor.arrive, [b"disconnected"])

    def close(self, linger: int = 0) -> None:
        super().close()
        if self.router is not None:
            self.router.peers.pop(self.identity, None)


class Router(Socket):
    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.peers: dict[bytes, Dealer] = {}
        self._busy_until: dict[bytes, float] = {}

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        identity, payload = frames
        peer = self.peers.get(identity)
        if peer is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        at = max(self._busy_until.get(identity, 0.0) + TICK, self.wire.loop.now + self.wire.delay(LATENCY))
        self._busy_until[identity] = at
        self.wire.loop.call_at(at, peer.arrive, payload)

    def close(self, linger: int = 0) -> None:
        super().close()
        for peer in self.peers.values():
            peer.lose_router()
        self.peers.clear()


class Publisher(Socket):
    def send(self, payload: bytes, flags: int = 0) -> None:
        for subscriber in self.wire.connected.get(self.address, ()):
            self.wire.loop.call_soon(subscriber.arrive, payload)


class Subscriber(Socket):
    def subscribe(self, prefix: bytes) -> None:
        pass


KINDS: dict[int, type[Socket]] = {
    zmq.DEALER: Dealer,
    zmq.ROUTER: Router,
    zmq.PUB: Publisher,
    zmq.SUB: Subscriber,
}
