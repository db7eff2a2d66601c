"""The client of a model's engine, or of its engines, as the rest of the app knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    AdapterInfo,
    EmbedderRole,
    EngineInfo,
    GpuUsage,
    SchedulerStats,
    TokenIds,
)
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import Vectors
from tessera.engine.ipc.request_stream import RequestStream


class ModelClient(Protocol):
    """`EngineClient` has the docstrings."""

    is_dismissed: bool

    @property
    def adapters(self) -> Mapping[str, AdapterInfo] | None: ...

    history: deque[tuple[float, SchedulerStats]]

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def ready(self) -> bool: ...
    @property
    def gpu(self) -> GpuUsage | None: ...
    async def start(self) -> None: ...
    async def wait_first_ready(self) -> None: ...
    async def close(self) -> None: ...
    def health(self) -> tuple[bool, str]: ...
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
    ) -> list[RequestStream]: ...
    async def embed(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        role: EmbedderRole = "main",
        first_lengths: Sequence[int] = (),
        account: AccountRef = NO_ACCOUNT,
    ) -> Vectors: ...
    async def load_adapter(self, name: str, folder: str, *, replace: bool = False, by_server: bool = False) -> None: ...
    async def unload_adapter(self, name: str, *, by_server: bool = False) -> None: ...
    def reset_prefix_cache(self, accounts: list[int] | None = None) -> None: ...
    async def metrics(self) -> bytes: ...
