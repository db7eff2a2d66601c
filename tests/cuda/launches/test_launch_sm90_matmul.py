"""How products of many rows are divided on sm_90a, on a device that only writes down what it would launch."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.candidates import Choice
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.costs import H200 as H200_COSTS
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.linear.sm90 import (
    LOGITS_SHARING_PLANS,
    SHARING_PLANS,
    WIDE_PLAN,
    Plan,
    choose_plan,
)
from tessera.engine.ops.cuda.linear.sm90_kernels import MAX_STAGES, SM90_MATMUL_WIDE, SPLITTABLE_N, TILE_K
from tessera.engine.ops.cuda.types import ceil_div, cuda_type
from tessera.engine.tensor import Buffer, Tensor, bfloat16, empty, float16, float32
from tests.cuda.launches.sm90_device import H200, SHARED_BYTES, Sm90Device
from tests.cuda.launches.written import Launch
from tests.support.cases.linear_calls import product_silu_mul

HALF_IDLE = (114, 57, 0, 25, 0, 0, 0, 0)  # a device whose multiprocessors are grouped otherwise
SEED = 20261121
COSTS = H200_COSTS.sm90
SM90_KERNELS = ("sm90", "sm90_wide")


@pytest.fixture(autouse=True)
def maps_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "box_map", lambda matrix, rows: bytes([rows // 2]) * 128)


def sm90_launches(device: Sm90Device) -> list[Launch]:
    return [launch for launch in device.launches if launch.spec in sm90.SPECS]


def choice(
    num_rows: int, features: int, in_features: int, clusters: tuple[int, ...] = H200, *, logits: bool = False
) -> Choice:
    """Of an aligned product of bfloat16."""
    device = Sm90Device(clusters)
    x, weight = tensor(device, num_rows, in_features), tensor(device, features, in_features)
    out = tensor(device, num_rows, features, dtype=float32 if logits else bfloat16)
    found = LINEAR.choose(LinearProblem.of(LinearOperands(x, weight, None, out)), device)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("clusters", [H200, HALF_IDLE], ids=["h200", "half_idle"])
def test_every_plan_can_run(clusters: tuple[int, ...], logits: bool) -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    out_dtype = "float" if logits else "__nv_bfloat16"
    compiled = set(sm90.instantiations(("__nv_bfloat16",)))
    sides = [8, 64, 72, 128, 1000, 1024, 4096, 6144, 14336, 28672, 151936]
    for _ in range(500):
        num_rows = int(rng.integers(33, 9000))
        out_features, in_features = (int(side) for side in rng.choice(sides, 2))
        found = choice(num_rows, out_features, in_features, clusters, logits=logits)
        if found.candidate.name not in SM90_KERNELS:
            continue
        plan: Plan = found.plan
        itemsize = 4 if logits else 2
        config = plan.config(num_rows, out_features, itemsize, clusters[plan.cluster - 1], SHARED_BYTES)
        stages = plan.stages(itemsize, SHARED_BYTES)
        steps = ceil_div(in_features, TILE_K)
        assert (plan.spec, plan.template("__nv_bfloat16", out_dtype)) in compiled
        assert 3 <= stages <= MAX_STAGES, "a slot in use, one to be used next and one to be filled"
        assert config.shared_bytes + sm90.BARRIER_BYTES <= SHARED_BYTES
        assert clusters[plan.cluster - 1] > 0
        assert config.cluster == plan.cluster
        assert plan.splits <= max(1, steps)
        count = plan.count(num_rows, out_features)
        running = count if plan.splits > 1 else min(count, clusters[plan.cluster - 1])
        assert config.grid == (running * plan.cluster, 1, 1)
        assert plan.splits == 1 or (not logits and plan.tile.warpgroup_n <= SPLITTABLE_N)
        assert plan.splits == 1 or plan.splits * plan.share_bytes <= stages * plan.stage_bytes, "sums lie in the ring"


def test_plans_suit_their_shapes() -> None:
    assert choose_plan(8192, 4096, 4096, H200).tile.n == 256
    assert choice(8192, 28672, 4096).plan == WIDE_PLAN
    assert choice(8192, 28672, 4096).candidate.name == "sm90_wide"
    assert choice(COSTS.min_wide_rows - 1, 28672, 4096).candidate.name == "sm90"
    assert choice(8192, 28672, 4096, logits=True).candidate.name == "sm90"
    assert choice(8192, 28672, 4096, (132, 0, *H200[2:])).candidate.name == "sm90", "the device runs no pairs"
    assert choose_plan(128, 1024, 3072, H200).splits > 1, "eight tiles would leave most of the device idle"
    assert choose_plan(64, 4096, 4096, H200).tile.m == 64
    for num_rows in (128, 256, 512, 1024):
        for out_features, in_features in ((6144, 4096), (4096, 14336), (1024, 3072)):
            plan = choose_plan(num_rows, out_features, in_features, H200)
            assert plan.tile.count(num_rows, out_features) * plan.splits >= 64, "half of the device must not idle"


def test_many_rows_share_weights_where_they_can() -> None:
    least = COSTS.min_sharing_rows
    assert choose_plan(least, 4096, 4096, H200) in SHARING_PLANS
    assert choose_plan(least, 4096, 4096, H200, logits=True) in LOGITS_SHARING_PLANS
    assert choose_plan(least - 1, 28672, 4096, H200).sharing == 1, "too few rows"
    assert choose_plan(least, 28672, 4096, H200).sharing == 2
    assert choose_plan(8192, 64, 4096, H200).sharing == 1, "tiles of few columns have no instantiation"
    assert choose_plan(8192, 4096, 4096, (132, 0, *H200[2:])).sharing == 1, "the device runs no pairs"
    for num_rows in (least, 2048, 8192):
        for out_features, in_features in ((6144, 4096), (4096, 14336), (1024, 3072)):
            plan = choose_plan(num_rows, out_features, in_features, H200)
            assert plan.splits == 1 or plan.sharing == 1, "a cluster has one use"


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("num_rows", [128, 129, 257, 1000, 8192, 8193])
@pytest.mark.parametrize("plan", SHARING_PLANS, ids=lambda plan: str(plan.tile.n))
def test_blocks_that_share_take_rows_of_tiles_in_pairs(plan: Plan, num_rows: int, silu_mul: bool) -> None:
    device = Sm90Device()
    x, weight = tensor(device, num_rows, 1024), tensor(device, 4096, 1024)
    out = tensor(device, num_rows, 2048 if silu_mul else 4096)
    sm90.launch(device, plan, x, weight, None, out, silu_mul=silu_mul)  # type: ignore[arg-type]
    (launch,) = sm90_launches(device)
    params = launch.params._asdict()
    assert (launch.spec, launch.template) in sm90.instantiations(("__nv_bfloat16",))
    assert launch.template[-1] == "2"
    assert launch.config.cluster == 2
    pairs = ceil_div(num_rows, 2 * plan.tile.m) * ceil_div(4096, plan.tile.n)
    assert launch.config.grid == (2 * min(pairs, H200[1]), 1, 1), "only whole clusters, all of which run at once"
    assert params["splits"] == 1
    assert params["tiles_m_in_l2"] == sm90.ROWS_IN_L2 // (2 * plan.tile.m)
    assert params["weight_map"] == bytes([plan.tile.n // 4]) * 128, "each block copies half of a tile's columns"
    assert plan.tile.n // 2 % 8 == 0, "where the swizzle repeats"


@pytest.mark.parametrize(("num_rows", "tail"), [(40, 40), (64, 64), (144, 16), (256, 128), (1000, 104), (1024, 128)])
def test_the_last_tile_copies_no_rows_beyond_the_matrix(num_rows: int, tail: int) -> None:
    device = Sm90Device()
    x, weight = tensor(device, num_rows, 1024), tensor(device, 4096, 1024)
    plan = choose_plan(num_rows, 4096, 1024, H200)
    sm90.launch(device, plan, x, weight, None, tensor(device, num_rows, 4096))  # type: ignore[arg-type]
    (launch,) = sm90_launches(device)
    params = launch.params._asdict()
    assert params["x_map"] == bytes([plan.tile.m // 2]) * 128
    assert params["x_tail_map"] == bytes([tail // 2]) * 128


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("num_rows", [129, 192, 193, 385, 8192])
def test_wide_tiles_are_192_rows(num_rows: int, silu_mul: bool) -> None:
    device = Sm90Device()
    x, weight = tensor(device, num_rows, 1024), tensor(device, 4096, 1024)
    out = tensor(device, num_rows, 2048 if silu_mul else 4096)
    sm90.launch(device, WIDE_PLAN, x, weight, None, out, silu_mul=silu_mul)  # type: ignore[arg-type]
    (launch,) = sm90_launches(device)
    assert launch.spec is SM90_MATMUL_WIDE
    assert (launch.spec, launch.template) in sm90.instantiations(("__nv_bfloat16",))
    params = launch.params._asdict()
    assert params["x_map"] == bytes([192 // 2]) * 128
    assert params["weight_map"] == bytes([128 // 2]) * 128, "each block copies half of a tile's columns"
    clusters = ceil_div(num_rows, 2 * 192) * ceil_div(4096, 256)
    assert launch.config.grid == (2 * min(clusters, H200[1]), 1, 1)
    assert launch.config.block == (384, 1, 1), "168 registers for each thread"
    assert params["tiles_m_in_l2"] == 2048 // (2 * 192)
    assert params["stages"] == 3
    assert launch.config.shared_bytes == 3 * (192 + 256) * 128 + 12 * 16 * 40 * 2
    assert launch.config.shared_bytes + sm90.BARRIER_BYTES <= SHARED_BYTES


def tensor(device: Sm90Device, *shape: int, dtype: np.dtype[np.generic] = bfloat16, offset: int = 0) -> Tensor:
    return Tensor(Buffer(device, 1 << 20, 1 << 40, None), shape, dtype, offset)


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_many_aligned_rows_take_it(dtype: np.dtype[np.generic]) -> None:
    device = Sm90Device()
    ops = CudaOps(device)  # type: ignore[arg-type]
    x, weight, bias = (tensor(device, *shape, dtype=dtype) for shape in ((200, 1024), (512, 1024), (512,)))
    ops.matmul(x, weight, bias)
    ops.matmul(x, weight, bias, out=tensor(device, 200, 512, dtype=dtype), accumulate=True)
    ops.matmul(x, weight, out=tensor(device, 200, 512, dtype=float32))
    product_silu_mul(ops, x, weight, gate_up=tensor(device, 200, 512, dtype=dtype))
    plain, accumulated, logits, gated = sm90_launches(device)
    for launch in sm90_launches(device):
        assert (launch.spec, launch.template) in sm90.instantiations((cuda_type(dtype),))
        params = launch.params._asdict()
        assert params["x_map"] != b""
        assert params["num_rows"] == 200
        assert (params["accumulate"], params["gated"]) == (launch is accumulated, launch is gated)
        width = int(launch.template[3]) // (2 if launch is gated else 1)
        assert params["weight_map"] == bytes([width // 2]) * 128, "a box holds a warp group's rows, or half of them"
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
    device = Sm90Device()
    x, weight = tensor(device, rows, k, dtype=dtype, offset=offset), tensor(device, n, k, dtype=dtype)
    CudaOps(device).matmul(x, weight, out=tensor(device, rows, n, dtype=dtype))  # type: ignore[arg-type]
    assert device.launches
    assert not sm90_launches(device)


@pytest.mark.parametrize(
    ("kind", "features", "first"),
    [
        ("plain", 1024, 33),
        ("plain", 3072, 17),
        ("plain", 4096, 17),
        ("plain", 6144, 33),
        ("logits", 32000, 17),
        ("gated", 1024, 17),
    ],
)
def test_rows_from_which_on_it_is_faster(kind: str, features: int, first: int) -> None:
    for rows in (first - 1, first):
        device = Sm90Device()
        ops = CudaOps(device)  # type: ignore[arg-type]
        x, weight = tensor(device, rows, 512), tensor(device, features * (2 if kind == "gated" else 1), 512)
        out = tensor(device, rows, features, dtype=float32 if kind == "logits" else bfloat16)
        if kind == "gated":
            product_silu_mul(ops, x, weight, gate_up=tensor(device, rows, 2 * features), out=out)
        else:
            ops.matmul(x, weight, out=out)
        assert len(sm90_launches(device)) == (rows == first)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("arch", ["80", "89", "90a", "100a", "120a"])
def test_only_sm_90a_has_it(arch: str, portable: bool) -> None:
    device = Sm90Device()
    device.arch = arch
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.linear_kernels.restrict(without=SM90_KERNELS if portable else ())
    ops.matmul(empty((100, 64), bfloat16, device), empty((64, 64), bfloat16, device))
    assert len(sm90_launches(device)) == (arch == "90a" and not portable)
    assert len(device.launches) == 1


def test_float32_results_have_no_bias_and_add_to_nothing() -> None:
    device = Sm90Device()
    ops = CudaOps(device)  # type: ignore[arg-type]
    x, weight, bias = (tensor(device, *shape) for shape in ((200, 1024), (512, 1024), (512,)))
    ops.matmul(x, weight, bias, out=tensor(device, 200, 512, dtype=float32))
    ops.matmul(x, weight, out=tensor(device, 200, 512, dtype=float32), accumulate=True)
    assert len(device.launches) == 2
    assert not sm90_launches(device)


def test_a_wide_plan_keeps_its_ring_deep() -> None:
    wide = Plan(sm90.TILES[0])
    assert wide.stages(2, SHARED_BYTES) == wide.stages(4, SHARED_BYTES) == 4
