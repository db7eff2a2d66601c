"""The token-mask kernel against the NumPy implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.tensor import CPU, Device, Tensor, from_numpy
from tests.gpu.conftest import NoTransfers

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda import CudaOps

pytestmark = pytest.mark.gpu

SEED = 20261121
NUM_ROWS = 67


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2560, 32011, 128256, 151936])
@pytest.mark.parametrize("num_masked", [1, 5, NUM_ROWS])
def test_masked_logits_are_the_references(
    cuda_device: CudaDevice,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
    no_transfers: NoTransfers,
    vocab_size: int,
    num_masked: int,
) -> None:
    """Some rows, in any order, one of them padding; bits beyond the vocabulary must not matter."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    logits = rng.normal(0, 3, (NUM_ROWS, vocab_size)).astype(np.float32)
    logits[0, 0], logits[-1, -1] = np.nan, np.inf
    words = rng.integers(0, 2**32, (num_masked, -(-vocab_size // 32)), dtype=np.uint32)
    words[0] = 0
    rows = rng.permutation(NUM_ROWS)[:num_masked].astype(np.int32)
    rows[num_masked // 2] = -1 if num_masked > 1 else rows[0]

    def on(device: Device) -> tuple[Tensor, Tensor, Tensor]:
        return from_numpy(logits.copy(), device), from_numpy(words, device), from_numpy(rows, device)

    expected = on(CPU)
    cpu_ops.apply_token_mask(*expected)
    masked = on(cuda_device)
    with no_transfers():
        cuda_ops.apply_token_mask(*masked)
    np.testing.assert_array_equal(masked[0].numpy(), expected[0].numpy())


def test_nothing_to_mask(cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
    logits = from_numpy(np.ones((2, 40), np.float32), cuda_device)
    words = from_numpy(np.zeros((0, 2), np.uint32), cuda_device)
    rows = from_numpy(np.zeros(0, np.int32), cuda_device)
    cuda_ops.apply_token_mask(logits, words, rows)
    assert (logits.numpy() == 1).all()
