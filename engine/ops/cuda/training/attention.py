"""RoPE, and causal attention over packed sequences with its backward.

16-bit elements of usual head sizes go through tensor cores (`flash`), all others through kernels for any.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutFloat, OutT
from tessera.engine.ops.cuda.training import flash
from tessera.engine.ops.cuda.training.packed import PackedProblem
from tessera.engine.ops.cuda.types import CHUNK, FLAT_BLOCK, WARP_SIZE, ceil_div, cuda_type
from tessera.engine.ops.training.interface import PackedSequences, TrainingOps
from tessera.engine.tensor import Tensor, empty, float32

FILE = "training/attention.cu"


class PackedRopeParams(NamedTuple):
    x: InT
    cos_sin: InFloat
    positions: InInt
    out: OutT
    width: Int32
    head_dim: Int32
    num_rotated: Int32
    rotary_dim: Int32


class PackedAttentionParams(NamedTuple):
    qkv: InT
    cu_seqlens: InInt
    out: OutT
    logsumexp: OutFloat
    num_tokens: Int32
    tiles: Int32
    num_heads: Int32
    num_kv_heads: Int32
    head_dim: Int32
    window: Int32
    scale: Float32


class AttentionDeltaParams(NamedTuple):
    dout: InT
    out: InT
    delta: OutFloat
    num_tokens: Int32
    num_heads: Int32
    head_dim: Int32


class PackedAttentionGradientParams(NamedTuple):
    qkv: InT
    cu_seqlens: InInt
    dout: InT
    logsumexp: InFloat
    delta: InFloat
    dqkv: OutT
    num_tokens: Int32
    tiles: Int32
    num_heads: Int32
    num_kv_heads: Int32
    head_dim: Int32
    window: Int32
    scale: Float32


PACKED_ROPE = KernelSpec(
    "training/rope.cu", "packed_rope_kernel", ("T", "INVERSE", "WHOLE"), PackedRopeParams, on_demand=True
)
PACKED_ATTENTION = KernelSpec(FILE, "packed_attention_kernel", ("T",), PackedAttentionParams, on_demand=True)
DELTA = KernelSpec(FILE, "attention_delta_kernel", ("T",), AttentionDeltaParams, on_demand=True)
QUERY_GRADIENT = KernelSpec(FILE, "packed_query_gradient_kernel", ("T",), PackedAttentionGradientParams, on_demand=True)
KEY_GRADIENT = KernelSpec(FILE, "packed_key_gradient_kernel", ("T",), PackedAttentionGradientParams, on_demand=True)
ANY_HEADS = (PACKED_ATTENTION, DELTA, QUERY_GRADIENT, KEY_GRADIENT)
SPECS = (PACKED_ROPE, *ANY_HEADS, *flash.SPECS)

ROWS = Constant(8, "queries, or keys, of a block: one a warp")
MAX_HEAD_DIM = Constant(256)
TILE = WARP_SIZE  # rows that a block's warps share
DELTA_BLOCK = 256
declare_header("training_rope", __name__, params=(PackedRopeParams,))
declare_header(
    "training_attention",
    __name__,
    {"ROWS": ROWS, "MAX_HEAD_DIM": MAX_HEAD_DIM},
    (PackedAttentionParams, AttentionDeltaParams, PackedAttentionGradientParams),
)

FLAGS = ("true", "false")


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    pairs: list[Instantiation] = [(spec, (dtype,)) for spec in ANY_HEADS for dtype in dtypes]
    pairs += [(PACKED_ROPE, (dtype, inverse, whole)) for dtype in dtypes for inverse in FLAGS for whole in FLAGS]
    return pairs + flash.instantiations(dtypes)


def _config(problem: PackedProblem, heads: int, rows: int, padded_rows: int) -> LaunchConfig:
    """`rows` and `padded_rows` of head_dim and head_dim + 1 floats in shared memory."""
    floats = rows * problem.head_dim + padded_rows * (problem.head_dim + 1)
    return LaunchConfig(problem.grid(ROWS, heads), (ROWS * WARP_SIZE, 1, 1), floats * float32.itemsize)


class AttentionOps(TrainingOps):
    device: CudaDevice

    def _rope(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        head_dim: int,
        num_rotated: int,
        inverse: bool,
        out: Tensor,
    ) -> None:
        rows, width = x.shape
        rotary_dim = cos_sin.shape[1]
        whole = head_dim % CHUNK == 0 and rotary_dim // 2 % CHUNK == 0
        params = PackedRopeParams(
            x=x,
            cos_sin=cos_sin,
            positions=positions,
            out=out,
            width=width,
            head_dim=head_dim,
            num_rotated=num_rotated,
            rotary_dim=rotary_dim,
        )
        blocks = ceil_div(width, FLAT_BLOCK * (CHUNK if whole else 1))
        config = LaunchConfig((rows, blocks, 1), (FLAT_BLOCK, 1, 1))
        self.device.launch(PACKED_ROPE, (cuda_type(x.dtype), FLAGS[not inverse], FLAGS[not whole]), config, params)

    def _packed_attention(
        self,
        qkv: Tensor,
        sequences: PackedSequences,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        out: Tensor,
        logsumexp: Tensor,
    ) -> None:
        problem = PackedProblem.of(qkv, sequences, num_heads, num_kv_heads, scale, window)
        if flash.can_do(problem, out):
            flash.launch_attention(self.device, problem, out, logsumexp)
            return
        _check_head_dim(problem)
        params = PackedAttentionParams(out=out, logsumexp=logsumexp, head_dim=problem.head_dim, **problem.fields(ROWS))
        config = _config(problem, num_heads, ROWS + TILE, TILE)
        self.device.launch(PACKED_ATTENTION, (cuda_type(qkv.dtype),), config, params)

    def _packed_attention_gradient(
        self,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        sequences: PackedSequences,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        dqkv: Tensor,
    ) -> None:
        problem = PackedProblem.of(qkv, sequences, num_heads, num_kv_heads, scale, window)
        template = (cuda_type(qkv.dtype),)
        delta = empty(logsumexp.shape, float32, self.device)
        sizes = {"num_tokens": qkv.shape[0], "num_heads": num_heads, "head_dim": problem.head_dim}
        blocks = ceil_div(delta.size * WARP_SIZE, DELTA_BLOCK)
        config = LaunchConfig((blocks, 1, 1), (DELTA_BLOCK, 1, 1))
        self.device.launch(DELTA, template, config, AttentionDeltaParams(dout=dout, out=out, delta=delta, **sizes))
        if flash.can_do(problem, dout, dqkv):
            flash.launch_gradient(self.device, problem, dout, logsumexp, delta, dqkv)
            return
        _check_head_dim(problem)
        params = PackedAttentionGradientParams(
            dout=dout,
            logsumexp=logsumexp,
            delta=delta,
            dqkv=dqkv,
            head_dim=problem.head_dim,
            **problem.fields(ROWS),
        )
        for spec, heads in ((QUERY_GRADIENT, num_heads), (KEY_GRADIENT, num_kv_heads)):
            self.device.launch(spec, template, _config(problem, heads, 2 * ROWS, 2 * TILE), params)


def _check_head_dim(problem: PackedProblem) -> None:
    if problem.head_dim > MAX_HEAD_DIM:
        raise TesseraError(f"packed attention has heads of at most {MAX_HEAD_DIM} elements, not {problem.head_dim}")
