"""Ranks on several GPUs against ranks on the CPU. Needs two GPUs that see each other's memory, or the emulation."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from tessera.engine.collectives.cuda import CudaCollectives
from tessera.engine.collectives.interface import Collectives, LeftSum, SummedHalf
from tessera.engine.collectives.peers import PeerGroup
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.cuda.driver import find_device
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.collectives import rows_fit
from tessera.engine.ops.cuda.linear import rank_products
from tessera.engine.ops.linear_interface import Activate, Activation, RMSNorm
from tessera.engine.tensor import CPU, Device, Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.support.cases.op_cases import random_array
from tests.support.processes.rank_threads import (
    Ranks,
    check_columns_and_tokens,
    check_graphs,
    check_largest,
    check_own_ids,
    check_sums,
    on_cpu,
)
from tests.support.references.reference import assert_close

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice

# A thread that hangs in the driver hears no signal; this method prints where all threads are, and ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

Array = np.ndarray[Any, Any]
T = TypeVar("T")
EMULATED = os.environ.get("TESSERA_EMULATED") == "1"


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Ranks]:
    devices = list(devices_of(request.param, pytestconfig))
    group = PeerGroup(Rendezvous(len(devices), timeout=30.0))
    with closing(Ranks(devices, lambda index: joined(index, group, devices[index]), group)) as made:
        yield made


def joined(index: int, group: PeerGroup, device: CudaDevice) -> CudaCollectives:
    made = CudaCollectives(index, group, device)
    if not EMULATED:
        for dtype in (float32, bfloat16, float16):
            made.prepare(dtype)
    else:
        made.patience = 100.0
    made.starting = False
    return made


def devices_of(count: int, config: pytest.Config) -> Iterator[CudaDevice]:
    if EMULATED:
        from tests.emulation.device import EmulatedDevice, kernel_folder

        for _ in range(count):
            yield EmulatedDevice(kernel_folder(config))  # type: ignore[misc]
        return
    for index in range(count):
        found = find_device(index)
        if not found.usable:
            pytest.skip(f"{count} GPUs are needed: {found.reason}")
    from tessera.engine.cuda.device import CudaDevice

    for index in range(count):
        yield CudaDevice(index)


# One chunk and a part of one; several blocks; more than one shot takes, of three ranks and of two.
SIZES = [(1, 12), (3, 4100), (65, 4096), *([] if EMULATED else [(64, 8192), (129, 4096)])]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=str)
def test_sums_are_those_of_the_cpu_bit_for_bit(ranks: Ranks, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    check_sums(ranks, shape, dtype)


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_blocks_meet_several_times_in_a_sum(
    ranks: Ranks, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one multiprocessor's blocks: the last time with a part of what a block takes, and one less often."""
    for collectives in ranks.collectives:
        monkeypatch.setattr(collectives, "_multiprocessors", 1)
    for shape in ((1, 5 * 8192 + 4100), (1, 20000), (2, 7 * 8192 + 8)):
        check_sums(ranks, shape, dtype)


def test_sums_follow_one_another(ranks: Ranks) -> None:
    """Of other sizes, so that blocks of a kernel meet data of the one before last; each rank's thread goes ahead."""
    sizes = [4096, 64, 20000, 8, 4096, 12288, 8]

    def call(collectives: Collectives, device: Device) -> list[Array]:
        tensors = [from_numpy(np.full((1, size), collectives.index + size, np.float32), device) for size in sizes]
        for tensor in tensors:
            collectives.all_reduce(tensor)
        return [np.array(tensor.numpy()) for tensor in tensors]

    count = len(ranks.devices)
    for arrays in ranks(call):
        for size, array in zip(sizes, arrays, strict=True):
            assert (array == count * size + sum(range(count))).all()


