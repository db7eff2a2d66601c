"""One app process's client of several engines that serve the same model (data parallelism).

A request goes to the engine that has most of its prompt cached, weighed against what each has under way. Engines report
with their heartbeats which blocks their prefix caches have gained and lost, so each app process knows the caches, also
of requests that others sent; a choice is noted at once, so that equal prompts go together before the next heartbeat.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.app.engines.summed_stats import SummedStats
from tessera.app.routing.block_keys import block_keys, split_keys
from tessera.app.routing.policy import RoutingPolicy
from tessera.app.routing.prefix_index import PrefixIndex
from tessera.engine.contract.errors import EngineUnavailableError, RequestError
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    AdapterInfo,
    EmbedderRole,
    EngineInfo,
    GpuUsage,
    PrefixChanges,
    SchedulerStats,
    TokenIds,
)
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import HISTORY_LENGTH, EngineClient, Vectors
from tessera.engine.ipc.request_stream import RequestStream

MAX_KEYS = 2**18  # of all engines; some 250 bytes each
HISTORY_INTERVAL = 0.4  # seconds; the engines' heartbeats come every half second, one after the other


class ReplicatedClient:
    """A client of all engines of a model, which it takes part in choosing from.

    Attributes:
        members: the clients of the engines.
        history: sums of the engines' heartbeats, the newest last.
    """

    def __init__(self, members: Sequence[EngineClient]) -> None:
        self.members = tuple(members)
        self.history: deque[tuple[float, SchedulerStats]] = deque(maxlen=HISTORY_LENGTH)
        self._stats = SummedStats()
        self._index = PrefixIndex(0)
        self._policy: RoutingPolicy | None = None  # before the first request
        for number, member in enumerate(self.members):
            member.watcher = _MemberWatcher(self, number)

    async def start(self) -> None:
        for member in self.members:
            await member.start()

    async def wait_first_ready(self) -> None:
        await asyncio.gather(*(member.wait_first_ready() for member in self.members))

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    # -- state ----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """The facts of one engine; those that matter to requests are the same for all."""
        return next((member.info for member in self.members if member.info is not None), None)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo] | None:
        """All engines have the same."""
        return next((member.adapters for member in self.members if member.adapters is not None), None)

    @property
    def is_dismissed(self) -> bool:
        return self.members[0].is_dismissed

    @is_dismissed.setter
    def is_dismissed(self, value: bool) -> None:
        for member in self.members:
            member.is_dismissed = value

    @property
    def ready(self) -> bool:
        return any(member.ready for member in self.members)

    @property
    def gpu(self) -> GpuUsage | None:
        """Of all engines' GPUs together."""
        each = [member.gpu for member in self.members if member.gpu is not None]
        shares = [gpu.utilization for gpu in each if gpu.utilization is not None]
        if not each:
            return None
        return GpuUsage(
            sum(gpu.memory_used for gpu in each),
            sum(gpu.memory_total for gpu in each),
            sum(shares) / len(shares) if shares else None,
        )

    def health(self) -> tuple[bool, str]:
        """Well as long as one engine is; the sentence names those that are not."""
        found = [member.health() for member in self.members]
        ill = [f"engine {number}: {reason}" for number, (well, reason) in enumerate(found) if not well]
        if not ill:
            return True, f"all {len(found)} engines are ready"
        return len(ill) < len(found), "; ".join(ill)

    async def metrics(self) -> bytes:
        raise AssertionError("each engine has metrics of its own")

    # -- requests -------------------------------------------------------------------------------

    def submit_all(
        self,
        sequences: Sequence[tuple[TokenIds, SamplingParams]],
        *,
        priority: int = 0,
        cache_salt: str = "",
        num_choices: int = 1,
        account: AccountRef = NO_ACCOUNT,
        adapter: str = "",
        prediction: TokenIds | None = None,
    ) -> list[RequestStream]:
        """As `EngineClient.submit_all`; all sequences go to one engine, chosen for the first prompt."""
        prompt, params = sequences[0]
        found = (self.adapters or {}).get(adapter)
        member = self._choose(prompt, params.max_tokens, cache_salt, b"" if found is None else found.digest)
        return member.submit_all(
            sequences,
            priority=priority,
            cache_salt=cache_salt,
            num_choices=num_choices,
            account=account,
            adapter=adapter,
            prediction=prediction,
        )

    async def embed(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        role: EmbedderRole = "main",
        first_lengths: Sequence[int] = (),
        account: AccountRef = NO_ACCOUNT,
    ) -> Vectors:
        """As `EngineClient.embed`, at the engine with the least to do."""
        well = self._well_members()
        member = min(well, key=lambda number: self.members[number].load)
        return await self.members[member].embed(inputs, role=role, first_lengths=first_lengths, account=account)

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False, by_server: bool = False) -> None:
        """As `EngineClient.load_adapter`, by all engines or none."""
        self._check_all_well()
        loaded: list[EngineClient] = []
        try:
            for member in self.members:
                await member.load_adapter(name, folder, replace=replace, by_server=by_server)
                loaded.append(member)
        except RequestError:
            for member in loaded:
                await member.unload_adapter(name, by_server=by_server)
            raise

    async def unload_adapter(self, name: str, *, by_server: bool = False) -> None:
        """As `EngineClient.unload_adapter`."""
        self._check_all_well()
        for member in self.members:
            await member.unload_adapter(name, by_server=by_server)

    def _check_all_well(self) -> None:
        if len(self._well_members()) < len(self.members):
            raise EngineUnavailableError(f"not all engines are ready: {self.health()[1]}; please try again later")

    def reset_prefix_cache(self, accounts: list[int] | None = None) -> None:
        """As `EngineClient.reset_prefix_cache`, of every engine."""
        for member in self.members:
            member.reset_prefix_cache(accounts)

    def _choose(self, prompt: TokenIds, max_tokens: int, cache_salt: str, adapter: bytes = b"") -> EngineClient:
        well = self._well_members()
        policy = self._policy
        info = self.info
        assert info is not None, "an engine that is well has said what it is"
        if policy is None:
            blocks = info.num_kv_blocks + info.num_host_kv_blocks + info.num_disk_kv_blocks
            self._index.set_capacity(min(blocks, MAX_KEYS // len(self.members)))
            policy = self._policy = RoutingPolicy(self._index, info.block_size)
        keys = block_keys(prompt, max_tokens, cache_salt, info, adapter)
        loads = [member.load for member in self.members]
        chosen = policy.choose(keys, loads, sum(1 << number for number in well))
        self._index.store(chosen, keys)
        return self.members[chosen]

    def _well_members(self) -> list[int]:
        """Raises EngineUnavailableError where there are none."""
        well = [number for number, member in enumerate(self.members) if member.health()[0]]
        if not well:
            raise EngineUnavailableError(f"{self.health()[1]}; please try again later")
        return well

    # -- news of the engines --------------------------------------------------------------------

    def _note_stats(self, number: int, time: float, stats: SchedulerStats) -> None:
        self._stats.note(number, stats)
        if not self.history or time - self.history[-1][0] >= HISTORY_INTERVAL:
            self.history.append((time, self._stats.sum()))

    def _note_prefixes(self, number: int, changes: PrefixChanges) -> None:
        self._index.evict(number, split_keys(changes.evicted))
        self._index.store(number, split_keys(changes.stored))

    def _note_end(self, number: int) -> None:
        self._stats.note_end(number)
        self._index.clear(number)
        if not any(member.history for member in self.members):
            self.history.clear()


@dataclass(frozen=True)
class _MemberWatcher:
    """Tells a ReplicatedClient what one of its members hears."""

    client: ReplicatedClient
    number: int

    def on_stats(self, time: float, stats: SchedulerStats) -> None:
        self.client._note_stats(self.number, time, stats)

    def on_prefixes(self, changes: PrefixChanges) -> None:
        self.client._note_prefixes(self.number, changes)

    def on_end(self) -> None:
        self.client._note_end(self.number)
