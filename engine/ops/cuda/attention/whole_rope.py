"""Norms of heads, rotary embedding and the KV store of many tokens whose heads are rotated as a whole.

The kernel moves 16 bytes at a time; its results are those of `rope_and_store_kernel`, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutCached, OutT
from tessera.engine.ops.cuda.attention.problem import for_e4m3
from tessera.engine.ops.cuda.types import CHUNK, E4M3, WARP_SIZE, aligned, cached_type, ceil_div, cuda_type
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.tensor import Tensor, float32


class WholeRopeAndStoreParams(NamedTuple):
    qkv: InT
    q_norm: InT
    k_norm: InT
    cos_sin: InFloat
    positions: InInt
    slot_mapping: InInt
    key_cache: OutCached
    value_cache: OutCached
    out: OutT
    num_heads: Int32
    num_kv_heads: Int32
    block_size: Int32
    eps: Float32
    kv_scales: InFloat


WHOLE_ROPE_AND_STORE = KernelSpec(
    file="attention/whole_rope.cu",
    name="whole_rope_and_store_kernel",
    template=("T", "Cached", "HEAD_DIM", "NORMS"),
    params=WholeRopeAndStoreParams,
    overlaps=True,
)
OF_E4M3 = for_e4m3(WHOLE_ROPE_AND_STORE)
SPECS = (WHOLE_ROPE_AND_STORE, *OF_E4M3.values())

TEAM_HEADS = Constant(4, "that lanes have of a token, one after the other")
MOST_WARPS = Constant(8, "of a block")
declare_header("whole_rope", __name__, {"TEAM_HEADS": TEAM_HEADS, "MOST_WARPS": MOST_WARPS}, (WholeRopeAndStoreParams,))

HEAD_DIMS = (64, 128)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    sizes = [(str(dim), norms) for dim in HEAD_DIMS for norms in ("false", "true")]
    return [
        *((WHOLE_ROPE_AND_STORE, (dtype, dtype, *size)) for dtype in halves for size in sizes),
        *((OF_E4M3[WHOLE_ROPE_AND_STORE], (dtype, E4M3, *size)) for dtype in halves for size in sizes),
    ]


def config_of(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> LaunchConfig:
    lanes = head_dim // 2 // CHUNK  # of a head
    warps = ceil_div((num_heads + 2 * num_kv_heads) * lanes, WARP_SIZE * TEAM_HEADS)
    parts = ceil_div(warps, MOST_WARPS)
    return LaunchConfig((num_tokens, parts, 1), (ceil_div(warps, parts) * WARP_SIZE, 1, 1))


def takes(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, transform: HeadTransform, out: Tensor) -> bool:
    """Whether the kernel does this transform."""
    cos_sin, q_norm, k_norm, _ = transform
    head_dim = key_cache.shape[3]
    if qkv.dtype == float32 or head_dim not in HEAD_DIMS or cos_sin is None or cos_sin.shape[1] != head_dim:
        return False
    return aligned(16, qkv, q_norm, k_norm, cos_sin, key_cache, value_cache, out)


def launch(
    device: CudaDevice,
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    transform: HeadTransform,
    num_heads: int,
    kv_scales: Tensor | None,
    out: Tensor,
) -> None:
    cos_sin, q_norm, k_norm, eps = transform
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    cached = cached_type(qkv.dtype, key_cache.dtype)
    norms = "false" if q_norm is None and k_norm is None else "true"
    device.launch(
        OF_E4M3[WHOLE_ROPE_AND_STORE] if cached == E4M3 else WHOLE_ROPE_AND_STORE,
        (cuda_type(qkv.dtype), cached, str(head_dim), norms),
        config_of(qkv.shape[0], num_heads, num_kv_heads, head_dim),
        WholeRopeAndStoreParams(
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            cos_sin=cos_sin,
            positions=metadata.positions,
            slot_mapping=metadata.slot_mapping,
            key_cache=key_cache,
            value_cache=value_cache,
            out=out,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            eps=eps,
            kv_scales=kv_scales,
        ),
    )
