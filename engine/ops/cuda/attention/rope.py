"""Norms of heads, rotary embedding and the KV store of a step's tokens."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutCached, OutT
from tessera.engine.ops.cuda.attention import whole_rope
from tessera.engine.ops.cuda.attention.problem import for_e4m3
from tessera.engine.ops.cuda.types import E4M3, FLAT_BLOCK, WARP_SIZE, aligned, cached_type, ceil_div, cuda_type
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.tensor import Tensor, float32


class RopeAndStoreParams(NamedTuple):
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
    part_heads: Int32
    head_dim: Int32
    rotary_dim: Int32
    block_size: Int32
    eps: Float32
    kv_scales: InFloat


class RotateParams(NamedTuple):
    qkv: OutT
    cos_sin: InFloat
    positions: InInt
    width: Int32
    num_heads: Int32
    head_dim: Int32
    rotary_dim: Int32


ROPE_AND_STORE = KernelSpec(
    file="attention/rope.cu",
    name="rope_and_store_kernel",
    template=("T", "Cached", "VECTOR", "MAX_HEAD_DIM"),
    params=RopeAndStoreParams,
    overlaps=True,
)
OF_E4M3 = for_e4m3(ROPE_AND_STORE)
ROTATE = KernelSpec(
    file="attention/rotate.cu",
    name="rotate_kernel",
    template=("T",),
    params=RotateParams,
    on_demand=True,
)
SPECS = (ROPE_AND_STORE, *OF_E4M3.values(), ROTATE)

WARPS = Constant(4, "of a block")
declare_header("rope", __name__, {"WARPS": WARPS}, (RopeAndStoreParams,))
declare_header("rotate", __name__, params=(RotateParams,))

MAX_HEAD_DIM = 256
ROPE_PARTS = (1, 2, 4, 8)  # heads of a warp
ROPE_MOST_WARPS = 8192  # with more, each takes more heads
ROPE_HEAD_DIMS = (128, MAX_HEAD_DIM)  # up to which a head has an instantiation


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    sizes = [(vector, str(dim)) for vector in ("1", "2") for dim in ROPE_HEAD_DIMS]
    rotate: list[Instantiation] = [(ROTATE, (dtype,)) for dtype in dtypes]
    return [
        *rotate,
        *((ROPE_AND_STORE, (dtype, dtype, *size)) for dtype in dtypes for size in sizes),
        *((OF_E4M3[ROPE_AND_STORE], (dtype, E4M3, *size)) for dtype in dtypes for size in sizes),
    ]


def rope_part_heads(num_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Heads that a warp takes one after another: one while there are few, so that these are soon done."""
    heads = num_tokens * (num_heads + 2 * num_kv_heads)
    return next((part for part in ROPE_PARTS if heads <= part * ROPE_MOST_WARPS), ROPE_PARTS[-1])


def rope_config(num_tokens: int, num_heads: int, num_kv_heads: int, part_heads: int) -> LaunchConfig:
    """A warp for up to `part_heads` heads of a kind of a token."""
    parts = ceil_div(num_heads, part_heads) + 2 * ceil_div(num_kv_heads, part_heads)
    return LaunchConfig((num_tokens, ceil_div(parts, WARPS), 1), (WARPS * WARP_SIZE, 1, 1))


def rotates_pairs(head_dim: int, cos_sin: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether norms and rotation may take two elements at a time."""
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    sizes = [2 * tensor.dtype.itemsize for tensor in tensors if tensor is not None]
    in_pairs = aligned(max(sizes, default=1), *tensors) and aligned(2 * float32.itemsize, cos_sin)
    return head_dim % 2 == 0 and rotary_dim % 4 == 0 and in_pairs


def check_head_dim(head_dim: int) -> None:
    """Raises: TesseraError for heads that no kernel takes."""
    if head_dim > MAX_HEAD_DIM:
        raise TesseraError(f"attention on CUDA takes heads of up to {MAX_HEAD_DIM} elements, not {head_dim}")


class RopeOps(Ops):
    device: CudaDevice

    def _rope_and_store(
        self,
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
        num_tokens = qkv.shape[0]
        part_heads = rope_part_heads(num_tokens, num_heads, num_kv_heads)
        if part_heads > 1 and whole_rope.takes(qkv, key_cache, value_cache, transform, out):
            caches = key_cache, value_cache
            whole_rope.launch(self.device, qkv, *caches, metadata, transform, num_heads, kv_scales, out)
            return
        rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
        check_head_dim(head_dim)
        pairs = rotates_pairs(head_dim, cos_sin, qkv, q_norm, k_norm, key_cache, value_cache, out)
        largest = next(dim for dim in ROPE_HEAD_DIMS if dim >= head_dim)
        cached = cached_type(qkv.dtype, key_cache.dtype)
        self.device.launch(
            OF_E4M3[ROPE_AND_STORE] if cached == E4M3 else ROPE_AND_STORE,
            (cuda_type(qkv.dtype), cached, "2" if pairs else "1", str(largest)),
            rope_config(num_tokens, num_heads, num_kv_heads, part_heads),
            RopeAndStoreParams(
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
                part_heads=part_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                block_size=block_size,
                eps=eps,
                kv_scales=kv_scales,
            ),
        )

    def _rotate(self, qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_heads: int, head_dim: int) -> None:
        num_tokens, rotary_dim = qkv.shape[0], cos_sin.shape[1]
        blocks = ceil_div(num_heads * rotary_dim // 2, FLAT_BLOCK)
        params = RotateParams(
            qkv=qkv,
            cos_sin=cos_sin,
            positions=positions,
            width=qkv.shape[1],
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
        )
        config = LaunchConfig((num_tokens, blocks, 1), (FLAT_BLOCK, 1, 1))
        self.device.launch(ROTATE, (cuda_type(qkv.dtype),), config, params)
