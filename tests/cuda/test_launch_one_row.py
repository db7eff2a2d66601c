"""How products of one row by quantised blocks share multiprocessors, on a device that only writes down launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.formats import KERNEL_FORMATS, LinearWeight, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.quant import product, sm90_row
from tessera.engine.tensor import bfloat16, empty
from tests.bench import block_kernels
from tests.cuda.test_launch_attention import Launch, check_params
from tests.cuda.test_launch_sm90_matmul import Sm90Device

MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
FORMATS = [name for name in KERNEL_FORMATS if not name.startswith(sm90_row.NO_INTEGERS)]
PRODUCTS = 5  # of a layer


class LayerDevice(Sm90Device):
    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[Instantiation] = set()

    def compile(self, instantiations: Sequence[Instantiation]) -> None:
        self.compiled.update(instantiations)


def layer_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of a layer of Llama 3 8B by TMA, then by copies: of q and k, v, attention, up and gate, down."""
    device = LayerDevice()

    def submit(_: CudaDevice, calls: Sequence[Any]) -> float:
        device.launches.clear()
        for call in calls:
            call()
        chains.append(device.launches[:PRODUCTS])
        return 1.0

    chains: list[list[Launch]] = []
    monkeypatch.setattr(block_kernels, "measure", submit)
    monkeypatch.setattr(block_kernels, "LAYERS", 1)
    for make in ("lines_map", "words_map"):
        monkeypatch.setattr(sm90_row, make, lambda *_: bytes(128))
    monkeypatch.setattr(
        block_kernels, "random_part", lambda ops, format, n, k, bits: WeightPart.empty(format, n, k, ops.device)
    )
    ops = CudaOps(cast(CudaDevice, device))
    block_kernels.measure_layers(ops, cast(CudaDevice, device), KERNEL_FORMATS[name], bits=None)
    launches = [*chains[PRODUCTS], *chains[-1]]
    assert {(launch.spec, launch.template) for launch in launches} <= device.compiled
    return launches


def size_of(launch: Launch) -> int:
    """Of a multiprocessor's shared memory, for a block."""
    return launch.config.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize("name", FORMATS)
def test_each_multiprocessor_gets_one_block_of_a_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of those behind attention do not fit one, and of products behind each other a block each does."""
    launches = layer_launches(name, monkeypatch)
    for launch in launches:
        check_params(launch)
    chain, copies = launches[:PRODUCTS], launches[PRODUCTS:]
    assert {launch.spec for launch in chain} == {sm90_row.SM90_BLOCK_ROW}
    assert {launch.spec for launch in copies} == {product.BLOCK_MATMUL}
    assert [launch.config.grid[0] for launch in chain] == [132, 64, 132, 132, 132]
    for launch in (chain[2], chain[4]):
        assert 2 * size_of(launch) > MULTIPROCESSOR_BYTES
    for one, other in ((2, 3), (3, 4), (4, 0), (0, 1)):
        assert size_of(chain[one]) + size_of(chain[other]) <= MULTIPROCESSOR_BYTES


def test_rows_of_broken_lines_come_by_copies() -> None:
    """TMA takes whole lines of codes and 16 bytes of headers."""
    device = cast(CudaDevice, Sm90Device())
    assert all(sm90_row.is_chosen(device, KERNEL_FORMATS[name], 4096) for name in FORMATS)
    assert not sm90_row.is_chosen(device, KERNEL_FORMATS["Int4Group128"], 4096 + 128)
    assert not sm90_row.is_chosen(device, KERNEL_FORMATS["Fp8Group128"], 4096)


def test_parts_of_several_formats_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind the first does not wait for the part before, of which it reads nothing; others wait."""
    for make in ("lines_map", "words_map"):
        monkeypatch.setattr(sm90_row, make, lambda *_: bytes(128))
    device = LayerDevice()
    ops = CudaOps(cast(CudaDevice, device))
    names = ("Q4_K", "Q6_K", "Q8_0", "Fp8Group128", "Q4_K")
    parts = [WeightPart.empty(KERNEL_FORMATS[name], 1024, 4096, ops.device) for name in names]
    x, out = empty((1, 4096), bfloat16, ops.device), empty((1, 5120), bfloat16, ops.device)
    ops.linear(x, LinearWeight(tuple(parts)), out=out)
    by_row = [launch.spec is sm90_row.SM90_BLOCK_ROW for launch in device.launches]
    assert by_row == [True, True, True, False, True]
    beside = [launch.params.beside for launch in device.launches if launch.spec is sm90_row.SM90_BLOCK_ROW]
    assert beside == [False, True, True, False]


def test_the_next_kernel_starts_early_behind_whole_grids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block on each multiprocessor, and no part beside the first, which would not wait."""
    assert not any(launch.params.early for launch in layer_launches("Q4_K", monkeypatch)[:PRODUCTS])
    monkeypatch.setattr(sm90_row, "STARTS_NEXT_EARLY", True)
    chain = layer_launches("Q4_K", monkeypatch)[:PRODUCTS]
    assert [launch.params.early for launch in chain] == [True, False, True, True, True]
    device = LayerDevice()
    ops = CudaOps(cast(CudaDevice, device))
    parts = [WeightPart.empty(KERNEL_FORMATS[name], 4096, 4096, ops.device) for name in ("Q4_K", "Q6_K")]
    x, out = empty((1, 4096), bfloat16, ops.device), empty((1, 8192), bfloat16, ops.device)
    ops.linear(x, LinearWeight(tuple(parts)), out=out)
    assert [launch.params.early for launch in device.launches] == [False, True]
