"""Messages between the app processes and the pool of engines: lines of JSON over a Unix socket of the run folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tessera.engine.contract.config import EngineConfig

State = Literal["unloaded", "loading", "loaded", "unloading", "asleep", "failed"]
SOCKET = "models"


def pool_address(run_dir: str | Path) -> str:
    return str(Path(run_dir) / SOCKET)


def engine_dir(run_dir: str | Path, index: int, number: int = 0) -> Path:
    """The folder with the sockets of engine `number` of model `index`."""
    return Path(run_dir) / (f"{index}.{number}" if number else str(index))


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the pool.

    Attributes:
        config: `gpu_memory_utilization` is its share of the device.
        keep_alive: seconds without a request after which it is unloaded; None: never for that.
        preload: load it when the server starts.
        num_engines: processes with this config, each on a device of its own.
    """

    config: EngineConfig
    keep_alive: float | None = None
    preload: bool = True
    num_engines: int = 1


class ModelStatus(msgspec.Struct, frozen=True):
    """A model as the pool has it.

    Attributes:
        expires_at: `time.time()` at which it is unloaded unless it is used before; 0: not known, or never.
        num_loads, num_wakes: since the server's start; it is woken where its weights were in host memory.
        host_bytes: of host memory, that it takes to sleep, asleep or not.
        in_host_memory: it is not loaded, and its weights are there.
    """

    state: State = "unloaded"
    expires_at: float = 0.0
    num_loads: int = 0
    num_wakes: int = 0
    host_bytes: int = 0
    in_host_memory: bool = False


class Hold(msgspec.Struct, frozen=True, tag=True):
    """This app process is about to use the model: load it if need be, and keep it until `Release`."""

    model: int


class Used(msgspec.Struct, frozen=True, tag=True):
    """Requests of this account use the model, or wait for it; said once while this app process holds or asks for it."""

    model: int
    account: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """No request of this app process has used the model since `time.monotonic()` was `used_at`."""

    model: int
    used_at: float


class Yielded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Yield`, after the `Release` of each model that no request uses."""


class KeepAlive(msgspec.Struct, frozen=True, tag=True):
    """Keep the model for so many seconds after its last request; None: for ever."""

    model: int
    seconds: float | None

    @property
    def limit(self) -> float:
        return math.inf if self.seconds is None else self.seconds


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Unload the model, and load it for no request until `Wake`; with `keep` to host memory if there is room."""

    token: int
    model: int
    keep: bool = True


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Load the model, asleep or not."""

    token: int
    model: int


class Statuses(msgspec.Struct, frozen=True, tag=True):
    """Of all models; sent at first and after every change."""

    models: list[ModelStatus]


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and held."""

    model: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded now."""

    model: int
    reason: str
    code: str


class Yield(msgspec.Struct, frozen=True, tag=True):
    """Room is needed: release what no request uses, then answer `Yielded`."""


class MakeWay(msgspec.Struct, frozen=True, tag=True):
    """The model's turn is over: finish the requests that use it and release it; those that come now need `Hold`."""

    model: int


class GoOn(msgspec.Struct, frozen=True, tag=True):
    """`MakeWay` is off, for a model that is still held."""

    model: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """`Sleep` or `Wake` has been carried out, or has failed for a reason."""

    token: int
    reason: str | None = None


ToPool: TypeAlias = Hold | Used | Release | Yielded | KeepAlive | Sleep | Wake
FromPool: TypeAlias = Statuses | Granted | Refused | Yield | MakeWay | GoOn | Done
