"""Launches of training's kernels, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tessera.engine.autograd.variable import Variable
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.linear import sm90 as linear_sm90
from tessera.engine.ops.cuda.linear.costs import H200 as H200_COSTS
from tessera.engine.ops.cuda.linear.sm90 import BARRIER_BYTES
from tessera.engine.ops.cuda.linear.sm90_kernels import MAX_STAGES, TILE_K
from tessera.engine.ops.cuda.training import flash, sm90
from tessera.engine.ops.cuda.training.linear import TRANSPOSE
from tessera.engine.ops.cuda.training.ops import CudaTrainingOps
from tessera.engine.ops.cuda.training.packed import PackedProblem
from tessera.engine.ops.cuda.training.sm90 import SM90_TURNED_MATMUL, SM90_TURNED_WIDE, TurnedPlan
from tessera.engine.ops.cuda.training.sums import ADD_PARTIALS
from tessera.engine.ops.cuda.types import ceil_div
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import CPU, Buffer, Tensor, bfloat16, empty, float16, float32, from_numpy
from tessera.engine.training.optimizers.muon import Muon, MuonSettings
from tessera.engine.training.parameters import Parameter
from tests.cuda.launches.steps import StepDevice, Written
from tests.cuda.launches.written import Launch, WritingDevice, check_params

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


H200 = (132, 66, 39, 30, 22, 17, 15, 15)  # clusters of 1, 2, ... blocks that run at a time
SHARED_BYTES = 227 << 10
SEED = 20261124
TURNED = (SM90_TURNED_MATMUL, SM90_TURNED_WIDE)


class Sm90Device(WritingDevice):
    def __init__(self, arch: str = "90a") -> None:
        super().__init__(H200[0], arch, clusters=True)
        self.max_shared_bytes = SHARED_BYTES

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return H200[config.cluster - 1]

    def tensor(self, *shape: int, dtype: np.dtype[Any] = bfloat16, offset: int = 0) -> Tensor:
        return Tensor(Buffer(self, 1 << 20, 1 << 42, None), shape, dtype, offset)


@pytest.fixture(autouse=True)
def maps_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sm90, linear_sm90):
        monkeypatch.setattr(module, "box_map", lambda matrix, rows: bytes([rows % 256]) * 128)


def chosen(num_rows: int, out_features: int, in_features: int, *, sliced: bool) -> TurnedPlan:
    return sm90.choose_plan(num_rows, out_features, in_features, H200, H200_COSTS.sm90, sliced=sliced)


@pytest.mark.parametrize("sliced", [False, True])
def test_every_plan_of_the_backward_can_run(sliced: bool) -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    compiled = set(sm90.instantiations(("__nv_bfloat16",)))
    sides = [8, 16, 64, 72, 768, 1000, 4096, 14336, 50264]
    for _ in range(300):
        out_features = int(rng.choice(sides))
        num_rows, in_features = (int(size) for size in rng.choice([*sides, 1, 37, 2049, 65536], 2))
        plan = chosen(num_rows, out_features, in_features, sliced=sliced)
        itemsize, out_dtype = (4, "float") if sliced else (2, "__nv_bfloat16")
        at_once = H200[plan.plan.sharing - 1]
        config = plan.config(num_rows, out_features, itemsize, at_once, SHARED_BYTES)
        stages = plan.plan.stages(itemsize, SHARED_BYTES)
        assert (plan.spec, plan.template("__nv_bfloat16", out_dtype, turned_x=sliced)) in compiled
        assert 3 <= stages <= MAX_STAGES, "a slot in use, one to be used next and one to be filled"
        assert config.shared_bytes + BARRIER_BYTES <= SHARED_BYTES
        assert config.cluster == plan.plan.sharing
        tiles = plan.plan.count(num_rows, out_features)
        assert config.grid == ((tiles if plan.slices > 1 else min(tiles, at_once)) * config.cluster, plan.slices, 1)
        assert plan.slices == 1 or (sliced and plan.slices <= ceil_div(in_features, TILE_K)), "a slice has a step"
        assert plan.slices == 1 or plan.partial_bytes(num_rows, out_features) <= sm90.MAX_PARTIAL_BYTES


def test_sums_of_many_tokens_into_few_tiles_are_sliced() -> None:
    for out_features, in_features in ((768, 768), (3072, 768), (768, 3072), (16, 4096), (4096, 16)):
        plan = chosen(out_features, in_features, 65536, sliced=True)
        blocks = plan.plan.count(out_features, in_features) * plan.plan.sharing * plan.slices
        assert plan.slices > 1
        assert blocks >= 100, "most multiprocessors have a block"
    assert chosen(4096, 4096, 8192, sliced=True).slices == 1
    assert chosen(50264, 768, 2560, sliced=True).slices == 1
    assert chosen(65536, 768, 3072, sliced=False).spec is SM90_TURNED_WIDE


def gradients(
    device: Sm90Device, tokens: int, features: int, width: int, dtype: np.dtype[Any] = bfloat16, **where: int
) -> list[Launch]:
    ops = CudaTrainingOps(device, CudaOps(device))  # type: ignore[arg-type]
    dy, x, weight = (
        device.tensor(*shape, dtype=dtype, **where)
        for shape in ((tokens, features), (tokens, width), (features, width))
    )
    ops.matmul_input_gradient(dy, weight)
    ops.matmul_weight_gradient(dy, x, device.tensor(features, width, dtype=float32), accumulate=True)
    return device.launches


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_products_of_the_backward_read_their_operands_as_they_lie(dtype: np.dtype[Any]) -> None:
    device = Sm90Device()
    of_input, of_weight = gradients(device, 8192, 4096, 1024, dtype)
    for launch in (of_input, of_weight):
        assert launch.spec in TURNED
        check_params(launch)
    assert (of_input.params.num_rows, of_input.params.out_features, of_input.params.in_features) == (8192, 1024, 4096)
    assert (of_weight.params.num_rows, of_weight.params.out_features, of_weight.params.in_features) == (
        4096,
        1024,
        8192,
    )
    assert (of_input.params.accumulate, of_weight.params.accumulate) == (False, True)
    assert of_input.params.weight_map == of_weight.params.x_map == bytes([TILE_K]) * 128


def test_slices_are_added_to_what_is_there() -> None:
    _, product, added = gradients(Sm90Device(), 65536, 768, 768)
    assert product.spec in TURNED
    assert not product.params.accumulate
    assert product.config.grid[1] > 1
    assert added.spec is ADD_PARTIALS
    check_params(added)
    assert (added.params.num_partials, added.params.accumulate) == (product.config.grid[1], True)


@pytest.mark.parametrize(
    ("arch", "width", "dtype", "offset"),
    [
        ("100a", 64, bfloat16, 0),
        ("80", 64, bfloat16, 0),
        ("90a", 60, bfloat16, 0),
        ("90a", 64, bfloat16, 8),
        ("90a", 64, float32, 0),
    ],
)
def test_other_products_of_the_backward_are_of_transposed_copies(
    arch: str, width: int, dtype: np.dtype[Any], offset: int
) -> None:
    launches = gradients(Sm90Device(arch), 200, 64, width, dtype, offset=offset)
    assert sum(launch.spec is TRANSPOSE for launch in launches) == 3
    assert not {launch.spec for launch in launches} & set(TURNED)


def test_products_are_of_transposed_copies_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaTrainingOps, "reads_in_place", False)
    launches = gradients(Sm90Device(), 200, 64, 64)
    assert sum(launch.spec is TRANSPOSE for launch in launches) == 3


class RecordingDevice(StepDevice):
    """Attributes: overlapping: whether kernels may overlap, of each recording."""

    def __init__(self) -> None:
        super().__init__()
        self.overlapping: list[bool] = []

    @contextmanager
    def capture(self, *, overlaps: bool = True) -> Iterator[Callable[[], Written]]:
        self.overlapping.append(overlaps)
        with super().capture() as finish:
            yield finish


def test_muon_records_once_what_it_has_launched_and_without_overlap() -> None:
    """Its products take for a weight what the kernel in front of them writes."""
    device: Any = RecordingDevice()
    ops = CudaOps(device)
    parameters = [
        Parameter(str(shape), Variable(empty(shape, bfloat16, device), True), (("", shape[0]),))
        for shape in ((64, 64), (96, 64), (32, 96), (1024, 2048), (2048, 1024))
    ]
    muon = Muon(parameters, ops, CudaTrainingOps(device, ops), MuonSettings())
    for _ in range(3):
        muon.update(0.02)
    assert device.overlapping == [False]
