"""Mixtures of experts on the GPU against the CPU; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.formats import (
    BLOCK_FORMATS,
    KERNEL_FORMATS,
    PACKED_FORMATS,
    DenseFormat,
    LinearWeight,
    PackedGroupFormat,
    WeightPart,
)
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.moe import mxfp4
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Activation, RMSNorm
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.support.cases.gguf_blocks import random_blocks
from tests.support.cases.op_cases import DTYPES, AttentionCase, AttentionInputs, poisoned, random_array, random_groups
from tests.support.references import moe_reference
from tests.support.references.moe_reference import ROUTINGS, routed_of, uneven_experts
from tests.support.references.reference import assert_close

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]

HALVES = [bfloat16, float16]


def route(ops: Ops, logits: Array, routing: Routing, bias: Array | None, correction: Array | None) -> list[Array]:
    device = ops.device
    out = routed_of(len(logits), routing.top_k, logits.shape[1], device)
    vectors = [None if vector is None else from_numpy(vector, device) for vector in (bias, correction)]
    ops.route(from_numpy(logits, device), routing, out, bias=vectors[0], correction=vectors[1])
    return [tensor.numpy().copy() for tensor in out]


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 128), (37, 32), (5, 16), (70, 60), (9, 512)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route_small(
    name: str, biased: bool, num_tokens: int, num_experts: int, cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    routing = ROUTINGS[name]
    logits = random_array(1, (num_tokens, num_experts), scale=2.0)
    logits[0, : num_experts // 2] = 0.5  # equal ones
    bias = random_array(2, (num_experts,), bfloat16) if biased else None
    corrected = biased and routing.kind in ("sigmoid", "softmax")
    correction = random_array(3, (num_experts,), scale=0.3) if corrected else None
    expected = route(cpu_ops, logits, routing, bias, correction)
    found = route(cuda_ops, logits, routing, bias, correction)
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        if position == 1:
            np.testing.assert_allclose(one, other, rtol=2e-5)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden"), [(1, 128, 2048), (5, 32, 2880), (16, 60, 264), (27, 128, 512)]
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_router_of_few_tokens_small(
    name: str,
    dtype: np.dtype[Any],
    num_tokens: int,
    num_experts: int,
    hidden: int,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    """Norm, product, choice and order in one kernel, where the device has it."""
    routing, device = ROUTINGS[name], cuda_ops.device
    rng = np.random.default_rng(num_tokens)
    x = random_array(1, (num_tokens, hidden), dtype)
    gains = random_array(2, (hidden,), dtype)
    weight = (rng.integers(-4, 5, (num_experts, hidden)) / 32).astype(dtype)
    bias = random_array(4, (num_experts,), dtype)
    correction = random_array(5, (num_experts,), scale=0.3) if routing.kind == "sigmoid" else None
    scratch = poisoned(x.shape, dtype, device)
    out = routed_of(num_tokens, routing.top_k, num_experts, device)
    vectors = {"bias": bias, "correction": correction}
    tensors = {name: None if vector is None else from_numpy(vector, device) for name, vector in vectors.items()}
    norm = RMSNorm(from_numpy(gains, device), 1e-6, scratch)
    router = LinearWeight.of(from_numpy(weight, device))
    if not cuda_ops.route_rows(from_numpy(x, device), router, routing, out, norm=norm, **tensors):
        pytest.skip("no kernel for this router")
    normed = cpu_ops.rmsnorm(from_numpy(x, cpu_ops.device), from_numpy(gains, cpu_ops.device), 1e-6).numpy()
    assert_close(scratch.numpy(), normed, dtype)
    logits = (scratch.numpy().astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    expected = route(cpu_ops, logits, routing, bias, correction)
    found = [tensor.numpy() for tensor in out]
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        if position == 1:
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_tokens", [3, 12])
def test_a_choice_does_not_depend_on_other_tokens_small(num_tokens: int, cuda_ops: CudaOps) -> None:
    """Alone and among others, by the kernel for few tokens: to the bit."""
    device, routing = cuda_ops.device, ROUTINGS["softmax-normalised"]
    x = random_array(1, (num_tokens, 512), bfloat16)
    router = LinearWeight.of(from_numpy(random_array(2, (64, 512), bfloat16, 0.05), device))

    def routed(rows: Array) -> Routed:
        out = routed_of(len(rows), routing.top_k, 64, device)
        if not cuda_ops.route_rows(from_numpy(rows, device), router, routing, out):
            pytest.skip("no kernel for this router")
        return out

    together, alone = routed(x), routed(x[2:3])
    for name in ("experts", "weights"):
        np.testing.assert_array_equal(getattr(together, name).numpy()[2:3], getattr(alone, name).numpy())


@pytest.mark.parametrize("num_tokens", [700, 4096])
def test_pairs_of_many_tokens_keep_their_order(num_tokens: int, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    logits = random_array(4, (num_tokens, 128))
    expected = route(cpu_ops, logits, ROUTINGS["softmax-normalised"], None, None)
    found = route(cuda_ops, logits, ROUTINGS["softmax-normalised"], None, None)
    for one, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(one, other)


class Mixture:
    """Weights of experts and rows, the same on both devices."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        num_tokens: int,
        *,
        form: str = "dense",
        num_experts: int = 6,
        top_k: int = 2,
        hidden: int = 128,
        inner: int = 40,
        biased: bool = True,
    ) -> None:
        self.dtype, self.num_experts, self.hidden, self.inner = dtype, num_experts, hidden, inner
        self.experts = uneven_experts(num_tokens, num_tokens, top_k, num_experts)
        self.x = random_array(1, (num_tokens, hidden), dtype, 0.5)
        self.up = self._weight(form, 2, num_experts * 2 * inner, hidden)
        self.down = self._weight("dense" if inner % 32 else form, 3, num_experts * hidden, inner)
        biases = [random_array(4 + i, (num_experts * rows,), dtype) for i, rows in enumerate((2 * inner, hidden))]
        self.biases = biases if biased else [None, None]

    def _weight(self, form: str, seed: int, rows: int, columns: int) -> tuple[str, Any]:
        if form == "dense":
            return form, random_array(seed, (rows, columns), self.dtype, columns**-0.5)
        if form not in PACKED_FORMATS:
            format = KERNEL_FORMATS[form]
            assert isinstance(format, PackedGroupFormat)
            return form, random_groups(format, rows, columns, np.random.default_rng(seed))
        return form, random_blocks(form, rows * columns, np.random.default_rng(seed)).reshape(rows, -1)

    def routed(self, ops: Ops) -> Routed:
        offsets, pairs = moe_reference.grouped(self.experts, self.num_experts)
        weights = random_array(9, self.experts.shape)
        vectors = (self.experts, weights, offsets, pairs, np.argsort(pairs))
        return Routed(*(from_numpy(v if v.dtype == float32 else v.astype(np.int32), ops.device) for v in vectors))

    def weight(self, ops: Ops, stored: tuple[str, Any], columns: int, bias: Array | None) -> LinearWeight:
        form, values = stored
        device = ops.device
        if isinstance(values, dict):
            tensors = {name: from_numpy(array, device) for name, array in values.items()}
            part = WeightPart(KERNEL_FORMATS[form], (len(values["codes"]), columns), tensors)
        elif form == "dense":
            part = WeightPart(DenseFormat(self.dtype), values.shape, {"values": from_numpy(values, device)})
        elif device.name == "cpu":
            part = WeightPart(BLOCK_FORMATS[form], (len(values), columns), {"blocks": from_numpy(values, device)})
        else:
            arrays = PACKED_FORMATS[form].pack(values)
            tensors = {name: from_numpy(array, device) for name, array in arrays.items()}
            part = WeightPart(PACKED_FORMATS[form], (len(values), columns), tensors)
        return LinearWeight((part,), None if bias is None else from_numpy(bias, device))

    def up_of(self, ops: Ops, activation: Activation, x: Array | None = None) -> Array:
        pairs, device = self.experts.size, ops.device
        out = poisoned((pairs, self.inner), self.dtype, device)
        ops.expert_up(
            from_numpy(self.x if x is None else x, device),
            self.weight(ops, self.up, self.hidden, self.biases[0]),
            self.routed(ops),
            activation,
            product=poisoned((pairs, 2 * self.inner), self.dtype, device),
            gathered=poisoned((pairs, self.hidden), self.dtype, device),
            out=out,
        )
        return out.numpy().copy()

    def down_of(self, ops: Ops, x: Array) -> Array:
        out = poisoned((self.experts.size, self.hidden), self.dtype, ops.device)
        weight = self.weight(ops, self.down, self.inner, self.biases[1])
        ops.expert_down(from_numpy(x, ops.device), weight, self.routed(ops), out)
        return out.numpy().copy()


