"""What the matrix products and attention would launch, on a device that only writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER
from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.cuda import CudaOps, attention, elementwise, linear
from tessera.engine.ops.cuda.attention import decode as attention_decode
from tessera.engine.ops.cuda.attention import division as divisions
from tessera.engine.ops.cuda.attention import general, memory, prefill, whole_rope
from tessera.engine.ops.cuda.attention.ops import NO_WINDOW
from tessera.engine.ops.cuda.attention.problem import CAPPED_HEAD_DIMS
from tessera.engine.ops.cuda.linear import decode, gemv, portable
from tessera.engine.ops.cuda.linear.problem import GELU_GATE
from tessera.engine.ops.cuda.registry import OF_DRAFTS, OF_RARE_OPS, all_instantiations
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, ceil_div
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import (
    Buffer,
    Tensor,
    bfloat16,
    empty,
    float16,
    float32,
    uint8,
)
from tests.cuda.launches.written import WritingDevice, attention_step, check_launch
from tests.gpu.ops.shapes import FUSED_ROWS, FUSED_SHAPES, NUM_ROWS, WIDTHS
from tests.support.cases.linear_calls import norm_product, norm_product_silu_mul, product_silu_mul

SEED = 20261121


@pytest.mark.parametrize(("dtype", "name"), [(float32, "float"), (float16, "__half"), (bfloat16, "__nv_bfloat16")])
def test_every_matmul_is_compiled_ahead_and_covers_its_result(dtype: np.dtype[np.generic], name: str) -> None:
    compiled = set(linear.instantiations((name,)))
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    sides = [1, 2, 3, 4, 5, 16, 17, 64, 100, 128, 129, 256, 1024, 8192, 28672, 151936]
    for _ in range(400):
        num_rows, out_features = (int(side) for side in rng.choice(sides, 2))
        in_features = int(rng.choice([1, 7, 8, 64, 100, 1024, 14336]))
        device = WritingDevice(int(rng.choice([24, 84, 132, 170])), clusters=bool(rng.random() < 0.5))
        ops = CudaOps(device)  # type: ignore[arg-type]
        x, weight = empty((num_rows, in_features), dtype, device), empty((out_features, in_features), dtype, device)
        out = empty((num_rows, out_features), dtype if rng.random() < 0.5 else float32, device)
        ops.matmul(x, weight, None, out)
        (launch,) = device.launches
        check_launch(launch, compiled, device.max_shared_bytes)
        sizes = dict(zip(launch.spec.template, launch.template, strict=True))
        if launch.spec in (portable.MATMUL, portable.MATMUL_SPLIT):
            splits = int(sizes.get("SPLITS", "1"))
            assert launch.config.grid[0] % splits == 0
            covered = launch.config.grid[0] // splits * int(sizes["TILE_M"]) * int(sizes["TILE_N"])
            assert covered >= num_rows * out_features
            assert (sizes.get("ALIGNED", "true") == "true") == (in_features % 8 == 0 and out_features % 2 == 0)
            assert splits == 1 or device.compute_capability >= (9, 0), "clusters need sm_90"
        elif launch.spec is decode.MATMUL_DECODE:
            assert num_rows <= int(sizes["TOKENS"])
            assert launch.config.grid[0] <= ceil_div(out_features, 8), "a block without work"
        elif launch.spec is gemv.MATVEC:
            assert num_rows <= int(launch.template[2])
            assert launch.config.grid[0] * gemv.MATVEC_WARPS >= out_features * launch.params.warps_per_output


def test_unaligned_inputs_take_the_kernel_without_wide_copies() -> None:
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]
    x = Tensor(Buffer(device, 1 << 20, 4096, None), (8, 64), bfloat16, offset=2)
    ops.matmul(x, empty((64, 64), bfloat16, device))
    assert device.launches[0].template[-1] == "false"


def test_order_of_sums_for_a_few_rows_does_not_depend_on_their_number() -> None:
    orders = set()
    for num_rows in range(1, gemv.MATVEC_ROWS[-1] + 1):
        device = WritingDevice()
        CudaOps(device).matmul(  # type: ignore[arg-type]
            empty((num_rows, 4096), float32, device), empty((1024, 4096), float32, device)
        )
        (launch,) = device.launches
        orders.add((launch.spec.name, launch.config.grid, launch.params.warps_per_output))
    assert len(orders) == 1


@pytest.mark.parametrize("dtype", [bfloat16, float16])
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
def test_norm_product_activation_and_residual_of_a_decode_step_are_few_kernels(
    num_rows: int, clusters: bool, dtype: np.dtype[np.generic]
) -> None:
    compiled = set(linear.instantiations((C_TYPE_NAMES[dtype],)))
    device = WritingDevice(clusters=clusters)
    ops = CudaOps(device)  # type: ignore[arg-type]
    x, norm, normed = (empty(shape, dtype, device) for shape in ((num_rows, 1024), (1024,), (num_rows, 1024)))
    up, gate_up = empty((6144, 1024), dtype, device), empty((num_rows, 6144), dtype, device)
    activated = norm_product_silu_mul(ops, x, norm, 1e-6, up, normed=normed, gate_up=gate_up)
    norm_product(ops, x, norm, 1e-6, up, normed=normed, out=empty((num_rows, 6144), float32, device))
    ops.matmul(activated, empty((1024, 3072), dtype, device), out=x, accumulate=True)
    products = [launch for launch in device.launches if launch.spec is decode.MATMUL_DECODE]
    for launch in products:
        check_launch(launch, compiled, device.max_shared_bytes)
    if clusters or num_rows <= 8:  # else two stages of 16 rows do not fit into shared memory
        assert len(products) == 3
        norms = 0 if num_rows == 1 or dtype == bfloat16 else 2
        assert len(device.launches) == 3 + norms, "only several rows of float16 are normalised beforehand"


def gated_by_gelu(ops: CudaOps, num_rows: int, width: int, features: int) -> None:
    x, norm, normed = (empty(shape, bfloat16, ops.device) for shape in ((num_rows, width), (width,), (num_rows, width)))
    weight, gate_up = (
        empty(shape, bfloat16, ops.device) for shape in ((2 * features, width), (num_rows, 2 * features))
    )
    scratch = {"normed": normed, "gate_up": gate_up}
    norm_product_silu_mul(ops, x, norm, 1e-6, weight, function="gelu_tanh_mul", **scratch)


def names_of(device: WritingDevice) -> list[str]:
    return [launch.spec.name for launch in device.launches]


@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
def test_a_gate_with_gelu_is_part_of_the_product(num_rows: int) -> None:
    device = WritingDevice(clusters=True)
    gated_by_gelu(CudaOps(device), num_rows, 2560, 10240)  # type: ignore[arg-type]
    (launch,) = device.launches
    assert launch.spec is decode.MATMUL_DECODE
    assert launch.params.gated == GELU_GATE
    check_launch(launch, set(linear.instantiations((C_TYPE_NAMES[bfloat16],))), device.max_shared_bytes)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_in_order_a_gate_with_gelu_follows_the_product(num_rows: int) -> None:
    device = WritingDevice(clusters=True)
    gated_by_gelu(CudaOps(device, batch_invariant=True), num_rows, 2560, 10240)  # type: ignore[arg-type]
    assert names_of(device) == ["rmsnorm_kernel", "ordered_matmul_kernel", "gelu_mul_kernel"]


def test_a_long_row_stays_in_shared_memory() -> None:
    device = WritingDevice(clusters=True)
    ops = CudaOps(device)  # type: ignore[arg-type]
    for width in (decode.MAX_RESIDENT_FEATURES, decode.MAX_RESIDENT_FEATURES + 8):
        ops.matmul(empty((1, width), bfloat16, device), empty((2560, width), bfloat16, device))
    tokens = decode.MATMUL_DECODE.template.index("TOKENS")
    assert [launch.template[tokens] for launch in device.launches] == ["1", "8"]


def test_the_tests_on_a_gpu_run_every_variant_of_a_decode_product() -> None:
    """On the device that the figures are from: which one runs follows from the sizes."""
    device = WritingDevice(clusters=True)
    ops = CudaOps(device)  # type: ignore[arg-type]

    def tensor(*shape: int, dtype: np.dtype[np.generic] = bfloat16) -> Tensor:
        return empty(shape, dtype, device)

    for k, n, m in product(WIDTHS, WIDTHS, NUM_ROWS):
        for dtype in (bfloat16, float32):
            ops.matmul(tensor(m, k), tensor(n, k), out=tensor(m, n, dtype=dtype))
    for (k, n), m in product(FUSED_SHAPES, FUSED_ROWS):
        x, norm, weight, gate_up = tensor(m, k), tensor(k), tensor(n, k), tensor(m, n)
        norm_product(ops, x, norm, 1e-5, weight, normed=x, out=gate_up)
        norm_product(ops, x, norm, 1e-5, weight, normed=x, out=tensor(m, n, dtype=float32))
        product_silu_mul(ops, x, weight, gate_up=gate_up)
        norm_product_silu_mul(ops, x, norm, 1e-5, weight, normed=x, gate_up=gate_up)
    run = {launch.template for launch in device.launches if launch.spec is decode.MATMUL_DECODE}
    assert run == {template for _, template in decode.instantiations((C_TYPE_NAMES[bfloat16],))}


def test_wide_tiles_for_many_rows_and_flat_ones_for_few() -> None:
    assert portable.choose_tile(8192, 4096, 132) is portable.LARGE
    assert portable.choose_tile(64, 4096, 132) is portable.NARROW
    assert portable.choose_tile(20, 4096, 132).m == 32
    assert portable.choose_tile(256, 1024, 132).blocks(256, 1024) >= 64, "half of the device must not idle"


@pytest.mark.parametrize("num_rows", [17, 32, 33, 64])
@pytest.mark.parametrize("out_features", [1024, 4096, 6144, 28672])
def test_few_rows_find_work_for_every_multiprocessor(num_rows: int, out_features: int) -> None:
    tile, splits = portable.choose_split_tile(num_rows, out_features, 132)
    assert tile.blocks(num_rows, out_features) * splits >= 128


@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_every_attention_launch_is_compiled_ahead(head_dim: int, dtype: np.dtype[np.generic]) -> None:
    compiled = set(attention.instantiations(("float" if dtype == float32 else "__nv_bfloat16",)))
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]
    for query_lens, context_lens in (([1, 1], [5, 4000]), ([300, 1], [300, 9]), ([1], [0])):
        q, cache, metadata = attention_step(device, query_lens, context_lens, 8, 2, head_dim)
        q, cache = empty(q.shape, dtype, device), empty(cache.shape, dtype, device)
        ops.paged_attention(q, cache, cache, metadata, scale=0.1)
        ops.rope_and_store(
            empty((2, 12 * head_dim), dtype, device), cache, cache, metadata_of(device), HeadTransform(), num_heads=8
        )
    for launch in device.launches:
        check_launch(launch, compiled)
    used = {launch.spec for launch in device.launches}
    on_tensor_cores = dtype == bfloat16 and head_dim in prefill.HEAD_SHAPES
    assert (attention_decode.PAGED_ATTENTION_DECODE in used) == on_tensor_cores
    assert (general.PAGED_ATTENTION in used) != on_tensor_cores


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_a_soft_cap_has_kernels_of_its_own(head_dim: int, dtype: np.dtype[np.generic]) -> None:
    compiled = set(attention.instantiations(("float" if dtype == float32 else "__nv_bfloat16",)))
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]
    for query_lens, context_lens in (([1, 1], [5, 4000]), ([300, 1], [300, 9]), ([1], [0])):
        q, cache, metadata = attention_step(device, query_lens, context_lens, 8, 2, head_dim)
        q, cache = empty(q.shape, dtype, device), empty(cache.shape, dtype, device)
        ops.paged_attention(q, cache, cache, metadata, scale=0.1, soft_cap=30.0)
    for launch in device.launches:
        check_launch(launch, compiled)
    on_tensor_cores = {attention_decode.CAPPED_ATTENTION_DECODE, prefill.CAPPED_PREFILL}
    fits = dtype == bfloat16 and head_dim in CAPPED_HEAD_DIMS
    assert {launch.spec for launch in device.launches} == (on_tensor_cores if fits else {general.CAPPED_ATTENTION})


@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sinks_have_kernels_of_their_own(head_dim: int, batch_invariant: bool) -> None:
    compiled = set(attention.instantiations(("__nv_bfloat16",)))
    device = WritingDevice()
    ops = CudaOps(device, batch_invariant=batch_invariant)  # type: ignore[arg-type]
    sinks = empty((8,), bfloat16, device)
    for query_lens, context_lens in (([1, 1], [5, 4000]), ([300, 1], [300, 9]), ([1], [0])):
        q, cache, metadata = attention_step(device, query_lens, context_lens, 8, 2, head_dim)
        ops.paged_attention(q, cache, cache, metadata, scale=0.1, sinks=sinks)
    for launch in device.launches:
        check_launch(launch, compiled)
    assert {launch.spec for launch in device.launches} <= set(OF_RARE_OPS["sinks"])
    assert (general.SINK_ATTENTION in {launch.spec for launch in device.launches}) == (head_dim == 20)


def metadata_of(device: WritingDevice) -> AttentionMetadata:
    return attention_step(device, [2], [2], 8, 2, 64)[2]


def test_prefill_grid_has_a_block_for_every_tile() -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    for shape in prefill.HEAD_SHAPES.values():
        for _ in range(300):
            num_kv_heads, group = int(rng.integers(1, 5)), int(rng.integers(1, 9))
            query_lens = rng.integers(0, 400, int(rng.integers(1, 9)))
            tiles = sum(-(-int(count) * group // shape.tile_rows) for count in query_lens if count > 1)
            num_tokens, num_seqs = int(query_lens.sum()), len(query_lens)
            config = prefill.prefill_config(shape, num_tokens, num_seqs, group * num_kv_heads, num_kv_heads)
            assert tiles <= config.grid[0] <= tiles + num_seqs + 1
            assert config.grid[1] == num_kv_heads


def splits_of_row(context_len: int, window: int, division: divisions.Division, all_keys: int = 0) -> int:
    """As `find_row_splits` in attention/decode_splits.cuh counts them beside others, `all_keys` together."""
    warp_keys, split_keys = divisions.WARP_KEYS, divisions.SPLIT_KEYS
    num_keys = context_len - max(context_len - window, 0) // warp_keys * warp_keys
    units = ceil_div(ceil_div(num_keys, split_keys), division.even_splits)
    limit = division.max_split_keys
    if division.helpers and num_keys > division.even_splits * limit:
        share = ceil_div(all_keys + all_keys // 16, division.helpers * division.even_splits)
        limit = max(limit, ceil_div(share, split_keys) * split_keys)
    if units * split_keys > limit:
        units = ceil_div(units, ceil_div(units * split_keys, limit))
    size = max(units * split_keys, division.min_split_keys)
    if num_keys > size * division.max_splits:
        size = ceil_div(ceil_div(num_keys, division.max_splits), split_keys) * split_keys
    return max(ceil_div(num_keys, size), 1)


@pytest.mark.parametrize("window", [NO_WINDOW, 1, 250, 600, 4096])
@pytest.mark.parametrize("max_splits", [1, 8, 31, 32])
@pytest.mark.parametrize("num_seqs", [1, 5, 16, 64])
@pytest.mark.parametrize("in_order", [False, True], ids=["", "in order"])
def test_no_row_has_more_splits_than_said(window: int, max_splits: int, num_seqs: int, in_order: bool) -> None:
    for longest in (0, 1, 64, 65, 2048, 5000, 8192, 131072):
        division = divisions.divide(
            num_seqs, 8, longest, window, max_splits, 396, clusters=True, in_order=in_order, e4m3=num_seqs == 64
        )
        splits = divisions.decode_splits(longest, window, division)
        for context_len in {*range(0, longest, max(longest // 97, 1)), longest}:
            assert splits_of_row(context_len, window, division) <= splits


def test_a_decode_step_is_one_launch() -> None:
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]
    for query_lens, launches in (([1, 1, 1], 1), ([1, 2], 3)):
        q, cache, metadata = attention_step(device, query_lens, [500] * len(query_lens), 8, 2, 128)
        qkv = empty((q.shape[0], 12 * 128), bfloat16, device)
        device.launches.clear()
        ops.attention(qkv, cache, cache, metadata, HeadTransform(), num_heads=8, scale=0.1, queries=q)
        assert len(device.launches) == launches
    for launch in device.launches:
        check_launch(launch, set(attention.instantiations(("__nv_bfloat16",))))


@pytest.mark.parametrize("cached", [bfloat16, uint8], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (8, 1), (128, 128)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_whole_heads_of_many_tokens_are_compiled_ahead_and_all_have_lanes(
    head_dim: int, num_heads: int, num_kv_heads: int, cached: np.dtype[Any]
) -> None:
    compiled = set(attention.instantiations(("__nv_bfloat16",)))
    heads = num_heads + 2 * num_kv_heads
    for num_tokens, rotary_dim, normed in product((1, 8192 // heads, 8192), (head_dim // 2, head_dim), (False, True)):
        device = WritingDevice(arch="90a")
        q, cache, metadata = attention_step(device, [num_tokens], [num_tokens], num_heads, num_kv_heads, head_dim)
        cache = empty(cache.shape, cached, device)
        norm = empty((head_dim,), bfloat16, device) if normed else None
        transform = HeadTransform(empty((num_tokens, rotary_dim), float32, device), norm, norm)
        qkv = empty((num_tokens, heads * head_dim), bfloat16, device)
        ops = CudaOps(device)  # type: ignore[arg-type]
        ops.rope_and_store(qkv, cache, cache, metadata, transform, num_heads=num_heads, out=q)
        (launch,) = device.launches
        check_launch(launch, compiled)
        is_whole = num_tokens == 8192 and rotary_dim == head_dim and head_dim in whole_rope.HEAD_DIMS
        assert (launch.spec.name == "whole_rope_and_store_kernel") == is_whole
        if is_whole:
            tokens, parts, _ = launch.config.grid
            teams = launch.config.block[0] // (head_dim // 16)
            assert tokens == num_tokens
            assert parts * teams * whole_rope.TEAM_HEADS >= heads
            assert launch.config.block[0] <= 32 * whole_rope.MOST_WARPS


def test_block_tables_are_written_before_attention_may_read_ahead() -> None:
    """A recorded step changes tables in its first kernel, and attention looks at them before it waits."""
    assert attention_decode.PAGED_ATTENTION_DECODE.overlaps
    assert not elementwise.SCATTER.overlaps
    assert elementwise.EMBEDDING.overlaps
    second = (SOURCE_FOLDER / elementwise.EMBEDDING.file).read_text()
    assert second.index("wait_for_earlier_kernels()") < second.index("let_next_kernel_start()")


def test_few_rows_in_order_have_a_block_for_each_split_and_many_share() -> None:
    assert divisions.splits_per_block(1, 8) == 1
    counts = [divisions.splits_per_block(rows, 8) for rows in (1, 16, 64, 256, 4096)]
    assert counts == sorted(counts)
    assert counts[-1] == memory.MAX_SPLITS
    shape = attention_decode.DECODE_SHAPES[128]
    for block_splits in counts:
        division = divisions.Division(1, 32, 128, divisions.NO_LIMIT, 32, block_splits)
        blocks = attention_decode.decode_config(shape, 5, 16, 8, 31, division).grid[2]
        assert (blocks - 1) * block_splits < 31 <= blocks * block_splits


@pytest.mark.parametrize(("row_groups", "blocks"), [(16, 24), (128, 3), (224, 3), (256, 3), (396, 1), (1000, 1)])
def test_blocks_of_all_rows_nearly_fill_the_device(row_groups: int, blocks: int) -> None:
    """Once or some whole number of times, of 396 that it has room for."""
    assert divisions.blocks_per_row(row_groups, 396) == blocks
    rounds = row_groups * blocks / 396
    assert rounds / -(-rounds // 1) >= divisions.FULL_ENOUGH


def test_one_long_row_among_short_ones_has_many_blocks() -> None:
    """Else all would wait for the few blocks that a short row has."""
    division = divisions.divide(16, 8, 131072, NO_WINDOW, 32, 396, clusters=True)
    beside = {keys: splits_of_row(keys, NO_WINDOW, division, keys + 15 * 600) for keys in (100, 600, 12000, 100000)}
    assert beside == {100: 1, 600: 3, 12000: 3, 100000: 24}
    assert splits_of_row(100000, NO_WINDOW, division, 16 * 100000) == 3, "all are so long"


@pytest.mark.parametrize("num_seqs", [2, 5, 16, 33, 64, 128, 256, 700])
@pytest.mark.parametrize("at_once", [128, 396, 528, 792])
def test_long_rows_have_no_more_splits_than_there_are_helpers(num_seqs: int, at_once: int) -> None:
    random = np.random.default_rng(num_seqs * at_once)
    division = divisions.divide(num_seqs, 8, 1 << 20, NO_WINDOW, 32, at_once, clusters=True)
    assert division.helpers or division.even_splits == 32
    for _ in range(50):
        lengths = random.integers(0, 1000, num_seqs)
        for longest in (5000, 50000, 1 << 20):
            long_rows = random.random(num_seqs) < random.random() ** 4
            lengths = np.where(long_rows, random.integers(1, longest, num_seqs), lengths)
        all_keys = int(lengths.sum())
        splits = (splits_of_row(keys, NO_WINDOW, division, all_keys) for keys in lengths.tolist())
        extra = sum(max(count - division.even_splits, 0) for count in splits)
        assert extra <= division.helpers * division.even_splits, lengths.tolist()


@pytest.mark.parametrize("cached", [bfloat16, uint8], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (8, 1), (12, 1), (4, 4)])
def test_every_decode_step_is_compiled_ahead_and_has_its_blocks(
    num_heads: int, num_kv_heads: int, clusters: bool, cached: np.dtype[Any]
) -> None:
    compiled = set(attention.instantiations(("__nv_bfloat16",)))
    found = set()
    for head_dim in attention_decode.DECODE_SHAPES:
        for num_seqs in (1, 2, 9, 16, 17, 40, 200):
            for longest in (40, 2048, 2049, 9000):
                device = WritingDevice(clusters=clusters)
                q, cache, metadata = attention_step(
                    device, [1] * num_seqs, [longest] * num_seqs, num_heads, num_kv_heads, head_dim
                )
                cache = empty(cache.shape, cached, device)
                qkv = empty((num_seqs, (num_heads + 2 * num_kv_heads) * head_dim), bfloat16, device)
                ops = CudaOps(device)  # type: ignore[arg-type]
                ops.attention(qkv, cache, cache, metadata, HeadTransform(), num_heads=num_heads, scale=0.1, queries=q)
                (launch,) = device.launches
                check_launch(launch, compiled, device.max_shared_bytes)
                x, y, z = launch.config.grid
                groups = attention_decode.head_groups(num_heads, num_kv_heads)
                found.add(launch.config.cluster)
                assert x == groups * launch.config.cluster
                assert y == num_seqs or (y > num_seqs > 1 and longest > SHORT_CONTEXT), "helpers for long rows"
                assert z == 1 or launch.config.cluster == 1
                assert launch.config.cluster == 1 or longest <= SHORT_CONTEXT
    assert found >= {1, divisions.ONE_ROW_BLOCKS} if clusters else found == {1}


def test_decode_grid_depends_on_the_maxima_alone() -> None:
    grids = set()
    for context_lens in ([1000, 3], [1000, 1000], [7, 1000]):
        device = WritingDevice()
        q, cache, metadata = attention_step(device, [1, 1], context_lens, 8, 2, 128)
        CudaOps(device).paged_attention(q, cache, cache, metadata, scale=0.1)  # type: ignore[arg-type]
        grids.add(tuple(launch.config for launch in device.launches))
    assert len(grids) == 1


def test_nothing_is_allocated_after_reserving() -> None:
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.reserve_attention(64, 32, 128)
    reserved = list(device.allocated)
    assert 0 < sum(reserved) <= memory.RESERVED_BYTES + 64 * 32 * 4
    for num_seqs, context_len in ((1, 131072), (64, 131072), (3, 17)):
        q, cache, metadata = attention_step(device, [1] * num_seqs, [context_len] * num_seqs, 32, 8, 128)
        device.allocated.clear()
        ops.paged_attention(q, cache, cache, metadata, scale=0.1, out=q)
        ops.attention(
            empty((num_seqs, 48 * 128), bfloat16, device),
            cache,
            cache,
            metadata,
            HeadTransform(),
            num_heads=32,
            scale=0.1,
            queries=q,
            out=q,
        )
        assert device.allocated == [num_seqs * 48 * 128 * 2], "more than qkv itself"


def test_what_was_recorded_keeps_its_memory() -> None:
    """A graph replays with the addresses of its recording, and its counters were cleared before that."""
    device = WritingDevice()
    ops = CudaOps(device)  # type: ignore[arg-type]

    def attend(num_seqs: int) -> None:
        q, cache, metadata = attention_step(device, [1] * num_seqs, [300] * num_seqs, 32, 8, 128)
        ops.paged_attention(q, cache, cache, metadata, scale=0.1, out=q)

    ops.reserve_attention(64, 32, 128)
    reserved = {ops.attention_memory.partials, ops.attention_memory.arrivals}
    device.is_capturing = True
    attend(64)
    with pytest.raises(AssertionError, match="reserve_attention comes before a capture"):
        attend(65)
    device.is_capturing = False
    attend(65)
    assert reserved <= set(ops.attention_memory.replaced), "the graph's memory has been given back"


def test_partial_results_fit_even_for_very_many_sequences() -> None:
    assert memory.reserved_splits(1, 1, 64) == memory.MAX_SPLITS
    assert memory.reserved_splits(4096, 64, 128) == memory.MIN_RESERVED_SPLITS


@pytest.mark.parametrize("e4m3", [False, True], ids=["16 bits", "e4m3"])
def test_kernels_of_rare_operations_are_compiled_for_models_that_have_them(e4m3: bool) -> None:
    """And of attention those for the type of the cache alone."""

    class CompilingDevice(WritingDevice):
        def compile(self, pairs: Sequence[Instantiation], progress: object) -> None:
            self.compiled = {spec for spec, _ in pairs}

    device = CompilingDevice(arch="90a")
    ops = CudaOps(device)  # type: ignore[arg-type]
    others = set(attention.OF_E4M3 if e4m3 else attention.OF_E4M3.values())  # for the other cache
    ops.compile(bfloat16, head_dims={128}, e4m3_cache=e4m3)
    usual = device.compiled
    assert not (others | {spec for specs in OF_RARE_OPS.values() for spec in specs}) & usual
    ops.compile(bfloat16, head_dims={128}, rare_ops={"soft_cap", "relu"}, e4m3_cache=e4m3)
    expected = {spec for op in ("soft_cap", "relu") for spec in OF_RARE_OPS[op] if not spec.batch_invariant}
    assert device.compiled - usual == expected - others - set(OF_DRAFTS)


def test_a_model_compiles_attention_for_its_own_head_size_only() -> None:
    every = all_instantiations(("__nv_bfloat16",))
    own = all_instantiations(("__nv_bfloat16",), head_dims={128})
    sizes = {template[spec.template.index("HEAD_DIM")] for spec, template in own if "HEAD_DIM" in spec.template}
    assert sizes == {"128"}
    assert [pair for pair in own if "HEAD_DIM" not in pair[0].template] == [
        pair for pair in every if "HEAD_DIM" not in pair[0].template
    ]
    none_fits = all_instantiations(("__nv_bfloat16",), head_dims={72})
    assert not [pair for pair in none_fits if "HEAD_DIM" in pair[0].template]
