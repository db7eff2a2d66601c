"""Limit on one app process's open connections: the longest idle one is closed to make room."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from tessera.app.http.counts import HttpCounts

logger = logging.getLogger("tessera.app")

SPARE_PLACES = 32  # beyond the limit, for health checks
LOG_INTERVAL = 60.0  # seconds between two lines on the same shortage


class Connection(Protocol):
    transport: asyncio.Transport

    def drop(self) -> None:
        """Close at once."""


@dataclass(frozen=True)
class Place:
    is_spare: bool


class ConnectionLimit:
    """Keeps to `limit` connections, and a few spare ones for health checks.

    Without room, the connection that has been without a request for the longest time goes. Where each has one under
    way, the new one gets a spare place, and where those are taken as well, none.
    """

    def __init__(self, limit: int, counts: HttpCounts) -> None:
        self._limit = limit
        self._counts = counts
        self._open: set[Connection] = set()
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # the longest idle first
        self._dropped: set[Connection] = set()  # of those open, for a moment more
        self.draining = False
        self._logged_at = float("-inf")
        counts.set_open_connections(0)

    def enter(self, connection: Connection) -> Place | None:
        """A place for a new connection, or None; it counts until `leave` either way."""
        self._open.add(connection)
        self._counts.set_open_connections(len(self._open))
        if self.draining:
            return self._spare_place(connection)
        if len(self._open) - len(self._dropped) > self._limit and self._idle:
            oldest, _ = self._idle.popitem(last=False)
            self._drop(oldest)
            oldest.drop()
        num_kept = len(self._open) - len(self._dropped)
        if num_kept > self._limit + SPARE_PLACES:
            self._drop(connection)
            return None
        self._idle[connection] = None
        return Place(is_spare=num_kept > self._limit)

    def begin_drain(self) -> None:
        """New connections get spare places alone from now on."""
        self.draining = True

    def _spare_place(self, connection: Connection) -> Place | None:
        """While the server drains: the longest idle of too many goes."""
        self._idle[connection] = None
        if len(self._idle) > SPARE_PLACES:
            oldest, _ = self._idle.popitem(last=False)
            self._drop(oldest)
            oldest.drop()
        return Place(is_spare=True)

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._dropped.discard(connection)
        self._idle.pop(connection, None)
        self._counts.set_open_connections(len(self._open))

    def make_busy(self, connection: Connection) -> None:
        """It has a request under way."""
        self._idle.pop(connection, None)

    def make_idle(self, connection: Connection) -> None:
        """It has none."""
        self._idle[connection] = None

    def count_dropped(self) -> None:
        self._counts.count_dropped_connection()
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL:
            self._logged_at = now
            logger.warning("%d HTTP connections are open, no more are taken (--max-connections)", self._limit)

    def _drop(self, connection: Connection) -> None:
        self._dropped.add(connection)
        self.count_dropped()
