"""Launches of one-row products and of few-row products by quantised blocks, on a device that only records them: tiles,
shared memory beside neighbours, slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.formats import KERNEL_FORMATS, Fp8Format, LinearWeight, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.fp8 import decode as fp8
from tessera.engine.ops.cuda.linear import decode
from tessera.engine.ops.cuda.quant import fixed_row, product, sm90_row, sm90_rows
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import Tensor, bfloat16, empty
from tests.bench import block_kernels
from tests.cuda.launches.sm90_device import Sm90Device
from tests.cuda.launches.written import Launch, check_params

MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
STATIC_BYTES = 128  # of `fp8_decode_kernel` and `block_matmul_kernel`, at most
FORMATS = [name for name in KERNEL_FORMATS if not name.startswith(fixed_row.NO_INTEGERS)]
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


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Int4Group128"])
def test_copies_leave_room_for_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one product on each multiprocessor, beside one of the product before or behind it; of Q4_K_M the last
    product of some layers is in Q6_K."""
    sizes = [size_of(launch) + STATIC_BYTES for launch in layer_launches(name, monkeypatch)[PRODUCTS:]]
    plain, normed = [sizes[2], sizes[4]], [sizes[0], sizes[1], sizes[3]]
    assert all(2 * size > MULTIPROCESSOR_BYTES for size in plain)
    assert max(normed) + max(plain) <= MULTIPROCESSOR_BYTES
    if name == "Q4_K":
        in_q6_k = layer_launches("Q6_K", monkeypatch)[PRODUCTS - 1]
        assert max(normed) + size_of(in_q6_k) <= MULTIPROCESSOR_BYTES


def test_codes_of_few_bits_come_by_copies() -> None:
    device = cast(CudaDevice, Sm90Device())
    chosen = {name: sm90_row.is_chosen(device, KERNEL_FORMATS[name], 4096) for name in FORMATS}
    assert chosen["Q6_K"]
    assert not chosen["Q4_K"]
    assert not chosen["Int4Group128"]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Int4Group128"])
def test_few_wide_rows_take_the_same_slices_of_k(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama 3 8B's last product, whatever the number of rows, with what was compiled; narrower rows take none."""
    device = LayerDevice()
    ops = CudaOps(cast(CudaDevice, device))
    for make in ("lines_map", "words_map"):
        monkeypatch.setattr(sm90_rows, make, lambda *_: bytes(128))
    for columns, launched in ((14336, 2), (4096, 1)):
        weight = LinearWeight((WeightPart.empty(KERNEL_FORMATS[name], 4096, columns, ops.device),))
        ops.reserve_linear([weight], np.dtype(bfloat16), 16)
        slices = []
        for rows in (2, 16):
            device.launches.clear()
            x, out = (empty((rows, width), bfloat16, ops.device) for width in (columns, 4096))
            ops.linear(x, weight, epilogue=Accumulate(), out=out)
            assert len(device.launches) == launched
            assert {(launch.spec, launch.template) for launch in device.launches} <= device.compiled
            first, last = device.launches[0], device.launches[-1]
            assert first.config.grid[0] % first.params.slices == 0
            assert first.config.grid[0] > device.multiprocessors * 0.95
            assert last.params.slices == first.params.slices
            slices.append(first.params.slices)
        assert slices[0] == slices[1]
        assert (slices[0] > 1) == (launched > 1)


# Features of the result and columns of queries, keys and values, of attention's output, of gate and up, of down.
LAYERS = {
    "llama-3b": ((5120, 3072), (3072, 3072), (8192, 3072), (3072, 8192)),
    "llama-8b": ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    "gemma-3-4b": ((4096, 2560), (2560, 2048), (10240, 2560), (2560, 10240)),
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
    "llama-8b over two": ((3072, 4096), (4096, 2048), (7168, 4096), (4096, 7168)),
}


@pytest.mark.parametrize(("name", "normed"), [(name, "two" not in name) for name in LAYERS])
def test_each_multiprocessor_gets_one_block_of_a_product_that_ends_a_half(name: str, normed: bool) -> None:
    """Two such blocks do not fit one, and a block of the products around each does, logits too. Where there are too few
    of them, it is two of the others that do not fit. Those of several ranks take a sum instead of a norm."""
    layer = LAYERS[name]
    limits = decode.Limits(132, 227 << 10)
    sizes = []
    for index, (features, in_features) in enumerate((*layer, (128256, layer[0][1]))):
        ends_half, gated, logits = index in (1, 3), index == 2, index == len(layer)
        around = index not in (1, 3) and normed
        tile = decode.choose_decode_tile(
            1,
            features,
            in_features,
            limits,
            gated=gated,
            normed=around,
            logits=logits,
            float_range=True,
            ends_half=ends_half,
        )
        assert tile is not None
        config = tile.config(features, in_features, limits, normed=around, ends_half=ends_half)
        sizes.append(config.shared_bytes + RESERVED_BYTES)
        assert ends_half == (name == "qwen3-0.6b") or 2 * sizes[-1] > MULTIPROCESSOR_BYTES
    assert all(one + other <= MULTIPROCESSOR_BYTES for one, other in pairwise(sizes))


@pytest.mark.parametrize(
    ("hidden", "q_size", "qkv_size", "inter"),
    [(4096, 4096, 6144, 14336), (3072, 3072, 5120, 8192), (1024, 2048, 4096, 3072), (8192, 8192, 10240, 28672)],
    ids=["llama-8b", "llama-3b", "qwen3-0.6b", "llama-70b"],
)
def test_one_fp8_row_leaves_room_for_neighbours(hidden: int, q_size: int, qkv_size: int, inter: int) -> None:
    """Of a layer's products without a norm two blocks do not fit a multiprocessor, and one of those with a norm fits
    beside each. Where the former do not have a block everywhere, it is the latter of which two do not fit."""
    device = LayerDevice()
    ops = CudaOps(cast(CudaDevice, device))

    def row(width: int) -> Tensor:
        return empty((1, width), bfloat16, ops.device)

    def weight(features: int, in_features: int) -> LinearWeight:
        made = LinearWeight((WeightPart.empty(Fp8Format(), features, in_features, ops.device),))
        ops.reserve_linear([made], np.dtype(bfloat16), 1)
        return made

    norm = RMSNorm(empty((hidden,), bfloat16, ops.device), 1e-5, row(hidden))
    gate = Activate("silu_mul", row(2 * inter))
    qkv, out, up, down = (
        weight(qkv_size, hidden),
        weight(hidden, q_size),
        weight(2 * inter, hidden),
        weight(hidden, inter),
    )
    device.launches.clear()
    ops.linear(row(hidden), qkv, prologue=norm, out=row(qkv_size))
    ops.linear(row(q_size), out, epilogue=Accumulate(), out=row(hidden))
    ops.linear(row(hidden), up, prologue=norm, epilogue=gate, out=row(inter))
    ops.linear(row(inter), down, epilogue=Accumulate(), out=row(hidden))
    assert [launch.spec for launch in device.launches] == [fp8.FP8_DECODE] * 4
    assert {(launch.spec, launch.template) for launch in device.launches} <= device.compiled
    for launch in device.launches:
        check_params(launch)
    normed, plain = ([size_of(launch) + STATIC_BYTES for launch in device.launches[first::2]] for first in (0, 1))
    alone = plain if hidden // 8 >= device.multiprocessors else normed
    assert all(2 * size > MULTIPROCESSOR_BYTES for size in alone)
    assert max(normed) + max(plain) <= MULTIPROCESSOR_BYTES
