"""What attention of tokens with drafts would launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig, P
from tessera.engine.ops.cuda import CudaOps, attention
from tessera.engine.ops.cuda.attention import decode, drafts
from tessera.engine.ops.cuda.registry import OF_DRAFTS
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Buffer, bfloat16, int32, uint8
from tests.cuda.choices import DEVICES, GridDevice

HEADS = ((32, 8), (16, 8), (12, 1), (6, 2), (8, 8), (64, 8))


class WatchingDevice(GridDevice):
    def __init__(self, name: str) -> None:
        super().__init__(*DEVICES[name])
        self.launched: list[tuple[KernelSpec[Any], tuple[str, ...], LaunchConfig, Any]] = []
        self.allocated = 0
        self.compiled: set[KernelSpec[Any]] = set()

    def allocate(self, nbytes: int) -> Buffer:
        self.allocated += nbytes
        return super().allocate(nbytes)

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        self.launched.append((spec, template, config, params))

    def compile(self, pairs: Sequence[Instantiation], progress: object) -> None:
        self.compiled = {spec for spec, _ in pairs}


def attend(
    ops: CudaOps, device: WatchingDevice, queries: int, rows: int, heads: tuple[int, int], head_dim: int, **around: Any
) -> None:
    """A step whose graph has room for a row a token."""
    tokens, (num_heads, num_kv_heads) = queries * rows, heads
    metadata = AttentionMetadata(
        positions=device.tensor(tokens, dtype=int32),
        slot_mapping=device.tensor(tokens, dtype=int32),
        block_tables=device.tensor(64, 512, dtype=int32),
        table_rows=device.tensor(tokens, dtype=int32),
        cu_seqlens_q=device.tensor(tokens + 1, dtype=int32),
        context_lens=device.tensor(tokens, dtype=int32),
        max_seqlen_q=queries,
        max_context_len=8192,
        verifies=True,
    )
    cache = device.tensor(4096, num_kv_heads, 16, head_dim, dtype=around.pop("cached", bfloat16))
    qkv = device.tensor(tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    out = device.tensor(tokens, num_heads * head_dim)
    device.launched.clear()
    around |= {"num_heads": num_heads, "scale": 0.1, "queries": out, "out": out}
    ops.attention(qkv, cache, cache, metadata, HeadTransform(), **around)


@pytest.mark.parametrize("device_name", ["h200", "l4"])
def test_every_query_has_a_tile_and_every_row_a_block(device_name: str) -> None:
    device = WatchingDevice(device_name)
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.reserve_attention(2048, 64, 256)
    compiled = set(attention.instantiations(("__nv_bfloat16",)))
    row_tiles = set()
    for head_dim, heads, queries, rows in product(decode.DECODE_SHAPES, HEADS, (2, 3, 8, 16, 65), (1, 2, 16)):
        for cached in (bfloat16, uint8)[: 1 if head_dim == 256 and device_name == "l4" else 2]:
            attend(ops, device, queries, rows, heads, head_dim, cached=cached)
            _, (spec, template, config, params) = device.launched
            assert spec.name == "paged_attention_drafts_kernel"
            assert (spec, template) in compiled
            assert config.shared_bytes + drafts.STATIC_BYTES <= device.max_shared_bytes
            sizes = dict(zip(spec.template, template, strict=True))
            row_tiles.add(sizes["ROW_TILES"])
            tile_queries = drafts.TILE_ROWS * int(sizes["ROW_TILES"]) >> params.head_rows_log2
            group = min(heads[0] // heads[1], decode.GROUP_ROWS)
            assert group <= 1 << params.head_rows_log2 <= decode.GROUP_ROWS
            assert params.num_groups == decode.head_groups(*heads)
            assert config.grid[0] // params.num_groups * tile_queries >= queries
            assert config.grid[1] >= max(rows * queries, params.most_parts)
    assert row_tiles == {"1", "2"}


def test_a_layer_is_two_launches_and_allocates_nothing_after_reserving() -> None:
    device = WatchingDevice("h200")
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.reserve_attention(129, 32, 128)
    reserved = device.allocated
    for queries, rows in ((8, 1), (8, 16), (2, 64)):
        attend(ops, device, queries, rows, (32, 8), 128)
        assert [spec for spec, *_ in device.launched] == [attention.rope.ROPE_AND_STORE, drafts.PAGED_ATTENTION_DRAFTS]
    assert device.allocated == reserved


def test_a_device_is_filled_by_few_rows_and_not_divided_more_by_many() -> None:
    one, many = (drafts.plan_drafts(128, 32, 8, 8 * rows, 8 * rows, 8, 227 << 10) for rows in (1, 64))
    assert one.config.grid[0] * one.most_parts >= drafts.FULL_BLOCKS
    assert many.row_tiles == 2
    assert many.most_parts < 64, "each of 64 rows is one block's, for a group of heads"


@pytest.mark.parametrize("e4m3", [False, True])
def test_kernels_of_drafts_are_compiled_for_engines_that_verify_some(e4m3: bool) -> None:
    device = WatchingDevice("h200")
    ops = CudaOps(device)  # type: ignore[arg-type]

    def compiled(**around: Any) -> set[KernelSpec[Any]]:
        ops.compile(bfloat16, head_dims={128}, e4m3_cache=e4m3, **around)
        return device.compiled & set(OF_DRAFTS)

    plain, capped = drafts.PAGED_ATTENTION_DRAFTS, drafts.CAPPED_DRAFTS
    if e4m3:
        plain, capped = drafts.OF_E4M3[plain], drafts.OF_E4M3[capped]
    assert compiled() == set()
    assert compiled(rare_ops={"soft_cap", "sinks"}) == set()
    assert compiled(drafts=True) == {plain}
    assert compiled(drafts=True, rare_ops={"soft_cap"}) == {plain, capped}
