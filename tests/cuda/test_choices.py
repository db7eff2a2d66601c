"""The choice of kernels: the same as recorded, by name, and by a device's own figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import ATTENTION, sm90_prefill
from tessera.engine.ops.cuda.candidates import Candidate, CandidateTable, Chooser
from tessera.engine.ops.cuda.fp8 import sm90 as sm90_fp8
from tessera.engine.ops.cuda.fp8 import sm90_rows
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR
from tessera.engine.ops.cuda.linear import LINEAR, costs, sm90
from tessera.engine.ops.cuda.linear.sm90_kernels import SM90_MATMUL
from tessera.engine.ops.cuda.registry import all_specs
from tests.cuda.choices import CHOICES, DEVICES, GridDevice, choices


@pytest.fixture(autouse=True)
def maps_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "box_map", lambda *_: bytes(128))
    monkeypatch.setattr(sm90_fp8, "box_map", lambda *_: bytes(128))
    for name in ("box_map", "parts_map"):
        monkeypatch.setattr(sm90_rows, name, lambda *_: bytes(128))
    monkeypatch.setattr(sm90_prefill, "row_groups_map", lambda *_: bytes(128))


def test_every_problem_takes_the_kernels_that_were_recorded() -> None:
    recorded = CHOICES.read_text().splitlines(keepends=True)
    assert list(choices()) == recorded, "if this is intended, write them anew: python -m tests.cuda.choices"


def test_the_recorded_problems_take_every_candidate() -> None:
    text = CHOICES.read_text()
    for table in (LINEAR, FP8_LINEAR, ATTENTION):
        for candidate in table.candidates:
            assert any(f" {spec.name}" in text for spec in candidate.specs), candidate.name


def product_of(ops: CudaOps, device: GridDevice) -> str:
    device.launches.clear()
    ops.matmul(device.tensor(200, 1024), device.tensor(512, 1024))
    (launch,) = device.launches
    return launch.split("<")[0]


def test_a_kernel_is_forced_or_forbidden_by_name() -> None:
    device = GridDevice(*DEVICES["h200"])
    ops = CudaOps(device)  # type: ignore[arg-type]
    assert product_of(ops, device) == "sm90_matmul_kernel"
    ops.linear_kernels.restrict(without=["sm90", "sm90_wide"])
    assert product_of(ops, device) == "matmul_kernel"
    ops.linear_kernels.restrict(only=["portable"])
    assert product_of(ops, device) == "matmul_kernel"
    ops.linear_kernels.restrict()
    assert product_of(ops, device) == "sm90_matmul_kernel"
    ops.linear_kernels.restrict(only=["gemv"])
    with pytest.raises(TesseraError, match="no kernel that may be chosen does LinearProblem"):
        product_of(ops, device)


def test_an_unknown_name_is_refused() -> None:
    ops = CudaOps(GridDevice(*DEVICES["h200"]))  # type: ignore[arg-type]
    with pytest.raises(TesseraError, match="linear has no kernel 'tensor'; it has decode, float32, gemv"):
        ops.linear_kernels.restrict(without=["tensor"])


def test_a_device_has_figures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = GridDevice(*DEVICES["h200"])
    slow = replace(costs.H200, sm90=replace(costs.H200.sm90, min_rows=1000, min_rows_where_ahead=1000))
    monkeypatch.setitem(costs.DEVICES, device.device_name, slow)
    assert product_of(CudaOps(device), device) == "matmul_kernel"  # type: ignore[arg-type]


def test_every_kernel_of_a_table_is_described() -> None:
    specs = set(all_specs())
    for table in (LINEAR, FP8_LINEAR, ATTENTION):
        assert {spec for candidate in table.candidates for spec in candidate.specs} <= specs


class TestTable:
    SPEC: KernelSpec[Any] = SM90_MATMUL

    def candidate(self, name: str, order: int, cost: float, least: int = 0) -> Candidate[tuple[int], None]:
        return Candidate(
            name,
            (self.SPEC,),
            lambda problem, device: name if problem[0] >= least else None,
            lambda device, problem, plan, operands: device.launches.append(plan),  # type: ignore[attr-defined]
            order,
            lambda problem, plan, device: cost,
        )

    def table(self) -> CandidateTable[tuple[int], None]:
        table: CandidateTable[tuple[int], None] = CandidateTable("test")
        for candidate in (
            self.candidate("late", 2, 0.0),
            self.candidate("dear", 1, 2.0, least=5),
            self.candidate("cheap", 1, 1.0, least=10),
            self.candidate("as cheap", 1, 1.0, least=10),
        ):
            table.register(candidate)
        return table

    def test_order_then_cost_then_registration_decide(self) -> None:
        device: Any = GridDevice(*DEVICES["h200"])
        chooser = Chooser(self.table(), device)
        for size in (1, 5, 10):
            assert chooser.launch((size,), None)
        assert device.launches == ["late", "dear", "cheap"]
        chooser.restrict(only=["dear"])
        assert not chooser.launch((1,), None)

    def test_a_name_is_taken_once(self) -> None:
        table = self.table()
        with pytest.raises(AssertionError, match="test has a kernel late already"):
            table.register(self.candidate("late", 0, 0.0))
