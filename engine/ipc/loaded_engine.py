"""A loaded engine: the core, its facts, metrics, embedders and sleeper."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import (
    AddEmbedding,
    AddRequest,
    EmbedderRole,
    EmbeddingOutput,
    EngineInfo,
    GpuUsage,
    RequestOutput,
    SchedulerStats,
)
from tessera.engine.ipc.turns import Turns

if TYPE_CHECKING:
    from tessera.engine.adapters.catalog import AdapterCatalog
    from tessera.engine.kv_tiers.prefix_report import PrefixReport


class Core(Protocol):
    """The part of EngineCore that the engine's process uses; `client` is opaque to the core."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def add_request(self, request: AddRequest, client: bytes) -> None: ...
    def abort(self, request_ids: list[str], client: bytes) -> None: ...
    def step(self) -> Mapping[bytes, list[RequestOutput]]: ...
    def stats(self) -> SchedulerStats: ...
    def reset_prefix_cache(self, accounts: Collection[int] | None = None) -> None: ...


class Embedding(Protocol):
    """The part of Embedder that the engine's process uses."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def add_request(self, request: AddEmbedding, client: bytes) -> None: ...
    def abort(self, request_ids: list[str], client: bytes) -> None: ...
    def step(self, *, busy: bool) -> list[tuple[bytes, EmbeddingOutput]]: ...


class Sleeping(Protocol):
    """The part of Sleeper that the engine's process uses."""

    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...


@dataclass(frozen=True)
class LoadedEngine:
    core: Core
    info: EngineInfo
    render_metrics: Callable[[], bytes]
    embedders: Mapping[EmbedderRole, Embedding] = field(default_factory=dict)
    gpu_usage: Callable[[], GpuUsage | None] = lambda: None
    turns: Turns = field(default_factory=Turns)
    sleeper: Sleeping | None = None
    prefix_report: PrefixReport | None = None
    adapters: AdapterCatalog | None = None
    loads_adapters: bool = False  # when clients ask for it
    prepare_next: Callable[[], bool] = lambda: False  # a little of what the start has left; False once nothing is left

    @property
    def has_work(self) -> bool:
        return self.core.has_work or any(embedder.has_work for embedder in self.embedders.values())

    @property
    def num_steps(self) -> int:
        return self.core.num_steps + sum(embedder.num_steps for embedder in self.embedders.values())


Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total
Loader: TypeAlias = Callable[[EngineConfig, Progress], LoadedEngine]
