"""The engine processes that serve one model, each on a device of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tessera.app.engines.messages import EngineLaunch, engine_dir
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.machine import num_cores
from tessera.engine.contract.messages import EngineInfo
from tessera.engine.ipc.supervisor import EngineSupervisor

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class EngineGroup:
    """Starts and ends a model's engines together; each restarts by itself.

    Args:
        supervise: makes the supervisor of one engine from its number, config, folder and environment.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        run_dir: Path,
        index: int,
        supervise: Callable[[int, EngineConfig, Path, dict[str, str]], EngineSupervisor],
    ) -> None:
        """Raises ConfigError where fewer devices are visible than are needed."""
        self._supervisors: list[EngineSupervisor] = []
        for number, (config, environment) in enumerate(_engines_of(launch)):
            folder = engine_dir(run_dir, index, number)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._supervisors.append(supervise(number, config, folder, environment))

    @property
    def has_work(self) -> bool:
        """Whether one of the engines had requests half a second ago."""
        return any(supervisor.has_work for supervisor in self._supervisors)

    def start(self) -> None:
        """Begin; returns at once."""
        for supervisor in self._supervisors:
            supervisor.start()

    async def wait_launched(self) -> None:
        """Return when all processes run, or could not be made."""
        await asyncio.gather(*(supervisor.wait_launched() for supervisor in self._supervisors))

    async def wait_started(self) -> EngineInfo:
        """Wait for the first time that all engines are ready; -> the facts of the first.

        Raises:
            ConfigError: one refused its options or the model, or found no device of its own.
            EngineStartError: one failed repeatedly.
        """
        infos = await asyncio.gather(*(supervisor.wait_started() for supervisor in self._supervisors))
        for number, info in enumerate(infos):
            if info.device != infos[0].device:
                raise ConfigError(
                    f"--data-parallel-size {len(infos)} needs {len(infos)} devices of one kind, but engine {number} "
                    f"runs on {info.device} ({info.device_reason}) and engine 0 on {infos[0].device}"
                )
        return infos[0]

    async def sleep(self, timeout: float) -> bool:
        """See `EngineSupervisor.sleep`; False where one of the engines could not."""
        return all(await asyncio.gather(*(supervisor.sleep(timeout) for supervisor in self._supervisors)))

    async def wake_up(self) -> EngineInfo:
        """-> the facts of the first engine. Raises: EngineStartError if one cannot."""
        await asyncio.gather(*(supervisor.wake_up() for supervisor in self._supervisors))
        info = self._supervisors[0].info
        assert info is not None, "it was ready before it slept"
        return info

    async def stop(self, timeout: float) -> None:
        """Let the engines finish what runs, for at most `timeout` seconds, and end them."""
        await asyncio.gather(*(supervisor.stop(timeout) for supervisor in self._supervisors))


def _engines_of(launch: EngineLaunch) -> Iterator[tuple[EngineConfig, dict[str, str]]]:
    """Config and environment of each engine."""
    config, num_engines = launch.config, launch.num_engines
    if num_engines == 1:
        yield config, {}
        return
    threads = max(1, (num_cores() - 1) // num_engines)
    for number in range(num_engines):
        folder = config.kv_offload_dir
        if folder is not None and number > 0:
            folder = str(Path(folder) / f"engine-{number}")  # a folder of blocks has one owner
        environment = {"OPENBLAS_NUM_THREADS": str(threads)}
        if config.device != "cpu":
            environment[VISIBLE_DEVICES] = _devices(number, num_engines, config.tensor_parallel_size)
        yield msgspec.structs.replace(config, reports_prefixes=True, kv_offload_dir=folder), environment


def _devices(number: int, num_engines: int, num_ranks: int) -> str:
    """The devices of engine `number`, one for each rank, as CUDA_VISIBLE_DEVICES names them. Raises ConfigError."""
    visible = os.environ.get(VISIBLE_DEVICES)
    needed = num_engines * num_ranks
    if visible is None:
        devices = [str(device) for device in range(needed)]
    else:
        devices = [name.strip() for name in visible.split(",") if name.strip()]
    if len(devices) < needed:
        each = f" with --tensor-parallel-size {num_ranks}" if num_ranks > 1 else ""
        raise ConfigError(
            f"--data-parallel-size {num_engines}{each} needs {needed} devices, but {VISIBLE_DEVICES}={visible} "
            f"names {len(devices)}"
        )
    return ",".join(devices[number * num_ranks : (number + 1) * num_ranks])
