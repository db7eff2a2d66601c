"""How products of many rows are divided on sm_90a, on a device that only writes down what it would launch."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine.cuda.compiler import SOURCE_FOLDER
from engine.cuda.kernel import KernelSpec, LaunchConfig
from engine.ops.cuda import CudaOps, matmul_hopper
from engine.ops.cuda.matmul_hopper import MATMUL_HOPPER, Plan, choose_plan
from engine.ops.cuda.types import ceil_div, cuda_type
from engine.tensor import Buffer, Tensor, bfloat16, empty, float16, float32
from tests.test_cuda_launch_attention import Launch, WritingDevice

H200 = (132, 66, 39, 30, 22, 17, 15, 15)  # clusters of 1, 2, ... blocks that run at a time
HALF_IDLE = (114, 57, 0, 25, 0, 0, 0, 0)  # a device whose multiprocessors are grouped otherwise
SHARED_BYTES = 227 << 10
SEED = 20261121


class WritingHopper(WritingDevice):
    def __init__(self) -> None:
        super().__init__(132, "90a", clusters=True)
        self.max_shared_bytes = SHARED_BYTES

    def clusters_at_once(self, spec: KernelSpec, template: tuple[str, ...], config: LaunchConfig) -> int:
        return H200[config.cluster - 1]


@pytest.fixture(autouse=True)
def maps_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_hopper, "box_map", lambda matrix, rows: bytes([rows // 2]) * 128)


def hopper_launches(device: WritingHopper) -> list[Launch]:
    return [launch for launch in device.launches if launch.spec is MATMUL_HOPPER]


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("clusters", [H200, HALF_IDLE], ids=["h200", "half_idle"])
def test_every_plan_can_run(clusters: tuple[int, ...], logits: bool) -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    out_dtype = "float" if logits else "__nv_bfloat16"
    compiled = set(matmul_hopper.instantiations(("__nv_bfloat16",)))
    sides = [8, 64, 72, 128, 1000, 1024, 4096, 6144, 14336, 28672, 151936]
    for _ in range(500):
        num_rows = int(rng.integers(33, 9000))
        out_features, in_features = (int(side) for side in rng.choice(sides, 2))
        plan = choose_plan(num_rows, out_features, in_features, clusters, logits=logits)
        itemsize = 4 if logits else 2
        config = plan.config(num_rows, out_features, itemsize, clusters[0], SHARED_BYTES)
        stages = plan.stages(itemsize, SHARED_BYTES)
        steps = ceil_div(in_features, matmul_hopper.TILE_K)
        assert (MATMUL_HOPPER, plan.tile.template("__nv_bfloat16", out_dtype)) in compiled
        assert 3 <= stages <= matmul_hopper.MAX_STAGES, "a slot in use, one to be used next and one to be filled"
        assert config.shared_bytes + matmul_hopper.BARRIER_BYTES <= SHARED_BYTES
        assert clusters[plan.splits - 1] > 0
        assert config.cluster == plan.splits <= max(1, steps)
        tiles = plan.tile.count(num_rows, out_features)
        assert config.grid == (tiles * plan.splits if plan.splits > 1 else min(tiles, clusters[0]), 1, 1)
        assert plan.splits == 1 or (not logits and plan.tile.warpgroup_n <= matmul_hopper.SPLITTABLE_N)
        assert plan.splits == 1 or plan.splits * plan.share_bytes <= stages * plan.stage_bytes, "sums lie in the ring"


def test_plans_suit_their_shapes() -> None:
    assert choose_plan(8192, 4096, 4096, H200).tile.n == 256
    assert choose_plan(128, 1024, 3072, H200).splits > 1, "eight tiles would leave most of the device idle"
    assert choose_plan(64, 4096, 4096, H200).tile.m == 64
    for num_rows in (128, 256, 512, 1024):
        for out_features, in_features in ((6144, 4096), (4096, 14336), (1024, 3072)):
            plan = choose_plan(num_rows, out_features, in_features, H200)
            assert plan.tile.count(num_rows, out_features) * plan.splits >= 64, "half of the device must not idle"


def test_constants_are_the_kernels() -> None:
    source = (SOURCE_FOLDER / "matmul_hopper.cu").read_text()
    values = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    for name in ("TILE_K", "MAX_STAGES", "WGMMA_M", "WARP_ROWS", "SPLITTABLE_N"):
        assert values[name] == getattr(matmul_hopper, name), name
    assert values["CHUNK_COLUMNS"] + 8 == matmul_hopper.CHUNK_STRIDE
    assert values["CONSUMER_WARPGROUPS"] * 4 == matmul_hopper.CONSUMER_WARPS


def tensor(device: WritingHopper, *shape: int, dtype: np.dtype[np.generic] = bfloat16, offset: int = 0) -> Tensor:
    return Tensor(Buffer(device, 1 << 20, 1 << 40, None), shape, dtype, offset)


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_many_aligned_rows_take_it(dtype: np.dtype[np.generic]) -> None:
    device = WritingHopper()
    ops = CudaOps(device)  # type: ignore[arg-type]
    x, weight, bias = (tensor(device, *shape, dtype=dtype) for shape in ((200, 1024), (512, 1024), (512,)))
    ops.matmul(x, weight, bias)
    ops.matmul(x, weight, bias, out=tensor(device, 200, 512, dtype=dtype), accumulate=True)
    ops.matmul(x, weight, out=tensor(device, 200, 512, dtype=float32))
    ops.matmul_silu_mul(x, weight, gate_up=tensor(device, 200, 512, dtype=dtype))
    plain, accumulated, logits, gated = hopper_launches(device)
    names = [name for name, _ in MATMUL_HOPPER.parameters]
    for launch in hopper_launches(device):
        assert (launch.spec, launch.template) in matmul_hopper.instantiations((cuda_type(dtype),))
        arguments = dict(zip(names, launch.arguments, strict=True))
        assert arguments["x_map"] != b""
        assert arguments["num_rows"] == 200
        assert (arguments["accumulate"], arguments["silu_mul"]) == (launch is accumulated, launch is gated)
        width = int(launch.template[3]) // (2 if launch is gated else 1)
        assert arguments["weight_map"] == bytes([width // 2]) * 128, "a box holds a warp group's rows, or half of them"
    assert logits.template[1] == "float"
    assert plain.template[1] == cuda_type(dtype)


@pytest.mark.parametrize(
    ("rows", "k", "n", "dtype", "offset"),
    [
        (32, 64, 64, bfloat16, 0),
        (100, 60, 64, bfloat16, 0),
        (100, 64, 60, bfloat16, 0),
        (100, 64, 64, float32, 0),
        (100, 64, 64, bfloat16, 8),
    ],
)
def test_other_products_take_the_portable_kernels(
    rows: int, k: int, n: int, dtype: np.dtype[np.generic], offset: int
) -> None:
    device = WritingHopper()
    x, weight = tensor(device, rows, k, dtype=dtype, offset=offset), tensor(device, n, k, dtype=dtype)
    CudaOps(device).matmul(x, weight, out=tensor(device, rows, n, dtype=dtype))  # type: ignore[arg-type]
    assert device.launches
    assert not hopper_launches(device)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("arch", ["80", "89", "90a", "100a", "120a"])
def test_only_sm_90a_has_it(arch: str, portable: bool) -> None:
    device = WritingHopper()
    device.arch = arch
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.hopper_matmul = not portable
    ops.matmul(empty((100, 64), bfloat16, device), empty((64, 64), bfloat16, device))
    assert len(hopper_launches(device)) == (arch == "90a" and not portable)
    assert len(device.launches) == 1


def test_float32_results_have_no_bias_and_add_to_nothing() -> None:
    device = WritingHopper()
    ops = CudaOps(device)  # type: ignore[arg-type]
    x, weight, bias = (tensor(device, *shape) for shape in ((200, 1024), (512, 1024), (512,)))
    ops.matmul(x, weight, bias, out=tensor(device, 200, 512, dtype=float32))
    ops.matmul(x, weight, out=tensor(device, 200, 512, dtype=float32), accumulate=True)
    assert len(device.launches) == 2
    assert not hopper_launches(device)


def test_a_wide_plan_keeps_its_ring_deep() -> None:
    wide = Plan(matmul_hopper.TILES[0])
    assert wide.stages(2, SHARED_BYTES) == wide.stages(4, SHARED_BYTES) == 4
