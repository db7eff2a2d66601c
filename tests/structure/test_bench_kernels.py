"""The benchmark of kernels calls every operation as it is, on a device that only writes down what it would launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.ops.cuda.linear import sm90
from tests.bench import cache_kernels, decode_splits, kernels, order_of_sums
from tests.bench.__main__ import kernel_table
from tests.cuda.launches.sm90_device import Sm90Device


class BenchDevice(Sm90Device):
    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        pass


def without_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((sm90, "box_map"), (sm90_prefill, "row_groups_map")):
        monkeypatch.setattr(module, name, lambda *_: bytes(128))


def without_reference(rows: Callable[..., Any]) -> Callable[[CudaOps, Any], list[kernels.Row]]:
    return lambda ops, device: list(rows(ops, device, None))


PARTS: dict[str, Callable[[Any, Any], list[kernels.Row]]] = {
    "matmuls": without_reference(kernels.matmuls),
    "layers": without_reference(kernels.layers),
    "attention": without_reference(kernels.attention),
    "prefill_steps": without_reference(kernels.prefill_steps),
    "sampling": lambda ops, device: list(kernels.sampling(ops, device)),
    "small": lambda ops, device: list(kernels.small(ops, device)),
    "caches": lambda ops, device: [row for pair in cache_kernels.measure(ops, device) for row in pair],
}


@pytest.mark.parametrize("cache", decode_splits.CACHES)
def test_decodes_are_timed_with_each_division_of_rows(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[LaunchConfig] = []

    def measure(device: BenchDevice, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        launches.append(device.launches[-1].config)
        return 1.0

    monkeypatch.setattr(kernels, "measure", measure)
    device: Any = BenchDevice()
    found = list(decode_splits.measure(CudaOps(device), device, 40, 640, cache))
    assert [name for name, _ in found] == ["today", "1", "2", "3", "4", "5"]
    assert [config.grid for config in launches[1:]] == [(8, 40, blocks) for blocks in range(1, 6)]
    launches.clear()
    few = dict(list(decode_splits.measure(CudaOps(device), device, 16, 640, cache)))
    grids = dict(zip(few, (config.grid for config in launches), strict=True))
    assert grids["3"] == grids["3m"] == (8, 16, 3)
    assert grids["2c2"] == grids["2c5"] == (16, 16, 1), "clusters of two"
    assert {config.block[0] for config in launches} == {64, 128}, "with two warps and with four"


@pytest.mark.parametrize("cache", decode_splits.CACHES)
def test_a_long_row_is_timed_beside_short_ones(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[LaunchConfig] = []

    def measure(device: BenchDevice, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        launches.append(device.launches[-1].config)
        return float(len(launches))

    monkeypatch.setattr(kernels, "measure", measure)
    device: Any = BenchDevice()
    assert decode_splits.measure_long(CudaOps(device), device, 64, 640, 100_000, cache) == [1.0, 2.0]
    assert launches[0] == launches[1], "the graph is the same"


@pytest.mark.parametrize("part", [order_of_sums.products, order_of_sums.attention])
def test_one_order_of_sums_is_compared_with_many(part: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure", lambda device, calls: [call() for call in calls[:2]] and 1.0)
    without_maps(monkeypatch)
    device: Any = BenchDevice()
    rows = list(part(CudaOps(device), CudaOps(device, batch_invariant=True), device))
    assert len(rows) > 20
    assert all(before > 0 and after > 0 for _, _, before, after in rows)


def test_every_kernel_in_order_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure", lambda device, calls: calls[0]() or 1.0)
    without_maps(monkeypatch)
    device: Any = BenchDevice()
    rows = list(order_of_sums.kernel_choices(CudaOps(device, batch_invariant=True), device))
    assert len(rows) == len(kernels.SHAPES) * len(order_of_sums.KERNEL_ROWS)
    assert all(times.count("*") == 1 for _, rows_of, times in rows if rows_of != "128 rows"), rows


@pytest.mark.parametrize("part", PARTS)
def test_every_figure_launches_something(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []

    def measure(device: BenchDevice, calls: Sequence[Callable[[], object]]) -> float:
        before = len(device.launches)
        for call in calls[:2]:
            call()
        launches.append(len(device.launches) - before)
        return 1.0

    monkeypatch.setattr(kernels, "measure", measure)
    without_maps(monkeypatch)
    device = BenchDevice()
    rows = PARTS[part](CudaOps(cast(CudaDevice, device)), device)
    assert len(rows) == len(launches) > 0
    assert min(launches) > 0
    assert all(row["us"] > 0 and row["shape"] for row in rows)
    assert kernel_table(rows).row_count == len(rows)
