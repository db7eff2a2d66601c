"""Attention with the product behind it in one kernel, against the same in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ops.cpu import CpuOps
from engine.ops.cuda import CudaOps, attention_out
from engine.ops.interface import AttentionMetadata, Ops
from engine.tensor import Device, Tensor, bfloat16, float16, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.test_attention_gpu import Array, DecodeInputs, bits
from tests.op_cases import AttentionCase, poisoned, random_array
from tests.reference import assert_close

pytestmark = pytest.mark.gpu

CONTEXTS = (1, 2, 15, 16, 17, 128, 129, 384, 511, 512, 513, 600, 2500)
# Query heads, key/value heads, head size, hidden size.
SIZES = [(16, 8, 128, 1024), (8, 8, 64, 512), (8, 2, 64, 1024), (14, 2, 64, 896), (32, 4, 64, 128), (9, 3, 128, 256)]


class Step:
    """A layer's attention half on one device; `residual` is added to."""

    def __init__(self, ops: Ops, step: DecodeInputs, weight: Array, residual: Array) -> None:
        device: Device = ops.device
        self.ops, self.step = ops, step
        self.metadata: AttentionMetadata = step.inputs.metadata(device)
        self.caches = step.inputs.caches(device)
        self.weight = from_numpy(weight, device)
        self.residual = from_numpy(residual, device)
        self.qkv = from_numpy(step.qkv, device)
        self.cos_sin = None if step.cos_sin is None else from_numpy(step.cos_sin, device)
        self.norms = {name: from_numpy(norm, device) for name, norm in step.norms.items()}
        self.scratch: list[Tensor] = [poisoned(step.inputs.q.shape, weight.dtype, device) for _ in range(2)]

    def run(self) -> None:
        case = self.step.inputs.case
        self.ops.attention_matmul(
            self.qkv,
            *self.caches,
            self.metadata,
            self.cos_sin,
            self.weight,
            None,
            num_heads=case.num_heads,
            scale=case.scale,
            sliding_window=case.sliding_window,
            eps=1e-6,
            queries=self.scratch[0],
            attended=self.scratch[1],
            out=self.residual,
            **self.norms,
        )

    def results(self) -> tuple[Array, Array, Array]:
        self.run()
        return self.residual.numpy(), self.caches[0].numpy(), self.caches[1].numpy()


@pytest.fixture
def fused(cuda_ops: CudaOps) -> CudaOps:
    if not attention_out.ATTENTION_OUT.supports(cuda_ops.device.arch):
        pytest.skip(f"{cuda_ops.device.arch} has no clusters")
    return cuda_ops


@pytest.fixture
def separate(fused: CudaOps) -> CudaOps:
    ops = CudaOps(fused.device)
    ops.fused_attention_out = False
    return ops


@pytest.fixture
def make(fused: CudaOps) -> Callable[..., tuple[DecodeInputs, Array, Array]]:
    def inputs_of(
        sizes: tuple[int, int, int, int],
        contexts: tuple[int, ...],
        dtype: np.dtype[Any] = bfloat16,
        norms: str = "qk",
        **settings: Any,
    ) -> tuple[DecodeInputs, Array, Array]:
        num_heads, num_kv_heads, head_dim, hidden = sizes
        assert attention_out.is_for(len(contexts), *sizes, max_shared_bytes=fused.device.max_shared_bytes)
        rows = tuple((1, context) for context in contexts)
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        case = AttentionCase("", rows, dtype=dtype, **heads, **settings)
        width = num_heads * head_dim
        weight = random_array(21, (hidden, width), dtype, width**-0.5)
        return DecodeInputs.of(case, norms), weight, random_array(22, (len(rows), hidden), dtype)

    return inputs_of


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_kernel_gives_what_two_give(
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    fused: CudaOps,
    separate: CudaOps,
    make: Callable[..., tuple[DecodeInputs, Array, Array]],
    no_transfers: NoTransfers,
) -> None:
    for contexts in (*((context,) for context in CONTEXTS), (700, 33), (0, 40), (40, 0), (0,)):
        inputs = make(sizes, contexts, dtype)
        step = Step(fused, *inputs)
        with no_transfers():
            step.run()
        expected = Step(separate, *inputs).results()
        assert_close(step.residual.numpy(), expected[0], dtype)
        for cache, want in zip(step.caches, expected[1:], strict=True):
            np.testing.assert_array_equal(bits(cache.numpy()), bits(want))


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 1},
        {"sliding_window": 77},
        {"sliding_window": 600},
        {"block_size": 8},
        {"block_size": 64},
        {"norms": ""},
        {"norms": "k"},
    ],
    ids=str,
)
def test_settings(
    settings: dict[str, Any],
    fused: CudaOps,
    cpu_ops: CpuOps,
    make: Callable[..., tuple[DecodeInputs, Array, Array]],
) -> None:
    for contexts in ((1, 900), (2500, 78), (77, 601)):
        inputs = make(SIZES[0], contexts, **settings)
        assert_close(Step(fused, *inputs).results()[0], Step(cpu_ops, *inputs).results()[0], bfloat16, roundings=2)


