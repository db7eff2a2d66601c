"""Layers that a step copies from host memory: the same tokens in CUDA graphs and without, and the rate of the link."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, EngineInfo
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.cuda.copies.layer_copies import CudaLayerCopies
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import find_device
from tessera.engine.ipc.load import load_engine
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.tensor import empty, uint8
from tests.bench.models import LLAMA_8B, write_model

pytestmark = pytest.mark.gpu

CLIENT = b"client"
NUM_LAYERS = 8
LEAST_SHARE = 0.85  # of the link's rate
LAYER_BYTES = 256 << 20


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    found = find_device(0)
    if not found.usable:
        pytest.skip(found.reason)
    return CudaDevice(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**LLAMA_8B, "num_hidden_layers": NUM_LAYERS, "hidden_size": 1024, "intermediate_size": 2816}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 4096}
    return write_model(tmp_path_factory.mktemp("models"), "offloaded", config)


def serve(folder: Path, **settings: Any) -> tuple[list[list[int]], EngineInfo]:
    """The tokens of prompts of several lengths: with CUDA graphs, and beyond the largest of them."""
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        seed=5,
        max_model_len=4096,
        num_kv_blocks=2048,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        **settings,
    )
    engine = load_engine(config, lambda stage, done, total: None)
    core = engine.core
    assert isinstance(core, EngineCore)
    rng = np.random.default_rng(3)
    found: dict[str, list[int]] = {}
    for length in (3000, 5, 40, 700, 130):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        core.add_request(
            AddRequest(str(length), array("i", rng.integers(3, 2000, length)), params, time.monotonic()), CLIENT
        )
        found[str(length)] = []
        while core.has_work:  # alone, so that the kernels are those of the same numbers of rows
            for output in core.step().get(CLIENT, []):
                assert output.error is None
                found[output.request_id] += output.token_ids
    return list(found.values()), engine.info


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"quantization": "int4"}], ids=str)
def test_the_tokens_are_those_without(device: CudaDevice, folder: Path, settings: dict[str, Any]) -> None:
    expected, info = serve(folder, **settings)
    assert info.weight_offload is None
    layer_gib = info.weight_bytes / NUM_LAYERS / 2**30
    for count in (3.5, NUM_LAYERS):
        found, info = serve(folder, cpu_offload_gib=f"{count * layer_gib:.6f}", **settings)
        assert info.weight_offload is not None
        print(info.weight_offload)
        assert found == expected


def make_stream(device: CudaDevice, count: int) -> LayerStream:
    slots = [empty((LAYER_BYTES,), uint8, device) for _ in range(2)]
    sources = [device.pinned(LAYER_BYTES).array for _ in range(count)]
    for number, source in enumerate(sources):
        source[:] = number
    return LayerStream(range(count), sources, CudaLayerCopies(device, slots), slots)


def test_a_captured_forward_copies_at_the_links_rate(device: CudaDevice) -> None:
    count = 12
    stream = make_stream(device, count)
    seen = [empty((LAYER_BYTES,), uint8, device) for _ in range(2)]

    def forward() -> None:
        stream.begin()
        for number in range(count):
            stream.hold_step(number)
            device.copy(seen[number % 2].pointer, stream.slots[number % 2].pointer, 1 << 20)
            stream.release(number)

    with device.capture() as finish:
        forward()
    graph = finish()
    least = stream.measure_seconds()
    took = []
    for _ in range(5):
        device.synchronize()
        start = time.perf_counter()
        graph.launch()
        device.synchronize()
        took.append(time.perf_counter() - start)
    print(f"{stream.nbytes / min(took) / 1e9:.1f} GB/s in a graph, {stream.nbytes / least / 1e9:.1f} in single copies")
    assert least / min(took) > LEAST_SHARE
    for number in (count - 2, count - 1):
        assert (seen[number % 2].numpy()[: 1 << 20] == number).all()
    forward()
    device.synchronize()
    assert (seen[1].numpy()[: 1 << 20] == count - 1).all()
