"""A model on a GPU that sleeps and wakes up: its memory is free meanwhile, its CUDA graphs live on, its tokens too."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import find_device
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tests.bench.models import LLAMA_8B, write_model
from tests.gpu.alone import measures_free_memory

pytestmark = pytest.mark.gpu

CLIENT = b"client"
NUM_LAYERS = 4
NUM_CYCLES = 20
MIB = 2**20
MOST_LEFT = 64 * MIB  # of pieces too small to be given back
MOST_GROWTH = 64 * MIB


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    found = find_device(0)
    if not found.usable:
        pytest.skip(found.reason)
    return CudaDevice(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**LLAMA_8B, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 4096}
    return write_model(tmp_path_factory.mktemp("models"), "sleeping", config)


def start(folder: Path, **settings: Any) -> tuple[LoadedEngine, EngineCore]:
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        seed=5,
        max_model_len=4096,
        num_kv_blocks=4096,
        max_num_seqs=8,
        can_sleep=True,
        **settings,
    )
    engine = load_engine(config, lambda stage, done, total: None)
    assert isinstance(engine.core, EngineCore)
    return engine, engine.core


def tokens(core: EngineCore) -> list[list[int]]:
    """Of two prompts, one after the other; the longer one is beyond the CUDA graphs."""
    rng = np.random.default_rng(3)
    found: dict[str, list[int]] = {}
    for length in (3000, 20):
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        prompt = array("i", rng.integers(3, 2000, length).tolist())
        core.add_request(AddRequest(str(length), prompt, params, time.monotonic()), CLIENT)
        found[str(length)] = []
        while core.has_work:
            for output in core.step().get(CLIENT, []):
                assert output.error is None
                found[output.request_id] += output.token_ids
    return list(found.values())


@measures_free_memory
@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"cpu_offload_gib": "1.3"}], ids=str)
def test_twenty_nights(device: CudaDevice, folder: Path, settings: dict[str, Any]) -> None:
    engine, core = start(folder, **settings)
    sleeper, info = engine.sleeper, engine.info
    assert sleeper is not None
    assert info.sleep_bytes is not None
    expected = tokens(core)
    on_device = info.weight_bytes - (info.weight_offload.nbytes if info.weight_offload is not None else 0)
    assert info.sleep_bytes < 1.2 * on_device + MOST_LEFT
    awake: list[int] = []
    wakes: list[float] = []
    for _ in range(NUM_CYCLES):
        awake.append(device.free_memory())
        sleeper.sleep()
        freed = device.free_memory() - awake[-1]
        assert freed > 0.95 * on_device + info.kv_cache_bytes - MOST_LEFT, freed / MIB
        begin = time.perf_counter()
        sleeper.wake_up()
        wakes.append(time.perf_counter() - begin)
    assert tokens(core) == expected
    assert abs(awake[-1] - awake[0]) < MOST_GROWTH
    print(f"{info.sleep_bytes / 1e9:.1f} GB in {min(wakes):.3f} to {max(wakes):.3f} s, {sum(wakes[1:]):.2f} s in all")


def test_memory_of_a_sleeping_model_can_be_used_by_another(device: CudaDevice, folder: Path) -> None:
    first, core = start(folder)
    assert first.sleeper is not None
    expected = tokens(core)
    first.sleeper.sleep()
    second, other = start(folder)
    assert tokens(other) == expected
    assert second.sleeper is not None
    second.sleeper.sleep()
    first.sleeper.wake_up()
    assert tokens(core) == expected
