"""KV blocks between a GPU and host memory: the same bytes, the same tokens, beside running steps."""

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
from tessera.engine.cuda.copies import block_copies
from tessera.engine.cuda.copies.block_copies import CudaBlockCopies
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import find_device
from tessera.engine.ipc.load import load_engine
from tessera.engine.tensor import Tensor, float16
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build

pytestmark = pytest.mark.gpu

CLIENT = b"client"
GIB = 2**30
LAYERS, PIECE = 32, 32 << 10  # the 8 B shape: 8 KV heads of 128 in 16 bits, blocks of 16 tokens


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    found = find_device(0)
    if not found.usable:
        pytest.skip(found.reason)
    return CudaDevice(0)


def make_planes(device: CudaDevice, num_blocks: int, piece: int = PIECE, layers: int = LAYERS) -> list[Tensor]:
    buffer = device.allocate(2 * layers * num_blocks * piece)
    return [
        Tensor(buffer, (num_blocks, piece // 2), float16, number * num_blocks * piece) for number in range(2 * layers)
    ]


@pytest.mark.parametrize("is_flat", [True, False], ids=["2D", "3D"])
def test_blocks_come_back_as_they_were(device: CudaDevice, monkeypatch: pytest.MonkeyPatch, is_flat: bool) -> None:
    """In 2D copies, and in the 3D copies of a KV cache that is too large for those."""
    if not is_flat:
        monkeypatch.setattr(block_copies, "device_attribute", lambda handle, name: 1024)
    planes = make_planes(device, 20, piece=512, layers=3)
    rng = np.random.default_rng(1)
    for plane in planes:
        plane.upload(rng.integers(0, 2**15, plane.shape).astype(np.int16).view(np.float16))
    before = [plane.numpy().copy() for plane in planes]
    copies = CudaBlockCopies(device, planes, 16)
    stored = copies.to_host([7, 3, 19], [2, 0, 15])
    stored.synchronize()
    assert copies.slot(15).tobytes() == b"".join(each[19].tobytes() for each in before)
    for plane in planes:
        device.fill_bytes(plane.pointer, 0, plane.nbytes)
    copies.to_device([15, 2], [1, 7], [stored]).synchronize()
    for plane, old in zip(planes, before, strict=True):
        now = plane.numpy().view(np.uint16)
        old = old.view(np.uint16)
        assert (now[1] == old[19]).all()
        assert (now[7] == old[7]).all()
        assert not np.delete(now, [1, 7], axis=0).any()


def test_a_step_that_is_held_overwrites_nothing_that_is_still_read(device: CudaDevice) -> None:
    planes = make_planes(device, 64)
    for plane in planes:
        device.fill_bytes(plane.pointer, 1, plane.nbytes)
    copies = CudaBlockCopies(device, planes, 64)
    for _ in range(5):
        copies.hold_steps(copies.to_host(range(64), range(64)))
        for plane in planes:
            device.fill_bytes(plane.pointer, 2, plane.nbytes)
        device.synchronize()
        assert all((copies.slot(number) == 1).all() for number in (0, 31, 63))
        for plane in planes:
            device.fill_bytes(plane.pointer, 1, plane.nbytes)
        device.synchronize()


@pytest.mark.parametrize("graphs", [True, False])
def test_conversations_have_the_tokens_that_they_have_without(device: CudaDevice, tmp_path: Path, graphs: bool) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB_SIZE, 40).tolist() for _ in range(6)]

    def serve(**settings: Any) -> tuple[list[list[int]], EngineCore]:
        config = EngineConfig(
            model=str(folder),
            device="cuda",
            dtype="float32",
            block_size=8,
            num_kv_blocks=16,
            max_model_len=64,
            max_num_seqs=4,
            enforce_eager=not graphs,
            **settings,
        )
        core = load_engine(config, lambda stage, done, total: None).core
        assert isinstance(core, EngineCore)
        histories = [list(prompt) for prompt in prompts]
        for turn in range(2):
            for number, history in enumerate(histories):
                params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
                request = AddRequest(f"{turn}/{number}", array("i", history), params, time.monotonic())
                core.add_request(request, CLIENT)
            deadline = time.monotonic() + 60
            while core.has_work:
                assert time.monotonic() < deadline
                for output in core.step().get(CLIENT, []):
                    assert output.error is None
                    histories[int(output.request_id.partition("/")[2])] += output.token_ids
            for history in histories:
                history += [9, 10]
        return histories, core

    expected, _ = serve()
    found, core = serve(kv_offload_gib=0.01)
    assert found == expected
    tiers = core.block_manager.tiers
    assert tiers is not None
    assert tiers.metrics.num_hits > 100
    assert tiers.is_up
