"""Attention in which tokens see both sides of their text, and means over segments of rows."""

from __future__ import annotations

import math
from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import (
    Float32,
    InFloat,
    InInt,
    InT,
    Int32,
    OutFloat,
    RestrictInInt,
    RestrictInT,
    RestrictOutT,
)
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class BidirectionalAttentionParams(NamedTuple):
    qkv: RestrictInT
    cu_seqlens: RestrictInInt
    out: RestrictOutT
    num_seqs: Int32
    num_heads: Int32
    head_dim: Int32
    scale_log2: Float32
    cos_sin: InFloat
    rotary_dim: Int32
    reach: Int32


class SegmentMeanParams(NamedTuple):
    x: InT
    begins: InInt
    ends: InInt
    out: OutFloat
    hidden: Int32


BIDIRECTIONAL_ATTENTION = KernelSpec(
    file="attention/bidirectional.cu",
    name="bidirectional_attention_kernel",
    template=("T", "GENERAL"),
    params=BidirectionalAttentionParams,
)
SEGMENT_MEAN = KernelSpec(
    file="elementwise/segment_mean.cu",
    name="segment_mean_kernel",
    template=("T",),
    params=SegmentMeanParams,
)
SPECS = (BIDIRECTIONAL_ATTENTION, SEGMENT_MEAN)

QUERIES = Constant(8, "of a block")
MAX_HEAD_DIM = Constant(128)
declare_header(
    "bidirectional",
    __name__,
    {"QUERIES": QUERIES, "MAX_HEAD_DIM": MAX_HEAD_DIM},
    (BidirectionalAttentionParams,),
)
declare_header("segment_mean", __name__, params=(SegmentMeanParams,))

MEAN_BLOCK = 128


def attention_config(num_seqs: int, num_heads: int, max_seqlen: int) -> LaunchConfig:
    """A block for QUERIES queries of one head of one text."""
    return LaunchConfig((num_seqs, ceil_div(max_seqlen, QUERIES), num_heads), (QUERIES * WARP_SIZE, 1, 1))


def segment_mean_config(num_segments: int, hidden: int) -> LaunchConfig:
    """A thread for one element of one segment's mean."""
    return LaunchConfig((num_segments, ceil_div(hidden, MEAN_BLOCK), 1), (MEAN_BLOCK, 1, 1))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    attention = [(BIDIRECTIONAL_ATTENTION, (dtype, flag)) for dtype in dtypes for flag in ("false", "true")]
    return [*attention, *((SEGMENT_MEAN, (dtype,)) for dtype in dtypes)]


class EncoderOps(Ops):
    device: CudaDevice

    def _bidirectional_attention(
        self,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        num_heads: int,
        scale: float,
        cos_sin: Tensor | None,
        reach: int | None,
        out: Tensor,
    ) -> None:
        head_dim = out.shape[1] // num_heads
        if head_dim > MAX_HEAD_DIM:
            raise TesseraError(f"bidirectional attention has heads of at most {MAX_HEAD_DIM} elements, not {head_dim}")
        num_seqs = cu_seqlens.shape[0] - 1
        config = attention_config(num_seqs, num_heads, max_seqlen)
        params = BidirectionalAttentionParams(
            qkv=qkv,
            cu_seqlens=cu_seqlens,
            out=out,
            num_seqs=num_seqs,
            num_heads=num_heads,
            head_dim=head_dim,
            scale_log2=scale * math.log2(math.e),
            cos_sin=cos_sin,
            rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
            reach=max_seqlen if reach is None else min(reach, max_seqlen),
        )
        general = "false" if cos_sin is None and (reach is None or reach >= max_seqlen) else "true"
        self.device.launch(BIDIRECTIONAL_ATTENTION, (cuda_type(qkv.dtype), general), config, params)

    def _segment_mean(self, x: Tensor, begins: Tensor, ends: Tensor, out: Tensor) -> None:
        num_segments, hidden = out.shape
        config = segment_mean_config(num_segments, hidden)
        params = SegmentMeanParams(x=x, begins=begins, ends=ends, out=out, hidden=hidden)
        self.device.launch(SEGMENT_MEAN, (cuda_type(x.dtype),), config, params)