@pytest.mark.parametrize("shape", [(2, 256), (129, 4100)], ids=str)
def test_the_sum_is_added_at_once_and_rounded_once(ranks: Ranks, shape: tuple[int, int]) -> None:
    """In one shot, and in two, whose parts end within a thread's chunks."""
    count = len(ranks.devices)
    arrays = [random_array(seed, shape, bfloat16) for seed in range(count)]
    stream = random_array(9, shape, bfloat16, 4.0)

    def call(collectives: Collectives, device: Device) -> Array:
        x, residual = from_numpy(arrays[collectives.index], device), from_numpy(stream, device)
        assert collectives.all_reduce_add(x, residual)
        return np.array(residual.numpy())

    total = arrays[0].astype(np.float32)
    for other in arrays[1:]:
        total += other
    expected = (total + stream.astype(np.float32)).astype(bfloat16)
    assert all(np.array_equal(array, expected) for array in ranks(call))


# Rows of one block; of several chunks a thread; of threads with fewer chunks; more than there are blocks; rows that are
# longer than places.
LONGER = [] if EMULATED else [(1, 4096), (128, 4096), (250, 4096), (130, 8192), (300, 8192), (2, 16384)]
NORMED = [(2, 256), (3, 1160), (2, 2056), (131, 264), (257, 1024), *LONGER]


