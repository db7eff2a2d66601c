"""Stand-ins for engine processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tessera.app.engines import engines as engines_module
from tessera.app.engines import pool as pool_module
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.ipc.supervisor import EngineStartError
from tests.support.fakes.fake_client import INFO


class FakeSupervisor:
    """An engine that is there at once; `gate` holds its start up, and `at_work` is what its heartbeats say."""

    started: ClassVar[list[str]] = []
    stopped: ClassVar[list[str]] = []
    gate: ClassVar[asyncio.Event | None] = None
    launch: ClassVar[asyncio.Event | None] = None  # holds its process up
    at_work: ClassVar[set[str]] = set()
    slept: ClassVar[list[str]] = []
    woken: ClassVar[list[str]] = []
    restless: ClassVar[set[str]] = set()  # that cannot sleep, or cannot wake up
    sleep_bytes: ClassVar[int | None] = None
    dusk: ClassVar[asyncio.Event | None] = None  # holds sleep up
    info: Any = None

    def __init__(self, config: EngineConfig, run_dir: Path, **settings: Any) -> None:
        self.name = config.served_name

    @property
    def has_work(self) -> bool:
        return self.name in self.at_work

    def start(self) -> None:
        self.started.append(self.name)

    async def wait_launched(self) -> None:
        if self.launch is not None:
            await self.launch.wait()

    async def wait_started(self) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        if self.name == "broken":
            raise ConfigError("the folder /secret is wrong")
        self.info = msgspec.structs.replace(INFO, sleep_bytes=self.sleep_bytes)
        return self.info

    async def sleep(self, timeout: float) -> bool:
        await asyncio.sleep(0)
        if self.dusk is not None:
            await self.dusk.wait()
        self.slept.append(self.name)
        return self.name not in self.restless

    async def wake_up(self) -> None:
        await asyncio.sleep(0)
        if self.name in self.restless:
            raise EngineStartError("its memory is taken")
        self.woken.append(self.name)

    async def stop(self, timeout: float) -> None:
        self.stopped.append(self.name)


class AlwaysReady:
    """In the place of an app process's client of an engine."""

    ready = True
    is_dismissed = False

    def __init__(self, run_dir: Path) -> None:
        pass

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("started", []), ("stopped", []), ("at_work", set()), ("gate", None), ("launch", None)):
        monkeypatch.setattr(FakeSupervisor, name, value)
    for name, value in (("slept", []), ("woken", []), ("restless", set()), ("sleep_bytes", None), ("dusk", None)):
        monkeypatch.setattr(FakeSupervisor, name, value)
    monkeypatch.setattr(pool_module, "EngineSupervisor", FakeSupervisor)
    monkeypatch.setattr(pool_module, "LOOK_INTERVAL", 0.01)
    monkeypatch.setattr(engines_module, "EngineClient", AlwaysReady)
    monkeypatch.setattr(engines_module, "LINGER", 0.0)
