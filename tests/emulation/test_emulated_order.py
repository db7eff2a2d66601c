"""The order of sums of products and attention that must not depend on the batch, by the kernels' own sources.

`TESSERA_EMULATED=1 pytest -m gpu tests/gpu/products/test_order_of_sums_gpu.py -k small` has more, with whole engines.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.linear import ordered, portable
from tessera.engine.ops.cuda.linear.problem import LinearOperands, LinearProblem
from tessera.engine.tensor import bfloat16, empty, float32, from_numpy
from tests.emulation.device import COMPILER, EmulatedDevice, kernel_folder
from tests.gpu.products.sequences import Sequences, bits
from tests.support.cases.op_cases import random_array

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER) is None,
    reason=f"the kernels are compiled for the CPU by {COMPILER} on Linux",
)

WATCHED = {"EMULATED_RACES": "1"}
K, FEATURES = 2632, 72  # six chunks of x, of which the last is no whole one; nine units of weight rows


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    return kernel_folder(pytestconfig)


@pytest.fixture(params=[WATCHED, {**WATCHED, "EMULATED_ORDER": "last_first"}], ids=["first_first", "last_first"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> CudaOps:
    for variable, value in request.param.items():
        monkeypatch.setenv(variable, value)
    return CudaOps(EmulatedDevice(folder, multiprocessors=2), batch_invariant=True)  # type: ignore[arg-type]


def product(ops: CudaOps, count: int, plan: ordered.OrderedPlan | portable.Tile, *, normed: bool = False) -> np.ndarray:
    x, weight, norm = (
        from_numpy(random_array(seed, shape, bfloat16)[: count if seed == 1 else None].copy(), ops.device)
        for seed, shape in ((1, (16, K)), (2, (FEATURES, K)), (3, (K,)))
    )
    out = empty((count, FEATURES), float32, ops.device)
    operands = LinearOperands(x, weight, None, out)
    if isinstance(plan, portable.Tile):
        if normed:
            operands = operands._replace(x=ops.rmsnorm(x, norm, 1e-5))
        portable._launch(ops.device, LinearProblem.of(operands, in_order=True), plan, operands)
    else:
        if normed:
            operands = operands._replace(norm=norm, eps=1e-5)
        ordered._launch(ops.device, LinearProblem.of(operands, in_order=True), plan, operands)
    return bits(out.numpy())


def test_products_of_few_and_many_rows_have_one_order(ops: CudaOps) -> None:
    """With x in shared memory, with x that comes in chunks, and with the norm before the product."""
    tile = ordered.OrderedTile(8, 2, 8, 6)
    for count, buffers, normed in ((5, 6, False), (8, 4, False), (1, 6, True)):
        expected = product(ops, 8, portable.SMALL, normed=normed)
        found = product(ops, count, ordered.OrderedPlan(tile, buffers), normed=normed)
        assert (found == expected[:count]).all(), (count, buffers, normed)


def test_attention_to_the_same_keys_has_one_order(ops: CudaOps) -> None:
    """A prompt in chunks, and a token among others and alone."""
    sequences = Sequences([70, 33], (4, 2, 64), bfloat16, ops)
    expected = sequences.attend([(0, 0, 70), (1, 0, 33)], 24)
    for first, count in ((0, 30), (30, 40)):
        found = sequences.attend([(0, first, count), (1, 32, 1)], 24)
        assert all(found[0, place] == expected[0, place] for place in range(first, first + count))
    alone = sequences.attend([(1, 32, 1)], 24)
    assert alone[1, 32] == found[1, 32]


def test_a_draft_has_the_order_of_its_tokens_one_by_one(ops: CudaOps) -> None:
    """Keys that are several blocks' work, and a split that ends within the draft."""
    sequences = Sequences([131, 270], (4, 2, 64), bfloat16, ops)
    sequences.attend([(0, 0, 131), (1, 0, 270)], None)
    found = sequences.attend([(0, 126, 5), (1, 262, 8)], None, drafts=True)
    alone = sequences.attend([(0, position, 1) for position in range(126, 131)], None, fused=False)
    alone |= sequences.attend([(1, position, 1) for position in range(262, 270)], None, fused=False)
    assert found == alone
