"""Matrix products that the kernels of all kinds are held against, and a chain of them that overlaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.ops.cpu import CpuOps
from engine.tensor import CPU, Device, Tensor, bfloat16, empty, float16, from_numpy
from tests.op_cases import poisoned, random_array

if TYPE_CHECKING:
    from engine.cuda.device import CudaDevice

Array = np.ndarray[Any, Any]

HALVES = [bfloat16, float16]

# (rows, in_features, columns): whole tiles; edges in all directions; less than a step; fewer columns than a pair
# of tiles; several tiles for each block; few rows.
SHAPES = [(128, 1024, 512), (129, 1096, 1000), (300, 1032, 264), (65, 1544, 16), (700, 1024, 4104), (17, 1032, 520)]
# For blocks that take rows of tiles in pairs: fewer steps than stages; one step; an odd number of rows of tiles and
# several pairs for some clusters; more rows than share the weight in L2.
SHARING_SHAPES = [*SHAPES, (200, 136, 512), (257, 64, 1008), (1000, 1544, 2064), (2100, 1024, 4112)]


def guarded(shape: tuple[int, ...], dtype: np.dtype[np.generic], device: Device) -> tuple[Tensor, Tensor]:
    """A tensor of NaN with a row of NaN before and after it, and these three together."""
    whole = poisoned((shape[0] + 2, shape[1]), dtype, device)
    return whole[1 : shape[0] + 1], whole


@dataclass(frozen=True)
class Product:
    """Inputs of one shape and what NumPy makes of them."""

    x: Array
    weight: Array
    bias: Array
    residual: Array
    plain: Array  # with bias
    added: Array  # with bias, to the residual
    gated: Array | None


@lru_cache(maxsize=len(SHARING_SHAPES))
def product(index: int) -> Product:
    m, k, n = SHARING_SHAPES[index]
    dtype, ops = HALVES[index % 2], CpuOps()
    x, weight = random_array(1, (m, k), dtype), random_array(2, (n, k), dtype, k**-0.5)
    bias, residual = random_array(3, (n,), dtype), random_array(4, (m, n), dtype)
    inputs = [from_numpy(array, CPU) for array in (x, weight, bias)]
    added = ops.matmul(*inputs, from_numpy(residual, CPU), accumulate=True).numpy()
    gated = None
    if n % 16 == 0:
        gated = ops.matmul_silu_mul(*inputs[:2], gate_up=empty((m, n), dtype, CPU)).numpy()
    return Product(x, weight, bias, residual, ops.matmul(*inputs).numpy(), added, gated)


def check_that_a_chain_waits(device: CudaDevice, multiply: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Of recorded products (x, weight, out) each reads what the one before wrote, and may start before that ends."""
    layers, width = 8, 512
    weights = [from_numpy(random_array(i, (width, width), bfloat16, width**-0.5), device) for i in range(layers)]
    rows = [from_numpy(random_array(20 + i, (192, width), bfloat16), device) for i in range(layers + 1)]

    def chain() -> None:
        for i, weight in enumerate(weights):
            multiply(rows[i], weight, rows[i + 1])

    chain()
    expected = rows[-1].numpy().copy()
    with device.capture() as finish:
        chain()
    graph = finish()
    for _ in range(10):
        for tensor in rows[1:]:
            device.fill_bytes(tensor.pointer, 255, tensor.nbytes)
        graph.launch()
        np.testing.assert_array_equal(rows[-1].numpy().view(np.uint16), expected.view(np.uint16))
