"""Launches of training's kernels, on a machine that needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.training import flash
from tessera.engine.ops.cuda.training.packed import PackedProblem
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import CPU, bfloat16, empty, float32, from_numpy

SMALLEST_SHARED_BYTES = 99 << 10  # of a block, of compute capability 8.6, 8.9 and 12.0


@pytest.mark.parametrize("head_dim", flash.HEAD_DIMS)
def test_attention_fits_into_the_shared_memory_of_every_gpu(head_dim: int) -> None:
    qkv = from_numpy(np.zeros((70, 4 * head_dim), bfloat16), CPU)
    problem = PackedProblem.of(qkv, PackedSequences.of_lengths([70], CPU), 2, 1, 1.0, None)
    launched: list[Any] = []
    device = cast(CudaDevice, SimpleNamespace(launch=lambda spec, template, config, params: launched.append(config)))
    out, numbers = empty((70, 2 * head_dim), bfloat16, CPU), empty((2, 70), float32, CPU)
    assert flash.can_do(problem, out)
    flash.launch_attention(device, problem, out, numbers)
    flash.launch_gradient(device, problem, out, numbers, numbers, qkv)
    assert [config.grid for config in launched] == [(1, 2, 1), (2, 2, 1), (2, 1, 1)]
    assert max(config.shared_bytes for config in launched) <= SMALLEST_SHARED_BYTES
