"""The matrix product of all architectures against NumPy, with every tile, also where sm_90a would take its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.linear.portable import (
    LOGITS_TILES,
    SPLIT_CHOICES,
    TILES,
    Tile,
)
from tests.gpu.conftest import NoTransfers
from tests.gpu.products.checks import (
    HALVES,
    SHARING_SHAPES,
    check_logits,
    check_product,
    check_that_a_broken_row_keeps_to_itself,
    check_that_a_chain_waits,
    product,
)
from tests.gpu.products.portable import launch, name

pytestmark = pytest.mark.gpu

CHOICES = [*((tile, 1) for tile in TILES), *SPLIT_CHOICES]
LARGE_PRODUCT = 1000  # rows from which a shape says nothing more about these kernels
CASES = [index for index, (m, _, _) in enumerate(SHARING_SHAPES) if m < LARGE_PRODUCT]
LOGITS_SHAPES = [(33, 1096, 1000), (130, 64, 5000), (17, 1544, 34)]


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_every_tile(choice: tuple[Tile, int], index: int, cuda_device: CudaDevice, no_transfers: NoTransfers) -> None:
    check_product(product(index), partial(launch, cuda_device, choice), cuda_device, no_transfers)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("choice", [(tile, 1) for tile in LOGITS_TILES], ids=name)
def test_every_tile_for_logits(choice: tuple[Tile, int], dtype: np.dtype[np.generic], cuda_device: CudaDevice) -> None:
    for shape in LOGITS_SHAPES:
        check_logits(shape, dtype, partial(launch, cuda_device, choice), cuda_device)


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_a_broken_row_keeps_to_itself(choice: tuple[Tile, int], cuda_device: CudaDevice) -> None:
    check_that_a_broken_row_keeps_to_itself(partial(launch, cuda_device, choice), cuda_device)


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_kernels_of_a_graph_wait_for_what_they_read(choice: tuple[Tile, int], cuda_device: CudaDevice) -> None:
    check_that_a_chain_waits(partial(launch, cuda_device, choice), cuda_device)
