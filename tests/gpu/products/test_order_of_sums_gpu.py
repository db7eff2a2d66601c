"""With `batch_invariant` a row's bits depend on nothing but the row: of products, of attention, of whole answers.

The shapes called "small" also run on the CPU (`tests/emulation`), whose wgmma adds as its mma does. That the real ones
do is measured by `python -m tests.bench.tensor_core_sums`, and tested here on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import Tensor, bfloat16, empty, float32, from_numpy
from tests.gpu.products.sequences import DTYPES, Array, Sequences, bits
from tests.support.cases.canaries import (
    ask,
    ask_each_alone,
    companies,
    differing,
    make_canaries,
    make_core,
    write_config,
)
from tests.support.cases.op_cases import mixed_weight, random_array


@pytest.fixture(scope="module")
def ops(cuda_device: CudaDevice) -> CudaOps:
    made = CudaOps(cuda_device, batch_invariant=True)
    for dtype in DTYPES.values():
        made.compile(dtype)
    return made


pytestmark = pytest.mark.gpu


# -- products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """x [rows, k] times a weight [n, k]; counts of rows that must give equal bits."""

    k: int
    n: int
    counts: tuple[int, ...]


COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 127, 128, 200, 300)
PRODUCTS = {
    "small": Product(600, 48, (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 70)),
    "k of whole steps": Product(4096, 6144, COUNTS),
    "long k": Product(14336, 4096, COUNTS),
    "few features": Product(3072, 1024, (*COUNTS, 1300)),
    "odd sizes": Product(1000, 1048, COUNTS),
}
FORMS = ("plain", "bias and residual", "logits", "norm", "norm and gate", "gate")


def compute(ops: CudaOps, form: str, arrays: dict[str, Array], count: int) -> Array:
    tensors = {name: from_numpy(array, ops.device) for name, array in arrays.items() if name not in ("x", "residual")}
    x = from_numpy(arrays["x"][:count].copy(), ops.device)
    rows, features = count, arrays["weight"].shape[0]
    around: dict[str, Any] = {}
    out = empty((rows, features), x.dtype, ops.device)
    bias: Tensor | None = None
    if form == "bias and residual":
        bias, around["epilogue"] = tensors["bias"], Accumulate()
        out = from_numpy(arrays["residual"][:count].copy(), ops.device)
    if form == "logits":
        out = empty((rows, features), float32, ops.device)
    if "norm" in form:
        around["prologue"] = RMSNorm(tensors["norm"], 1e-5, empty(x.shape, x.dtype, ops.device))
    if "gate" in form:
        around["epilogue"] = Activate("silu_mul", empty((rows, features), x.dtype, ops.device))
        out = empty((rows, features // 2), x.dtype, ops.device)
    return ops.linear(x, LinearWeight.of(tensors["weight"], bias), out=out, **around).numpy()


def product_arrays(product: Product, dtype: Any) -> dict[str, Array]:
    rows = max(product.counts)
    return {
        "x": random_array(1, (rows, product.k), dtype),
        "weight": random_array(2, (product.n, product.k), dtype, 0.05),
        "bias": random_array(3, (product.n,), dtype),
        "residual": random_array(4, (rows, product.n), dtype),
        "norm": random_array(5, (product.k,), dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_rows_product_is_the_same_among_any_number_of_rows(name: str, dtype: str, ops: CudaOps) -> None:
    product = PRODUCTS[name]
    arrays = product_arrays(product, DTYPES[dtype])
    for form in FORMS:
        expected = compute(ops, form, arrays, max(product.counts))
        assert np.isfinite(expected.astype(np.float32)).all()
        for count in product.counts:
            found = compute(ops, form, arrays, count)
            assert (bits(found) == bits(expected[:count])).all(), f"{form}, {count} rows"


@pytest.mark.parametrize(
    "format", ["packed_q4_k", "packed_q6_k", "packed_int4group128", "packed_nf4group64", "int8_rows"]
)
@pytest.mark.parametrize("sizes", [(512, 48, (1, 2, 17, 70)), (4096, 6144, (1, 3, 8, 16, 33, 64, 128, 300))], ids=str)
def test_products_by_quantised_weights_keep_the_rule(
    format: str, sizes: tuple[int, int, tuple[int, ...]], ops: CudaOps
) -> None:
    """Those of FP8 are in test_fp8_gpu.py."""
    k, n, counts = sizes
    if n > 1000 and os.environ.get("TESSERA_EMULATED") == "1":
        pytest.skip("the emulation takes too long for so many features")
    weight, _ = mixed_weight(ops.device, bfloat16, [format], [n], k)
    ops.reserve_linear([weight], bfloat16, max(counts))
    x, norm = random_array(6, (max(counts), k), bfloat16), from_numpy(random_array(7, (k,), bfloat16), ops.device)
    found = []
    for count in sorted(counts, reverse=True):
        out, normed = (empty((count, width), bfloat16, ops.device) for width in (n, k))
        prologue = RMSNorm(norm, 1e-5, normed)
        found.append(
            bits(ops.linear(from_numpy(x[:count].copy(), ops.device), weight, prologue=prologue, out=out).numpy())
        )
    assert all((some == found[0][: len(some)]).all() for some in found)


@pytest.mark.parametrize("name", ["small", "few features"])
def test_kernels_of_all_kinds_give_the_same_product(name: str, ops: CudaOps) -> None:
    product = PRODUCTS[name]
    arrays = product_arrays(product, bfloat16)
    kinds = [["ordered"], ["portable"]] + ([["sm90"]] if ops.device.arch == "90a" else [])
    try:
        for form in ("plain", "bias and residual", "logits"):
            results = []
            for kind in kinds:
                ops.linear_kernels.restrict(only=kind)
                results.append(bits(compute(ops, form, arrays, 16)))
            assert all((result == results[0]).all() for result in results[1:]), form
    finally:
        ops.linear_kernels.restrict()


# -- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    lengths: tuple[int, ...]
    heads: tuple[int, int, int]  # query heads, key/value heads, size
    window: int | None
    chunks: tuple[int, ...]
    dtype: str = "bfloat16"


ATTENTION = {
    "small": Attention((70, 9, 33), (4, 2, 64), 24, (7, 32)),
    "small, all keys": Attention((150, 9, 33), (4, 2, 64), None, (37,), "float16"),
    "8B": Attention((3000, 17, 900, 128, 2049, *range(2, 60)), (32, 8, 128), None, (64, 130, 512, 2000)),
    "8B in float16": Attention((2500, 300), (32, 8, 128), None, (100, 1111), "float16"),
    "window": Attention((3000, 700, 150), (12, 3, 64), 200, (64, 130, 512), "float16"),
    "window and group": Attention((3000, 700), (16, 8, 128), 333, (64, 250, 999)),
    "heads of 256": Attention((700, 300), (8, 2, 256), 100, (64, 101, 256)),
    "odd heads": Attention((300, 90), (6, 2, 80), 100, (64, 101)),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_a_prompts_tokens_see_the_same_in_any_chunks_and_company(name: str, ops: CudaOps) -> None:
    case = ATTENTION[name]
    sequences = Sequences(list(case.lengths), case.heads, DTYPES[case.dtype], ops)
    expected = sequences.attend([(row, 0, length) for row, length in enumerate(case.lengths)], case.window)
    longest = case.lengths[0]
    alone = sequences.attend([(0, 0, longest)], case.window)
    assert alone == {place: expected[place] for place in alone}
    for chunk in case.chunks:
        for first in range(0, longest, chunk):
            # The last rows decode beside the chunk.
            pieces = [(row, case.lengths[row] - 1, 1) for row in range(1, len(case.lengths)) if case.lengths[row] > 2]
            count = min(chunk, longest - first)
            if count < 2:
                continue
            found = sequences.attend([(0, first, count), *pieces], case.window)
            for position in range(first, first + count):
                assert found[0, position] == expected[0, position], f"token {position} in chunks of {chunk}"


@pytest.mark.parametrize("name", ATTENTION)
def test_a_decoded_token_sees_the_same_in_any_company(name: str, ops: CudaOps) -> None:
    case = ATTENTION[name]
    sequences = Sequences(list(case.lengths), case.heads, DTYPES[case.dtype], ops)
    sequences.attend([(row, 0, length) for row, length in enumerate(case.lengths)], case.window)  # stores all keys
    pieces = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
    expected = sequences.attend(pieces, case.window)
    for some in (pieces[:1], pieces[1:2], pieces[:2], pieces[::-1]):
        for fused in (True, False):
            found = sequences.attend(some, case.window, fused=fused)
            assert found == {place: expected[place] for place in found}, f"{len(some)} rows, fused: {fused}"
    # Several tokens of a sequence in one step, each a row.
    first = max(case.lengths[0] - 5, 0)
    found = sequences.attend([(0, position, 1) for position in range(first, case.lengths[0])], case.window, fused=False)
    assert found[0, case.lengths[0] - 1] == expected[0, case.lengths[0] - 1]


@pytest.mark.parametrize("name", ATTENTION)
def test_a_draft_sees_what_tokens_see_one_by_one(name: str, ops: CudaOps) -> None:
    case = ATTENTION[name]
    sequences = Sequences(list(case.lengths), case.heads, DTYPES[case.dtype], ops)
    sequences.attend([(row, 0, length) for row, length in enumerate(case.lengths)], case.window)  # stores all keys
    pieces = [
        (row, max(length - count, 0), min(count, length))
        for row, (length, count) in enumerate(zip(case.lengths, (8, 3, 16, 1, 5) * 20, strict=False))
    ]
    found = sequences.attend(pieces, case.window, drafts=True)
    for row, first, count in pieces[:8]:
        for position in range(first, first + count):
            alone = sequences.attend([(row, position, 1)], case.window)
            assert found[row, position] == alone[row, position], f"token {position} of sequence {row}"


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    canaries: int
    longest: int  # prompt
    max_tokens: int
    others: int
    settings: dict[str, Any]
    changes: tuple[dict[str, Any], ...]  # of settings; each a start of its own
    vocab_size: int = 2048


FULL = Serving(
    64,
    1500,
    12,
    256,
    {"max_model_len": 2048, "num_kv_blocks": 20000, "max_num_seqs": 320, "max_num_batched_tokens": 8192},
    (
        {},  # a restart
        {"max_num_batched_tokens": 64, "max_num_seqs": 48, "enforce_eager": True},
        {"max_num_batched_tokens": 512},
        {"prefix_caching": False, "max_num_seqs": 16, "enforce_eager": True},
    ),
)
SMALL = Serving(
    3,
    30,
    3,
    5,
    {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    ({"max_num_batched_tokens": 8},),
    vocab_size=200,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["small", "qwen3-0.6b", "llama-8b", "window"])
def test_canaries_answer_with_the_same_bits_in_every_company(
    model: str, dtype: str, ops: CudaOps, tmp_path: Path
) -> None:
    serving = SMALL if model == "small" else FULL
    folder = write_config(tmp_path, model)
    canaries = make_canaries(3, serving.canaries, serving.longest, serving.max_tokens, serving.vocab_size)
    sizes = {"longest": serving.longest, "vocab_size": serving.vocab_size, "num_others": serving.others}
    core = make_core(folder, ops, dtype=dtype, **serving.settings)
    expected = ask_each_alone(core, canaries)
    for company, answers in companies(core, canaries, **sizes):
        assert differing(answers, expected) == [], company
    del core
    for change in serving.changes:
        core = make_core(folder, ops, dtype=dtype, **{**serving.settings, **change})
        assert differing(ask(core, canaries), expected) == [], change
        del core


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("model", ["small", "qwen3-0.6b", "llama-8b", "window"])
def test_preempted_canaries_compute_their_own_tokens_to_the_same_bits(
    model: str, prefix_caching: bool, dtype: str, ops: CudaOps, tmp_path: Path
) -> None:
    small = model == "small"
    folder = write_config(tmp_path, model)
    canaries = make_canaries(4, *((4, 20, 20, 200) if small else (64, 300, 150, 2048)))
    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64, "block_size": 8, "enforce_eager": True}
    settings |= {"prefix_caching": prefix_caching, "dtype": dtype}
    core = make_core(folder, ops, **settings, num_kv_blocks=6000)
    expected = ask(core, canaries)
    assert core.metrics.num_preemptions == 0
    del core
    core = make_core(
        folder, ops, **{**settings, "max_model_len": 512 if not small else 64}, num_kv_blocks=14 if small else 700
    )
    assert differing(ask(core, canaries), expected) == []
    assert core.metrics.num_preemptions > 0
