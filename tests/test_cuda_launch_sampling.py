"""What the choice of tokens would launch, on a device that only writes it down."""

from __future__ import annotations

import pytest

from engine.cuda.kernel import KernelSpec
from engine.ops.cuda import CudaOps, sampling
from engine.ops.sampling_interface import SamplingMetadata
from engine.tensor import empty, float32, int32, uint64
from tests.test_cuda_launch_attention import Launch, WritingDevice, check_launch

HOPPER = ("90a", 227 << 10)
AMPERE = ("80", 163 << 10)
BLACKWELL = ("120a", 99 << 10)


def sample(arch: str, shared_bytes: int, rows: int, vocab_size: int, *, filtered: bool) -> Launch:
    device = WritingDevice()
    device.arch, device.max_shared_bytes = arch, shared_bytes  # type: ignore[attr-defined]
    floats, ints = empty((rows,), float32, device), empty((rows,), int32, device)
    names = SamplingMetadata.__dataclass_fields__
    fields = {name: ints if name in ("slots", "positions", "top_k") else floats for name in names}
    metadata = SamplingMetadata(**fields | {"seeds": empty((rows,), uint64, device)})
    logits, out = empty((rows, vocab_size), float32, device), empty((rows,), int32, device)
    device.allocated.clear()
    CudaOps(device).sample(logits, metadata, filtered=filtered, out=out)  # type: ignore[arg-type]
    assert not device.allocated
    (launch,) = device.launches
    return launch


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize(
    ("machine", "vocab_size", "spec"),
    [
        (HOPPER, 1, sampling.SAMPLE_CLUSTER),
        (HOPPER, 151936, sampling.SAMPLE_CLUSTER),
        (BLACKWELL, 151936, sampling.SAMPLE_CLUSTER),
        (AMPERE, 151936, sampling.SAMPLE),
    ],
)
def test_a_row_is_a_cluster_where_there_are_clusters(
    machine: tuple[str, int], vocab_size: int, spec: KernelSpec, rows: int, filtered: bool
) -> None:
    launch = sample(*machine, rows, vocab_size, filtered=filtered)
    check_launch(launch, set(sampling.instantiations(("float",))))
    assert launch.spec is spec
    assert spec.supports(machine[0])
    assert launch.config.grid[1] == rows
    if spec is sampling.SAMPLE_CLUSTER:
        assert launch.config.grid[0] == sampling.CLUSTER_BLOCKS
        ids = launch.config.shared_bytes // 4 * sampling.CLUSTER_BLOCKS
        assert ids >= vocab_size if filtered else ids == 0


def test_a_vocabulary_beyond_shared_memory_takes_one_block_a_row() -> None:
    assert sample(*BLACKWELL, 4, 262144, filtered=True).spec is sampling.SAMPLE
    assert sample(*BLACKWELL, 4, 262144, filtered=False).spec is sampling.SAMPLE_CLUSTER
