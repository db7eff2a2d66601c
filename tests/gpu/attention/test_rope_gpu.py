"""CUDA rotary embedding and KV store against the NumPy implementation; slots without a token are NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import rope, whole_rope
from tessera.engine.ops.cuda.attention.problem import E4M3_ARCH
from tessera.engine.ops.interface import HeadTransform, Ops
from tessera.engine.tensor import Device, Tensor, bfloat16, float16, float32, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.support.cases.op_cases import DTYPES, AttentionCase, AttentionInputs, poisoned, random_angles, random_array
from tests.support.references.reference import assert_close, assert_same_cache

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rope_and_store(
    ops: Ops, inputs: AttentionInputs, qkv: Array, cos_sin: Array | None, norms: dict[str, Array]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, key cache and value cache."""
    device: Device = ops.device
    key_cache, value_cache = inputs.caches(device)
    out = poisoned(inputs.q.shape, inputs.q.dtype, device)
    uploaded: dict[str, Any] = {name: from_numpy(weight, device) for name, weight in norms.items()}
    device_qkv, metadata = from_numpy(qkv, device), inputs.metadata(device)
    transform = HeadTransform(None if cos_sin is None else from_numpy(cos_sin, device), **uploaded)
    heads = inputs.case.num_heads
    ops.rope_and_store(device_qkv, key_cache, value_cache, metadata, transform, num_heads=heads, out=out)
    return out, key_cache, value_cache


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        *((8, 8), (16, None), (16, 6), (20, 20), (64, 64), (64, 16), (80, 32)),
        *((96, None), (128, 128), (256, 256), (256, 90)),
    ],
)
@pytest.mark.parametrize("norms", ["", "q", "qk"])
@pytest.mark.parametrize(("heads", "most_warps"), [((6, 2), 8192), ((20, 10), 64)], ids=str)
def test_rope_and_store(
    heads: tuple[int, int],
    most_warps: int,
    norms: str,
    head_dim: int,
    rotary_dim: int | None,
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "ROPE_MOST_WARPS", most_warps)  # with more, each takes several heads
    rows = ((4, 37), (7, 7), (1, 55), (1, 0))
    case = AttentionCase("", rows, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype)
    inputs = AttentionInputs(case)
    inputs.slot_mapping[[2, 9]] = -1
    qkv = random_array(15, (len(inputs.q), (case.num_heads + 2 * case.num_kv_heads) * head_dim), dtype)
    cos_sin = None
    if rotary_dim is not None:
        angles = np.random.default_rng(16).uniform(-3, 3, (60, rotary_dim // 2))
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    weights = {f"{name}_norm": random_array(17, (head_dim,), dtype) for name in norms}

    expected = rope_and_store(cpu_ops, inputs, qkv, cos_sin, weights)
    actual = rope_and_store(cuda_ops, inputs, qkv, cos_sin, weights)
    assert_close(actual[0].numpy(), expected[0].numpy(), dtype)
    for actual_cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        assert_same_cache(actual_cache.numpy(), expected_cache.numpy(), dtype)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", whole_rope.HEAD_DIMS)
@pytest.mark.parametrize("norms", ["", "q", "qk"])
@pytest.mark.parametrize("cache", ["16 bits", "e4m3", "e4m3 with scales"])
@pytest.mark.parametrize("heads", [(6, 2), (32, 8), (5, 5), (80, 80)], ids=str)
def test_whole_heads_have_the_bits_of_parts(
    heads: tuple[int, int],
    cache: str,
    norms: str,
    head_dim: int,
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = cuda_ops.device
    if cache != "16 bits" and int(device.arch.rstrip("a")) < E4M3_ARCH:
        pytest.skip("its GPU does not convert e4m3")
    num_heads, num_kv_heads = heads
    rows = ((4, 37), (7, 7), (1, 55))
    case = AttentionCase("", rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    inputs = AttentionInputs(case)
    inputs.slot_mapping[[2, 9]] = -1
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = from_numpy(random_array(15, (len(inputs.q), width), dtype), device)
    weights: dict[str, Any] = {
        f"{name}_norm": from_numpy(random_array(17, (head_dim,), dtype), device) for name in norms
    }
    transform = HeadTransform(from_numpy(random_angles(60, head_dim), device), **weights)
    scales = None
    if cache == "e4m3 with scales":
        scales = from_numpy(random_array(18, (2, num_kv_heads), float32) ** 2 + np.float32(0.5), device)
    results = []
    for most_warps in (1 << 30, 1):
        monkeypatch.setattr(rope, "ROPE_MOST_WARPS", most_warps)
        keys, values = inputs.caches(device)
        if cache != "16 bits":
            keys, values = (from_numpy(np.full(keys.shape, 0x7F, np.uint8), device) for _ in range(2))
        out = poisoned(inputs.q.shape, dtype, device)
        metadata = inputs.metadata(device)
        cuda_ops.rope_and_store(qkv, keys, values, metadata, transform, num_heads=num_heads, kv_scales=scales, out=out)
        results.append([tensor.numpy().view(np.uint8) for tensor in (out, keys, values)])
    for parts, whole in zip(*results, strict=True):
        np.testing.assert_array_equal(parts, whole)


def test_rope_and_store_copies_nothing_between_host_and_device(cuda_ops: CudaOps, no_transfers: NoTransfers) -> None:
    inputs = AttentionInputs(AttentionCase("", ((4, 37), (1, 9)), dtype=bfloat16))
    caches, metadata = inputs.caches(cuda_ops.device), inputs.metadata(cuda_ops.device)
    qkv = from_numpy(random_array(18, (5, 8 * 16), bfloat16), cuda_ops.device)
    with no_transfers():
        cuda_ops.rope_and_store(qkv, *caches, metadata, HeadTransform(), num_heads=4)


def test_rope_and_store_of_nothing(cuda_ops: CudaOps) -> None:
    caches = AttentionInputs(AttentionCase("", ((1, 1),))).caches(cuda_ops.device)
    metadata = AttentionInputs(AttentionCase("", ())).metadata(cuda_ops.device)
    qkv = from_numpy(random_array(1, (0, 8 * 16)), cuda_ops.device)
    assert cuda_ops.rope_and_store(qkv, *caches, metadata, HeadTransform(), num_heads=4).shape == (0, 64)


@dtypes
@pytest.mark.parametrize(("head_dim", "rotary_dim", "heads"), [(16, 16, 5), (20, 6, 3), (128, 128, 40)])
def test_rotation_in_place(
    head_dim: int, rotary_dim: int, heads: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    qkv, cos_sin = random_array(2, (7, (heads + 4) * head_dim), dtype), random_angles(50, rotary_dim)
    positions = np.random.default_rng(3).integers(0, 50, 7).astype(np.int32)
    actual, expected = (
        ops.rotate(
            *(from_numpy(array, ops.device) for array in (qkv, cos_sin, positions)), num_heads=heads, head_dim=head_dim
        ).numpy()
        for ops in (cuda_ops, cpu_ops)
    )
    assert_close(actual, expected, dtype)
