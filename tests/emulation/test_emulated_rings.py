"""Rings of stages that copies fill in any order: two groups that take steps by turns need an even number of stages.

Of an odd one a group comes to a stage whose use before is the other group's. If the copy for that is late, the wait for
the next phase returns at once, because the phase before the one that runs has the same parity.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int32, OutFloat
from tessera.engine.ops.cuda.linear.sm90_kernels import SM90_MATMUL
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.emulation.device import COMPILER, EmulatedDevice, EmulationError, kernel_folder

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER) is None, reason=f"compiled by {COMPILER} on Linux"
)

SOURCE = """
#include "ptx/sm90.cuh"
#include "common.cuh"

constexpr int STEPS = 16, LINE = 32, GROUPS = 2;

// out[step, i] = 100 * step + i, by way of a ring: a warp copies, GROUPS warps take steps by turns.
template <int STAGES>
__global__ void ring_kernel(float* out, int steps) {
  alignas(16) __shared__ float source[STEPS * LINE], ring[STAGES * LINE];
  __shared__ Barrier full[STAGES], empty[STAGES];
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  for (int i = threadIdx.x; i < steps * LINE; i += blockDim.x) source[i] = i / LINE * 100 + i % LINE;
  if (threadIdx.x < STAGES) {
    barrier_init(&full[threadIdx.x], 1);
    barrier_init(&empty[threadIdx.x], 1);
    barrier_init_done();
  }
  fence_shared_for_async();
  __syncthreads();
  if (warp == GROUPS) {
    for (int step = 0; step < steps && lane == 0; ++step) {
      const int stage = step % STAGES;
      barrier_wait(&empty[stage], step / STAGES % 2 ^ 1);
      barrier_arrive_expecting(&full[stage], LINE * sizeof(float));
      copy_to_block(ring + stage * LINE, source + step * LINE, LINE * sizeof(float), &full[stage], 0);
    }
    return;
  }
  for (int step = warp; step < steps; step += GROUPS) {
    const int stage = step % STAGES;
    barrier_wait(&full[stage], step / STAGES % 2);
    out[step * LINE + lane] = ring[stage * LINE + lane];
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[stage]);
  }
}
"""
STEPS, LINE, THREADS = 16, 32, 96


class RingParams(NamedTuple):
    out: OutFloat
    steps: Int32


# The kernel stands in the place of one that includes the same headers.
RING = KernelSpec(SM90_MATMUL.file, "ring_kernel", ("STAGES",), RingParams)


SEEDS = range(8)


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    return kernel_folder(pytestconfig)


def ring_device(folder: Path) -> EmulatedDevice:
    return EmulatedDevice(folder, lambda texts: {**texts, RING.file: SOURCE}, arch="90a")


def complaint(device: EmulatedDevice, stages: int, steps: int = STEPS) -> str:
    """The error of a launch; empty if its results are right."""
    out = from_numpy(np.zeros((steps, LINE), float32), CPU)
    try:
        device.launch(RING, (str(stages),), LaunchConfig((1, 1, 1), (THREADS, 1, 1)), RingParams(out, steps))
    except EmulationError as error:
        return str(error)
    right = (out.numpy() == np.arange(steps)[:, None] * 100 + np.arange(LINE)).all()
    return "" if right else "elements differ"


@pytest.mark.parametrize("stages", [3, 4])
def test_copies_land_in_any_order(stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ring_device(folder)
    for seed in SEEDS:
        monkeypatch.setenv("EMULATED_SEED", str(seed))
        found = complaint(device, stages)
        assert (found == "") == (stages == 4), (seed, found)
        assert complaint(device, stages) == found, "another order of the same seed"


@pytest.mark.parametrize("stages", [3, 4])
def test_a_wait_that_may_return_too_early_is_found(stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the watch, also where copies land in an order in which it does not."""
    monkeypatch.setenv("EMULATED_RACES", "1")
    device, found = ring_device(folder), set()
    for seed in SEEDS:
        monkeypatch.setenv("EMULATED_SEED", str(seed))
        found.add(complaint(device, stages, steps=4))
    assert ("" in found) == (stages == 4), found
    assert any("may return two phases too early" in each for each in found) == (stages == 3), found
