"""A model as the pool has it, and the app processes that use it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import msgspec

from tessera.app.engines.engine_group import EngineGroup
from tessera.app.engines.messages import EngineLaunch, FromPool, State
from tessera.engine.contract.messages import EngineInfo


class Link:
    """One app process's connection.

    Attributes:
        yielded: whether it has answered the last `Yield`, or is gone.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.yielded = asyncio.Event()

    def send(self, message: FromPool) -> None:
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")


@dataclass(eq=False)
class PooledModel:
    """One model of the pool.

    Attributes:
        holds: links whose app processes use it.
        idle_since: `time.monotonic()` of its last use; None while it is used.
        used_at: of its last use, for the choice of the one that makes room.
        failed_at: of its last failure to load.
        num_asking: links that wait for it.
        accounts: those whose requests have used it, or waited for it, since it was last unused.
        turn_began: `time.monotonic()` at which it was loaded, or last seen idle.
        makes_way: requests that come now wait, until it has made room for another model.
        sleep_bytes: host memory that it takes to sleep; None: it cannot, or nothing is known of it yet.
        is_kept: its engine sleeps, with the weights in host memory.
        host_bytes: of host memory that its engine has taken to sleep, and keeps until it ends.
    """

    index: int
    launch: EngineLaunch
    keep_alive: float
    state: State = "unloaded"
    group: EngineGroup | None = None
    holds: set[Link] = field(default_factory=set)
    idle_since: float | None = None
    used_at: float = 0.0
    failed_at: float = -math.inf
    num_loads: int = 0
    loading: asyncio.Task[EngineInfo] | None = None
    num_asking: int = 0
    accounts: set[int] = field(default_factory=set)
    turn_began: float = 0.0
    makes_way: bool = False
    num_wakes: int = 0
    sleep_bytes: int | None = None
    is_kept: bool = False
    host_bytes: int = 0

    @property
    def name(self) -> str:
        return self.launch.config.served_name or self.launch.config.model

    @property
    def share(self) -> float:
        return self.launch.config.gpu_memory_utilization

    @property
    def is_unused(self) -> bool:
        """Neither held nor asked for, nor at work for requests whose clients have left, such as those of batches."""
        return not self.num_asking and self._is_at_rest

    @property
    def is_idle(self) -> bool:
        """Loaded and unused; those that ask for one that makes way wait for its next turn."""
        return self.state == "loaded" and self._is_at_rest and (self.makes_way or not self.num_asking)

    @property
    def takes_room(self) -> bool:
        """On the device."""
        return self.state in ("loading", "loaded", "unloading") or self._ends_asleep

    @property
    def is_leaving(self) -> bool:
        """It gives its room up."""
        return self.state == "unloading" or self._ends_asleep

    @property
    def _is_at_rest(self) -> bool:
        return not self.holds and not (self.group is not None and self.group.has_work)

    @property
    def _ends_asleep(self) -> bool:
        """A sleeping model has given up its room, but its engine may still be ending."""
        return self.state == "asleep" and self.group is not None and not self.is_kept
