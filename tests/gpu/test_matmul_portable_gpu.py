"""The matrix product of all architectures against NumPy, with every tile, also where sm_90a would take its own."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cuda.device import CudaDevice
from engine.ops.cpu import CpuOps
from engine.ops.cuda.linear import LOGITS_TILES, MATMUL, MATMUL_SPLIT, SPLIT_CHOICES, TILES, Tile
from engine.ops.cuda.types import cuda_type
from engine.tensor import CPU, Tensor, bfloat16, empty, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.products import HALVES, SHARING_SHAPES, check_that_a_chain_waits, guarded, product
from tests.op_cases import random_array
from tests.reference import assert_close

pytestmark = pytest.mark.gpu

CHOICES = [*((tile, 1) for tile in TILES), *SPLIT_CHOICES]
LARGE_PRODUCT = 1000  # rows from which a shape says nothing more about these kernels
CASES = [index for index, (m, _, _) in enumerate(SHARING_SHAPES) if m < LARGE_PRODUCT]
LOGITS_SHAPES = [(33, 1096, 1000), (130, 64, 5000), (17, 1544, 34)]


def name(choice: tuple[Tile, int]) -> str:
    tile, splits = choice
    return f"{tile.m}x{tile.n}x{splits}"


def launch(
    device: CudaDevice,
    choice: tuple[Tile, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """The kernel of this tile, whatever `choose_tile` would say; skips where blocks cannot share one."""
    (tile, splits), (m, k), n = choice, x.shape, weight.shape[0]
    spec, template = MATMUL, tile.template(cuda_type(x.dtype), cuda_type(out.dtype), aligned=True)
    if splits > 1:
        spec, template = MATMUL_SPLIT, (*template[:-1], str(splits))
    if not spec.supports(device.arch):
        pytest.skip(f"{spec.name} does not run on {device.arch}")
    device.launch(spec, template, tile.config(m, n, splits), x, weight, bias, out, m, n, k, int(accumulate))


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_every_tile(choice: tuple[Tile, int], index: int, cuda_device: CudaDevice, no_transfers: NoTransfers) -> None:
    case = product(index)
    dtype = case.x.dtype
    x, weight, bias = (from_numpy(array, cuda_device) for array in (case.x, case.weight, case.bias))
    out, whole = guarded(case.plain.shape, dtype, cuda_device)
    with no_transfers():
        launch(cuda_device, choice, x, weight, bias, out)
    assert_close(out.numpy(), case.plain, dtype)
    assert np.isnan(whole.numpy()[[0, -1]].astype(np.float32)).all(), "a row beyond the result was written"

    residual = from_numpy(case.residual, cuda_device)
    launch(cuda_device, choice, x, weight, bias, residual, accumulate=True)
    assert_close(residual.numpy(), case.added, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("choice", [(tile, 1) for tile in LOGITS_TILES], ids=name)
def test_every_tile_for_logits(
    choice: tuple[Tile, int], dtype: np.dtype[np.generic], cuda_device: CudaDevice, cpu_ops: CpuOps
) -> None:
    for m, k, n in LOGITS_SHAPES:
        x, weight = random_array(5, (m, k), dtype), random_array(6, (n, k), dtype, k**-0.5)
        out, whole = guarded((m, n), float32, cuda_device)
        launch(cuda_device, choice, *(from_numpy(array, cuda_device) for array in (x, weight)), None, out)
        expected = cpu_ops.matmul(from_numpy(x, CPU), from_numpy(weight, CPU), out=empty((m, n), float32, CPU))
        assert_close(out.numpy(), expected.numpy(), float32, typical=4)
        assert np.isnan(whole.numpy()[[0, -1]]).all()


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_a_broken_row_keeps_to_itself(choice: tuple[Tile, int], cuda_device: CudaDevice) -> None:
    x, weight = random_array(10, (200, 128), bfloat16), random_array(11, (264, 128), bfloat16)
    x[70] = np.nan
    out, _whole = guarded((200, 264), bfloat16, cuda_device)
    launch(cuda_device, choice, from_numpy(x, cuda_device), from_numpy(weight, cuda_device), None, out)
    assert np.isnan(out.numpy().astype(np.float32)).any(1).nonzero()[0].tolist() == [70]


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_kernels_of_a_graph_wait_for_what_they_read(choice: tuple[Tile, int], cuda_device: CudaDevice) -> None:
    def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
        launch(cuda_device, choice, x, weight, None, out)

    check_that_a_chain_waits(cuda_device, multiply)
