"""What the choice of tokens would launch, on a device that only writes it down."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.engine.contract.sampling_row import SAMPLING_ROW
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.ops.cuda import CudaOps, sampling
from tessera.engine.tensor import empty, float32, int32
from tests.cuda.launches.written import Launch, WritingDevice, check_launch

SM90 = ("90a", 227 << 10)
SM80 = ("80", 163 << 10)
SM120 = ("120a", 99 << 10)
CLUSTERS = 15  # of 8 blocks that a device runs at a time where each has a multiprocessor
RESERVED_BYTES = 1 << 10  # of shared memory that every block takes besides its own


class Machine(WritingDevice):
    """Multiprocessors with as much shared memory as the largest block takes, and room for three blocks."""

    def __init__(self, arch: str, max_shared_bytes: int) -> None:
        super().__init__()
        self.arch, self.max_shared_bytes = arch, max_shared_bytes

    def blocks_together(self, config: LaunchConfig) -> int:
        return min(3, (self.max_shared_bytes + RESERVED_BYTES) // (config.shared_bytes + RESERVED_BYTES))

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        assert config.cluster == sampling.CLUSTER_BLOCKS
        return CLUSTERS * self.blocks_together(config)


def sample(device: Machine, rows: int, vocab_size: int, *, filtered: bool) -> Launch:
    parameters = empty((rows,), SAMPLING_ROW, device)
    logits, out = empty((rows, vocab_size), float32, device), empty((rows,), int32, device)
    device.allocated.clear()
    CudaOps(device).sample(logits, parameters, filtered=filtered, out=out)  # type: ignore[arg-type]
    assert not device.allocated
    (launch,) = device.launches
    return launch


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize(
    ("machine", "vocab_size", "spec"),
    [
        (SM90, 1, sampling.SAMPLE_CLUSTER),
        (SM90, 151936, sampling.SAMPLE_CLUSTER),
        (SM120, 151936, sampling.SAMPLE_CLUSTER),
        (SM80, 151936, sampling.SAMPLE),
    ],
)
def test_a_row_is_a_cluster_where_there_are_clusters(
    machine: tuple[str, int], vocab_size: int, spec: KernelSpec[Any], rows: int, filtered: bool
) -> None:
    launch = sample(Machine(*machine), rows, vocab_size, filtered=filtered)
    check_launch(launch, set(sampling.instantiations(("float",))), machine[1])
    assert launch.spec is spec
    assert spec.supports(machine[0])
    assert launch.config.grid[1] == rows
    if spec is sampling.SAMPLE_CLUSTER:
        assert launch.config.grid[0] == sampling.CLUSTER_BLOCKS
        ids = launch.config.shared_bytes // 4 * sampling.CLUSTER_BLOCKS
        if filtered:
            assert ids >= vocab_size
        elif rows == 256:  # too many to be kept apart
            assert ids == 0


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("rows", "together"), [(1, 1), (15, 1), (16, 2), (30, 2), (31, 3), (256, 3)])
def test_few_rows_have_multiprocessors_of_their_own(rows: int, together: int, filtered: bool) -> None:
    machine = Machine(*SM90)
    config = sample(machine, rows, 32000, filtered=filtered).config
    assert machine.blocks_together(config) == together


def test_a_vocabulary_beyond_shared_memory_takes_one_block_a_row() -> None:
    assert sample(Machine(*SM120), 4, 262144, filtered=True).spec is sampling.SAMPLE
    assert sample(Machine(*SM120), 4, 262144, filtered=False).spec is sampling.SAMPLE_CLUSTER