def test_a_key_that_the_cache_has_is_not_stored(
    fused: CudaOps, separate: CudaOps, make: Callable[..., tuple[DecodeInputs, Array, Array]]
) -> None:
    step, weight, residual = make(SIZES[0], (300, 40))
    step.inputs.slot_mapping[:] = -1
    for cache in (step.inputs.key_cache, step.inputs.value_cache):
        cache[np.isnan(cache.astype(np.float32))] = 0.5
    for one, two in zip(
        Step(fused, step, weight, residual).results(), Step(separate, step, weight, residual).results(), strict=True
    ):
        assert_close(one, two, bfloat16)


def test_a_row_is_bit_for_bit_what_it_is_alone(
    fused: CudaOps, make: Callable[..., tuple[DecodeInputs, Array, Array]]
) -> None:
    step, weight, residual = make(SIZES[0], (900, 333))
    together = Step(fused, step, weight, residual).results()[0]
    for row in range(2):
        rows = slice(row, row + 1)
        alone = Step(fused, step.rows(rows), weight, residual[rows]).results()[0]
        np.testing.assert_array_equal(bits(alone), bits(together[rows]))


def test_a_broken_row_stays_alone(fused: CudaOps, make: Callable[..., tuple[DecodeInputs, Array, Array]]) -> None:
    step, weight, residual = make(SIZES[0], (90, 333))
    expected = Step(fused, step, weight, residual).results()[0]
    broken = replace(step, qkv=step.qkv.copy())
    broken.qkv[0] = np.nan
    found = Step(fused, broken, weight, residual).results()[0]
    assert np.isnan(found[0].astype(np.float32)).all()
    np.testing.assert_array_equal(bits(found[1]), bits(expected[1]))


def test_layers_of_a_graph_wait_for_one_another(
    fused: CudaOps, make: Callable[..., tuple[DecodeInputs, Array, Array]]
) -> None:
    """Four layers that add to one stream and make the next one's input of it; kernels overlap in the replay."""
    inputs = make(SIZES[0], (384,))
    layers = [Step(fused, *inputs) for _ in range(4)]
    stream, device = layers[0].residual, fused.device
    up = from_numpy(random_array(30, (4096, 1024), bfloat16, 1024**-0.5), device)
    for layer in layers[1:]:
        layer.residual = stream
        layer.qkv = poisoned((1, 4096), bfloat16, device)

    def run() -> None:
        for index, layer in enumerate(layers):
            if index:
                fused.matmul(stream, up, out=layer.qkv)
            layer.run()

    run()
    expected = stream.numpy().copy()
    assert np.isfinite(expected.astype(np.float32)).all()
    with device.capture() as finish:
        run()
    graph = finish()
    for _ in range(30):
        stream.upload(inputs[2])
        graph.launch()
        np.testing.assert_array_equal(bits(stream.numpy()), bits(expected))
