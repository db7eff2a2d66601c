"""Mixtures of experts on the CPU against float64 references, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import CPU, Tensor, bfloat16, empty, float32, from_numpy, int32
from tests.support.cases.op_cases import DTYPES, AttentionCase, AttentionInputs, mixed_weight, random_array
from tests.support.references import moe_reference, reference
from tests.support.references.moe_reference import ROUTINGS, routed_of, uneven_experts
from tests.support.references.reference import assert_close

Array = np.ndarray[Any, Any]

ops = CpuOps()


def tensor(values: Array) -> Tensor:
    return from_numpy(values, CPU)


def routed_by(experts: Array, num_experts: int) -> Routed:
    offsets, pairs = moe_reference.grouped(experts, num_experts)
    vectors = (experts, random_array(9, experts.shape), offsets, pairs, np.argsort(pairs))
    return Routed(*(tensor(v if v.dtype == float32 else v.astype(np.int32)) for v in vectors))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name: str, biased: bool) -> None:
    routing, num_experts = ROUTINGS[name], 16
    logits = random_array(1, (33, num_experts), scale=2.0)
    bias = random_array(2, (num_experts,), bfloat16) if biased else None
    corrected = biased and routing.kind in ("sigmoid", "softmax")
    correction = random_array(3, (num_experts,), scale=0.3) if corrected else None
    out = routed_of(33, routing.top_k, num_experts, CPU)
    vectors = {"bias": bias, "correction": correction}
    ops.route(tensor(logits), routing, out, **{k: None if v is None else tensor(v) for k, v in vectors.items()})
    experts, weights = moe_reference.route(logits, routing, bias, correction)
    offsets, pairs = moe_reference.grouped(experts, num_experts)
    np.testing.assert_array_equal(out.experts.numpy(), experts)
    np.testing.assert_allclose(out.weights.numpy(), weights, rtol=2e-5)
    np.testing.assert_array_equal(out.offsets.numpy(), offsets)
    np.testing.assert_array_equal(out.pairs.numpy(), pairs)
    np.testing.assert_array_equal(out.places.numpy(), np.argsort(pairs))


def test_equal_logits_choose_the_first_experts_and_nan_the_last() -> None:
    logits = np.array([[0, 0, 0, 0], [np.nan, 1, np.nan, 1], [np.nan] * 4], np.float32)
    out = routed_of(3, 2, 4, CPU)
    ops.route(tensor(logits), Routing("softmax", 2), out)
    np.testing.assert_array_equal(out.experts.numpy(), [[0, 1], [1, 3], [0, 1]])
    np.testing.assert_allclose(out.weights.numpy()[:2], [[0.25, 0.25], [0.5, 0.5]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "mxfp4", "q4_k"])
@pytest.mark.parametrize("activation", ["silu_mul", "clamped_swiglu_mul"])
def test_experts(activation: Activation, form: str, dtype: np.dtype[Any]) -> None:
    num_tokens, top_k, num_experts, hidden, inner = 19, 3, 6, 256, 32
    experts = uneven_experts(4, num_tokens, top_k, num_experts)
    routed = routed_by(experts, num_experts)
    up, up_values = mixed_weight(CPU, dtype, [form], [num_experts * 2 * inner], hidden)
    down_values = random_array(6, (num_experts * hidden, inner), dtype, 0.1)
    bias = random_array(7, (num_experts * 2 * inner,), dtype)
    x = random_array(5, (num_tokens, hidden), dtype, 0.02)
    pairs = num_tokens * top_k
    activated = ops.expert_up(
        tensor(x),
        LinearWeight(up.parts, tensor(bias)),
        routed,
        activation,
        product=empty((pairs, 2 * inner), dtype, CPU),
        gathered=empty((pairs, hidden), dtype, CPU),
        out=empty((pairs, inner), dtype, CPU),
    )
    found = ops.expert_down(
        activated, LinearWeight.of(tensor(down_values)), routed, empty((pairs, hidden), dtype, CPU)
    ).numpy()
    up_values = up_values.reshape(num_experts, 2 * inner, hidden)
    for token in range(num_tokens):
        for i, expert in enumerate(experts[token]):
            product = reference.matmul(x[token : token + 1], up_values[expert]) + bias.reshape(num_experts, -1)[expert]
            activated_row = moe_reference.activate(activation, product.astype(dtype)).astype(dtype)
            expected = reference.matmul(activated_row, down_values.reshape(num_experts, hidden, inner)[expert])
            assert_close(found[routed.places.numpy()[token * top_k + i]], expected[0], dtype, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
def test_combine(shared: str, accumulate: bool, dtype: np.dtype[Any]) -> None:
    routed = routed_by(uneven_experts(2, 5, 4, 9), 9)
    x, weights = random_array(1, (5 * 4, 24), dtype), routed.weights.numpy()
    out, other, gate = random_array(3, (5, 24), dtype), random_array(4, (5, 24), dtype), random_array(5, (5, 1))
    expected = np.einsum("tkh,tk->th", x[routed.places.numpy()].reshape(5, 4, 24).astype(float), weights.astype(float))
    if shared != "none":
        expected = expected + other.astype(np.float64) / (1 + np.exp(-gate) if shared == "gated" else 1)
    if accumulate:
        expected = expected + out.astype(np.float64)
    found = ops.combine_experts(
        tensor(x),
        routed,
        tensor(out.copy()),
        shared=None if shared == "none" else tensor(other),
        shared_gate=tensor(gate) if shared == "gated" else None,
        accumulate=accumulate,
    )
    assert_close(found.numpy(), expected, dtype)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_sinks_take_a_share_of_the_softmax(dtype: np.dtype[Any], window: int | None) -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 40), (7, 33), (1, 3)), dtype=dtype, sliding_window=window))
    keys, values = inputs.caches(CPU)
    num_heads = inputs.q.shape[1] // keys.shape[3]
    sinks = random_array(8, (num_heads,), dtype, 2.0)
    found = ops.paged_attention(
        tensor(inputs.q),
        keys,
        values,
        inputs.metadata(CPU),
        scale=inputs.case.scale,
        sliding_window=window,
        sinks=tensor(sinks),
    )
    places = (inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.cu_seqlens_q, inputs.context_lens)
    expected = reference.paged_attention(inputs.q, *places, inputs.case.scale, window, sinks=sinks)
    assert_close(found.numpy(), expected, dtype)


def test_attention_has_a_soft_cap_or_sinks() -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 3),)))
    keys, values = inputs.caches(CPU)
    sinks = tensor(random_array(8, (inputs.q.shape[1] // keys.shape[3],)))
    with pytest.raises(TesseraError, match="either a soft cap or sinks"):
        ops.paged_attention(tensor(inputs.q), keys, values, inputs.metadata(CPU), scale=1.0, soft_cap=3.0, sinks=sinks)


WRONG: dict[str, Any] = {
    "more experts than there are": lambda t: ops.route(t["logits"], Routing("softmax", 9), t["routed"]),
    "logits of another dtype": lambda t: ops.route(t["half"], Routing("softmax", 2), t["routed"]),
    "a bias of another length": lambda t: ops.route(t["logits"], Routing("softmax", 2), t["routed"], bias=t["short"]),
    "groups that do not divide": lambda t: ops.route(t["logits"], Routing("sigmoid", 2, groups=3), t["routed"]),
    "weights of other experts": lambda t: ops.expert_down(t["rows"], t["odd"], t["routed"], t["out"]),
    "another number of rows": lambda t: ops.expert_down(t["few"], t["weight"], t["routed"], t["out"]),
    "a gate without a shared expert": lambda t: ops.combine_experts(
        t["out"], t["routed"], t["few"], shared_gate=t["gate"]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_refused(name: str) -> None:
    def of(*shape: int, dtype: np.dtype[Any] = float32) -> Tensor:
        return tensor(np.zeros(shape, dtype))

    tensors: dict[str, Any] = {
        "logits": of(3, 8),
        "half": of(3, 8, dtype=bfloat16),
        "routed": Routed(of(3, 2, dtype=int32), of(3, 2), of(9, dtype=int32), *[of(6, dtype=int32)] * 2),
        "short": of(7),
        "rows": of(6, 4),
        "few": of(3, 4),
        "weight": LinearWeight.of(of(8 * 4, 4)),
        "odd": LinearWeight.of(of(8 * 4 + 1, 4)),
        "out": of(6, 4),
        "gate": of(3, 1),
    }
    with pytest.raises(TesseraError):
        WRONG[name](tensors)
