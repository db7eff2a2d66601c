"""Matrix products that the kernels of all kinds are held against, and a chain of them that overlaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.tensor import CPU, Device, Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.support.cases.linear_calls import product_silu_mul
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.references.reference import assert_close

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
    from tests.gpu.conftest import NoTransfers

Array = np.ndarray[Any, Any]


class Multiply(Protocol):
    """A product by one kernel, whatever the operations would choose."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool = False
    ) -> None: ...


HALVES = [bfloat16, float16]
GATES: tuple[Activation, ...] = ("silu_mul", "gelu_tanh_mul")

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


def check_guards(whole: Tensor) -> None:
    assert np.isnan(whole.numpy()[[0, -1]].astype(np.float32)).all(), "a row beyond the result was written"


@dataclass(frozen=True)
class Product:
    """Inputs of one shape and what NumPy makes of them."""

    x: Array
    weight: Array
    bias: Array
    residual: Array
    plain: Array  # with bias
    added: Array  # with bias, to the residual
    gated: Array | None  # with SiLU
    gated_by_gelu: Array | None


@lru_cache(maxsize=len(SHARING_SHAPES))
def product(index: int) -> Product:
    m, k, n = SHARING_SHAPES[index]
    dtype, ops = HALVES[index % 2], CpuOps()
    x, weight = random_array(1, (m, k), dtype), random_array(2, (n, k), dtype, k**-0.5)
    bias, residual = random_array(3, (n,), dtype), random_array(4, (m, n), dtype)
    cpu_x, cpu_weight, cpu_bias = (from_numpy(array, CPU) for array in (x, weight, bias))
    added = ops.matmul(cpu_x, cpu_weight, cpu_bias, from_numpy(residual, CPU), accumulate=True).numpy()
    gated: list[Array | None] = [None, None]
    if n % 16 == 0:
        gate_up = empty((m, n), dtype, CPU)
        gated = [product_silu_mul(ops, cpu_x, cpu_weight, gate_up=gate_up, function=gate).numpy() for gate in GATES]
    return Product(x, weight, bias, residual, ops.matmul(cpu_x, cpu_weight, cpu_bias).numpy(), added, *gated)


def check_product(case: Product, multiply: Multiply, device: CudaDevice, no_transfers: NoTransfers) -> None:
    """With bias, and added to the residual; no row beyond the result is written, nothing crosses to the host."""
    dtype = case.x.dtype
    x, weight, bias = (from_numpy(array, device) for array in (case.x, case.weight, case.bias))
    out, whole = guarded(case.plain.shape, dtype, device)
    with no_transfers():
        multiply(x, weight, bias, out)
    assert_close(out.numpy(), case.plain, dtype)
    check_guards(whole)

    residual = from_numpy(case.residual, device)
    multiply(x, weight, bias, residual, accumulate=True)
    assert_close(residual.numpy(), case.added, dtype)


def check_logits(
    shape: tuple[int, int, int], dtype: np.dtype[np.generic], multiply: Multiply, device: CudaDevice
) -> None:
    """A float32 result of 16-bit inputs."""
    m, k, n = shape
    x, weight = random_array(5, (m, k), dtype), random_array(6, (n, k), dtype, k**-0.5)
    out, whole = guarded((m, n), float32, device)
    multiply(from_numpy(x, device), from_numpy(weight, device), None, out)
    expected = CpuOps().matmul(from_numpy(x, CPU), from_numpy(weight, CPU), out=empty((m, n), float32, CPU))
    assert_close(out.numpy(), expected.numpy(), float32, typical=4)
    check_guards(whole)


def check_that_a_broken_row_keeps_to_itself(multiply: Multiply, device: CudaDevice) -> None:
    x, weight = random_array(10, (200, 128), bfloat16), random_array(11, (264, 128), bfloat16)
    x[70] = np.nan
    out, _whole = guarded((200, 264), bfloat16, device)
    multiply(from_numpy(x, device), from_numpy(weight, device), None, out)
    assert np.isnan(out.numpy().astype(np.float32)).any(1).nonzero()[0].tolist() == [70]


def check_that_a_chain_waits(multiply: Multiply, device: CudaDevice) -> None:
    """Of recorded products each reads what the one before wrote, and may start before that ends."""
    layers, width = 8, 512
    weights = [from_numpy(random_array(i, (width, width), bfloat16, width**-0.5), device) for i in range(layers)]
    rows = [from_numpy(random_array(20 + i, (192, width), bfloat16), device) for i in range(layers + 1)]

    def chain() -> None:
        for i, weight in enumerate(weights):
            multiply(rows[i], weight, None, rows[i + 1])

    check_recording(chain, rows[1:], device)


def check_recording(chain: Callable[[], None], written: Sequence[Tensor], device: CudaDevice) -> None:
    """Recorded, `chain` writes to the last tensor what it wrote before, whatever lay in those that it writes."""
    chain()
    expected = written[-1].numpy().copy()
    assert np.isfinite(expected.astype(np.float32)).all()
    with device.capture() as finish:
        chain()
    graph = finish()
    for _ in range(10):
        for tensor in written:
            device.fill_bytes(tensor.pointer, 255, tensor.nbytes)
        graph.launch()
        np.testing.assert_array_equal(written[-1].numpy().view(np.uint16), expected.view(np.uint16))