@pytest.mark.parametrize("shape", NORMED, ids=str)
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_a_norm_follows_the_sum(ranks: Ranks, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    check_norms(ranks, shape, dtype)


@pytest.mark.parametrize("shape", [(40, 264), (7, 2056), (5, 4096)], ids=str)
def test_blocks_meet_several_times_in_a_sum_with_a_norm(
    ranks: Ranks, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for collectives in ranks.collectives:
        monkeypatch.setattr(collectives, "_multiprocessors", 1)
    for _ in range(2):
        check_norms(ranks, shape, bfloat16)


def check_norms(ranks: Ranks, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    """The stream has the bits of the CPU's, and its norm those of the norm's own kernel."""
    arrays = [random_array(seed, shape, dtype) for seed in range(len(ranks.devices))]
    stream, weight = random_array(9, shape, dtype, 4.0), random_array(10, shape[-1:], dtype)

    def call(collectives: Collectives, device: Device) -> tuple[bool, Array, Array, Array]:
        x, residual = from_numpy(arrays[collectives.index], device), from_numpy(stream, device)
        gains, out, alone = (from_numpy(array, device) for array in (weight, stream, stream))
        done = collectives.all_reduce_add_norm(x, residual, gains, 1e-5, out)
        (CpuOps() if device is CPU else CudaOps(device)).rmsnorm(residual, gains, 1e-5, out=alone)  # type: ignore[arg-type]
        return done, np.array(residual.numpy()), np.array(out.numpy()), np.array(alone.numpy())

    with closing(on_cpu(len(arrays))) as cpu:
        _, expected, of_cpu, alone_of_cpu = cpu(call)[0]
    assert np.array_equal(of_cpu, alone_of_cpu)
    for done, added, normed, alone in ranks(call):
        assert done == rows_fit(*shape, dtype.itemsize, len(arrays))
        if done:
            assert np.array_equal(added, expected)
            assert np.array_equal(normed, alone)


# Width of the stream, inner width, multiprocessors and activation: a block has one tile or several.
LEFT: list[tuple[int, int, int, Activation | None]] = [
    (264, 520, 12, "silu_mul"),
    (264, 520, 12, "gelu_tanh_mul"),
    (264, 520, 12, None),
    (4360, 32, 150, "silu_mul"),
]
if not EMULATED:
    LEFT += [(4096, 2048, 132, None), (4096, 7168, 132, "silu_mul"), (8192, 4096, 132, "silu_mul")]


@pytest.mark.parametrize(("width", "inner", "multiprocessors", "activation"), LEFT, ids=str)
def test_a_sum_is_left_to_the_product_behind_it(
    ranks: Ranks,
    width: int,
    inner: int,
    multiprocessors: int,
    activation: Activation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream has the bits of all ranks' updates added in their order, for each half of some layers."""
    monkeypatch.setattr(rank_products, "LEAVES_SUMS", True)
    if EMULATED:
        for device in ranks.devices:
            monkeypatch.setattr(device, "multiprocessors", multiprocessors)
    count, features = len(ranks.devices), 2 * inner if activation else inner
    lasts = [random_array(20 + rank, (width, inner), bfloat16, inner**-0.5) for rank in range(count)]
    rows = [random_array(30 + rank, (1, inner), bfloat16) for rank in range(count)]
    bias, gains = random_array(40, (width,), bfloat16), random_array(41, (width,), bfloat16)
    after = random_array(42, (features, width), bfloat16, width**-0.5)
    stream = random_array(43, (1, width), bfloat16, 4.0)
    halves = (0, 1, 0, 1, 0)

    def call(collectives: Collectives, device: Device) -> tuple[list[Array], list[Array], list[Array]]:
        def on_device(array: Array) -> Tensor:
            return from_numpy(array, device)

        rank = collectives.index
        last = LinearWeight.of(on_device(lasts[rank]), on_device(bias) if rank == 0 else None)
        next_weight = LinearWeight.of(on_device(after))
        assert collectives.leaves_sums([SummedHalf(last, next_weight, activation)])
        x, streams = on_device(rows[rank]), [on_device(stream), *(on_device(0 * stream) for _ in halves)]
        updates, outs = [on_device(0 * stream) for _ in halves], []
        norm = on_device(gains)
        for number, half in enumerate(halves):
            collectives.leave_sum(x, last, half, updates[number])
            left = LeftSum(collectives, updates[number], half, streams[number + 1])
            outs.append(on_device(np.zeros((1, inner), bfloat16)))
            collectives.project_sum(streams[number], left, norm, 1e-5, next_weight, activation, outs[-1])
            if number == 1:  # other meetings may be between
                collectives.all_reduce(on_device(np.ones((1, 16), bfloat16)))
        found = [[np.array(each.numpy()) for each in tensors] for tensors in (updates, streams, outs)]
        return found[0], found[1], found[2]

    found = ranks(call)
    ops, total = CpuOps(), stream
    weight, norm = LinearWeight.of(from_numpy(after, CPU)), from_numpy(gains, CPU)
    for rank, (updates, *_) in enumerate(found):
        alone = LinearWeight.of(from_numpy(lasts[rank], CPU), from_numpy(bias, CPU) if rank == 0 else None)
        expected = ops.linear(from_numpy(rows[rank], CPU), alone).numpy()
        for update in updates:
            assert_close(update, expected, bfloat16)
    for number in range(len(halves)):
        parts = [updates[number].astype(np.float32) for updates, *_ in found]
        total = (sum(parts[1:], parts[0]) + total.astype(np.float32)).astype(bfloat16)
        row, scratch = from_numpy(total, CPU), from_numpy(0 * total, CPU)
        activate = Activate(activation, from_numpy(np.zeros((1, features), bfloat16), CPU)) if activation else None
        prologue = RMSNorm(norm, 1e-5, scratch)
        expected = ops.linear(row, weight, prologue=prologue, epilogue=activate).numpy()
        for _, streams, outs in found:
            assert np.array_equal(streams[number + 1], total)
            # On the CPU the norm and the product are rounded, too.
            assert_close(outs[number], expected, bfloat16, roundings=3)


def test_left_sums_are_numbered_on_the_device(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CUDA graph with both halves of a layer may be replayed."""
    monkeypatch.setattr(rank_products, "LEAVES_SUMS", True)
    width = inner = 264
    if EMULATED:
        for device in ranks.devices:
            monkeypatch.setattr(device, "multiprocessors", 12)

    def call(collectives: Collectives, device: Any) -> Array:
        eye = from_numpy(np.eye(width, dtype=bfloat16), device)
        one, norm, update, between = (from_numpy(np.ones((1, width), bfloat16), device) for _ in range(4))
        stream, out = (from_numpy(np.zeros((1, inner), bfloat16), device) for _ in range(2))
        weight, gains = LinearWeight.of(eye), norm.view(width)
        assert collectives.leaves_sums([SummedHalf(weight, weight, None)])
        with device.capture() as finish:
            for half, (before, after) in enumerate(((stream, between), (between, stream))):
                collectives.leave_sum(one, weight, half, update)
                left = LeftSum(collectives, update, half, after)
                collectives.project_sum(before, left, gains, 1e-5, weight, None, out)
        graph = finish()
        for _ in range(3):
            graph.launch()
        assert_close(out.numpy(), np.ones((1, inner)), bfloat16)
        return np.array(stream.numpy())

    count = len(ranks.devices)
    assert all((array == 2 * 3 * count).all() for array in ranks(call))


def test_sums_are_left_where_all_ranks_can(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_products, "LEAVES_SUMS", True)

    def call(collectives: Collectives, device: Device) -> list[bool]:
        def left(dtype: np.dtype[Any], width: int, inner: int) -> bool:
            last, after = (empty(shape, dtype, device) for shape in ((width, inner), (64, width)))
            return collectives.leaves_sums([SummedHalf(LinearWeight.of(last), LinearWeight.of(after), None)])

        of_one = 64 if collectives.index else 10248  # longer than a row that a block keeps
        return [left(bfloat16, 64, 64), left(float16, 64, 64), left(bfloat16, 16384, 64), left(bfloat16, 64, of_one)]

    assert all(found == [True, False, False, False] for found in ranks(call))


def test_columns_are_gathered_and_tokens_told(ranks: Ranks) -> None:
    check_columns_and_tokens(ranks)


def test_the_largest_of_all_ranks(ranks: Ranks) -> None:
    check_largest(ranks)


def test_ids_are_rows_of_a_part(ranks: Ranks) -> None:
    check_own_ids(ranks)


def test_graphs_are_replayed_in_step(ranks: Ranks) -> None:
    """Flags are numbered on the device."""
    check_graphs(ranks)


def test_a_rank_that_does_not_come_ends_the_others(pytestconfig: pytest.Config) -> None:
    """By the host, which they look at, or by the clock, and then they say what they waited for."""
    if not EMULATED:
        pytest.skip("an error of a kernel ends all work of its device")
    devices = list(devices_of(2, pytestconfig))
    for patience, report in ((60.0, []), (0.05, ["block 0 of rank 0's all_reduce (meeting 1) waited for rank 1"])):
        group = PeerGroup(Rendezvous(2, timeout=30.0))
        with closing(Ranks(devices, lambda index: CudaCollectives(index, group, devices[index]), group)) as ranks:  # noqa: B023
            alone = ranks.collectives[0]
            assert isinstance(alone, CudaCollectives)
            alone.starting, alone.patience = False, patience
            stop = threading.Timer(0.2, group.rendezvous.fail, (1, RuntimeError("broken")))
            stop.start()
            with pytest.raises(Exception, match="trap"):
                alone.all_reduce(from_numpy(np.ones((1, 64), np.float32), devices[0]))
            stop.join()
            assert [line.partition(" at its")[0] for line in group.reports()] == report


def test_a_row_that_does_not_come_ends_the_product_behind_it(pytestconfig: pytest.Config) -> None:
    if not EMULATED:
        pytest.skip("an error of a kernel ends all work of its device")
    devices = list(devices_of(2, pytestconfig))
    group = PeerGroup(Rendezvous(2, timeout=30.0))
    with closing(Ranks(devices, lambda index: CudaCollectives(index, group, devices[index]), group)) as ranks:
        alone, device = ranks.collectives[0], devices[0]
        assert isinstance(alone, CudaCollectives)
        alone.starting, alone.patience = False, 0.05
        row, out, update, stream = (from_numpy(np.ones((1, 64), bfloat16), device) for _ in range(4))
        weight = LinearWeight.of(from_numpy(np.ones((64, 64), bfloat16), device))
        alone.leave_sum(row, weight, 0, update)
        with pytest.raises(Exception, match="trap"):
            alone.project_sum(row, LeftSum(alone, update, 0, stream), row.view(64), 1e-5, weight, None, out)
        (report,) = group.reports()
    assert (
        "of rank 0's matmul_of_ranks (meeting 1) waited for rank 1 at its begin, which has come to meeting 0" in report
    )