def check(mixture: Mixture, cuda_ops: Ops, cpu_ops: Ops, activation: Activation) -> None:
    expected = mixture.up_of(cpu_ops, activation)
    assert_close(mixture.up_of(cuda_ops, activation), expected, mixture.dtype, roundings=3)
    assert_close(mixture.down_of(cuda_ops, expected), mixture.down_of(cpu_ops, expected), mixture.dtype, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize("activation", ["silu_mul", "clamped_swiglu_mul"])
def test_experts_small(
    activation: Activation, num_tokens: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    """One row of an expert, a few, and more than a tile."""
    check(Mixture(dtype, num_tokens), cuda_ops, cpu_ops, activation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_tokens", [3, 33, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_the_shape_of_qwen3(
    biased: bool, num_tokens: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    mixture = Mixture(dtype, num_tokens, num_experts=16, top_k=8, hidden=2048, inner=768, biased=biased)
    check(mixture, cuda_ops, cpu_ops, "silu_mul")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [2, 70])
@pytest.mark.parametrize("form", ["MXFP4", "Q4_K", "Q6_K", "Q8_0"])
def test_experts_in_blocks_small(
    form: str, num_tokens: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    mixture = Mixture(dtype, num_tokens, form=form, num_experts=4, hidden=256, inner=64 if form == "MXFP4" else 40)
    mixture.x = (mixture.x.astype(np.float32) * 0.05).astype(dtype)
    check(mixture, cuda_ops, cpu_ops, "clamped_swiglu_mul" if form == "MXFP4" else "silu_mul")


@pytest.mark.parametrize("tile", mxfp4.TILES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
def test_each_variant_for_experts_in_mxfp4_small(
    num_tokens: int, tile: mxfp4.Mxfp4Tile, cuda_ops: CudaOps, cpu_ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks of an expert's rows, rows that end within a step."""
    monkeypatch.setattr(mxfp4, "choose_tile", lambda *_: tile)
    mixture = Mixture(bfloat16, num_tokens, form="MXFP4", num_experts=5, hidden=416, inner=160)
    mixture.x = random_array(1, mixture.x.shape, bfloat16, 0.02)
    check(mixture, cuda_ops, cpu_ops, "clamped_swiglu_mul" if num_tokens < 70 else "silu_mul")


def test_elements_of_experts_in_mxfp4_small(cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Exactly, with every exponent that weights have and then some."""
    mixture = Mixture(bfloat16, 32, form="MXFP4", num_experts=4, hidden=128, inner=32, biased=False)
    mixture.down[1].reshape(-1, 17)[:, 0] = np.arange(512) % 100 + 60
    x = np.tile(np.eye(32, dtype=np.float32), (2, 1)).astype(bfloat16)
    np.testing.assert_array_equal(mixture.down_of(cuda_ops, x), mixture.down_of(cpu_ops, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [2, 70])
@pytest.mark.parametrize("form", ["Int4Group32", "Int4Group128", "Int8Group64", "Fp8Group128"])
def test_experts_in_groups_small(
    form: str, num_tokens: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    """As AWQ, GPTQ, compressed-tensors and FP8 checkpoints have them."""
    mixture = Mixture(dtype, num_tokens, form=form, num_experts=4, hidden=256, inner=128)
    mixture.x = (mixture.x.astype(np.float32) * 0.05).astype(dtype)
    check(mixture, cuda_ops, cpu_ops, "silu_mul")


@pytest.mark.parametrize("num_tokens", [4, 70, 300])
@pytest.mark.parametrize("form", ["Int4Group128", "Fp8Group128", "Q4_K"])
def test_quantised_experts_of_the_shape_of_qwen3(
    form: str, num_tokens: int, cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    mixture = Mixture(bfloat16, num_tokens, form=form, num_experts=16, top_k=8, hidden=2048, inner=768, biased=False)
    mixture.x = (mixture.x.astype(np.float32) * 0.01).astype(bfloat16)
    check(mixture, cuda_ops, cpu_ops, "silu_mul")


@pytest.mark.parametrize("num_tokens", [4, 70, 300])
def test_experts_of_the_shape_of_gpt_oss(num_tokens: int, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    mixture = Mixture(bfloat16, num_tokens, form="MXFP4", num_experts=4, top_k=2, hidden=2880, inner=2880)
    mixture.x = (mixture.x.astype(np.float32) * 0.01).astype(bfloat16)
    check(mixture, cuda_ops, cpu_ops, "clamped_swiglu_mul")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
def test_combine_small(shared: str, accumulate: bool, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    mixture = Mixture(dtype, 5, num_experts=9, top_k=4)
    arrays = [random_array(seed, shape, dtype) for seed, shape in enumerate([(20, 43), (5, 43), (5, 43)])]
    gate = random_array(5, (5, 1))

    def combine(ops: Ops) -> Array:
        x, out, other = (from_numpy(array, ops.device) for array in arrays)
        ops.combine_experts(
            x,
            mixture.routed(ops),
            out,
            shared=None if shared == "none" else other,
            shared_gate=from_numpy(gate, ops.device) if shared == "gated" else None,
            accumulate=accumulate,
        )
        return out.numpy().copy()

    assert_close(combine(cuda_ops), combine(cpu_ops), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_swiglu_small(dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    x = random_array(1, (7, 2 * 43), dtype, 6.0)
    expected = cpu_ops.clamped_swiglu_mul(from_numpy(x, cpu_ops.device)).numpy()
    out: Tensor = empty((7, 43), dtype, cuda_ops.device)
    assert_close(cuda_ops.clamped_swiglu_mul(from_numpy(x, cuda_ops.device), out=out).numpy(), expected, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_row_of_an_expert_does_not_depend_on_the_others_small(dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    """Alone and among others of its expert, by the kernels for few rows."""
    many = Mixture(dtype, 12, num_experts=6, top_k=2)
    one = Mixture(dtype, 1, num_experts=6, top_k=2)
    one.x, one.experts, one.up, one.down, one.biases = many.x[4:5], many.experts[4:5], many.up, many.down, many.biases
    places = np.argsort(moe_reference.grouped(many.experts, 6)[1]).reshape(many.experts.shape)[4]
    alone = np.argsort(moe_reference.grouped(one.experts, 6)[1])
    np.testing.assert_array_equal(
        many.up_of(cuda_ops, "silu_mul")[places].view(np.uint16),
        one.up_of(cuda_ops, "silu_mul")[alone].view(np.uint16),
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 14])
@pytest.mark.parametrize("inner", [40, 768])
def test_products_that_begin_early_are_the_same_small(inner: int, num_tokens: int, cuda_ops: CudaOps) -> None:
    """Down and sum read the routing before they wait where up, in front of them, has waited for it: the same bits."""
    mixture = Mixture(bfloat16, num_tokens, num_experts=9, top_k=3, hidden=296, inner=inner)
    ops, device = cuda_ops, cuda_ops.device
    pairs, x = 3 * num_tokens, from_numpy(mixture.x, cuda_ops.device)
    weights = [
        mixture.weight(ops, stored, columns, bias)
        for stored, columns, bias in zip((mixture.up, mixture.down), (296, inner), mixture.biases, strict=True)
    ]

    def outputs(routings: list[Routed]) -> list[Array]:
        product, rows = (poisoned((pairs, width), bfloat16, device) for width in (2 * inner, 296))
        activated = poisoned((pairs, inner), bfloat16, device)
        outputs, total = poisoned((pairs, 296), bfloat16, device), from_numpy(mixture.x, device)
        ops.expert_up(x, weights[0], routings[0], "silu_mul", product=product, gathered=rows, out=activated)
        ops.expert_down(activated, weights[1], routings[1], outputs)
        ops.combine_experts(outputs, routings[2], total, accumulate=True)
        return [tensor.numpy().view(np.uint16).copy() for tensor in (outputs, total)]

    early = outputs([mixture.routed(ops)] * 3)
    late = outputs([mixture.routed(ops) for _ in range(3)])
    for one, other in zip(early, late, strict=True):
        np.testing.assert_array_equal(one, other)


SINK_ROWS = {
    "decodes": ((1, 40), (1, 3), (1, 700)),
    "one decode": ((1, 300),),
    "prompts": ((33, 33), (7, 90)),
    "both": ((1, 40), (21, 60), (1, 5)),
    "split keys": ((40, 40), (20, 1100)),
}


@pytest.mark.parametrize("rows", SINK_ROWS)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_small(dtype: np.dtype[Any], window: int | None, rows: str, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    case = AttentionCase(rows, SINK_ROWS[rows], num_heads=8, num_kv_heads=2, head_dim=64, dtype=dtype)
    inputs = AttentionInputs(case)
    sinks = random_array(8, (8,), dtype, 2.0)

    def attend(ops: Ops) -> Array:
        keys, values = inputs.caches(ops.device)
        out = ops.paged_attention(
            from_numpy(inputs.q, ops.device),
            keys,
            values,
            inputs.metadata(ops.device),
            scale=case.scale,
            sliding_window=window,
            sinks=from_numpy(sinks, ops.device),
            out=poisoned(inputs.q.shape, dtype, ops.device),
        )
        return out.numpy().copy()

    assert_close(attend(cuda_ops), attend(cpu_ops), dtype)
