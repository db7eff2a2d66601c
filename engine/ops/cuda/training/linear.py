"""Backward of products and of looking rows up.

dx = dy W and dW = dy^T x read their operands as they lie where `sm90` can. Elsewhere they are products of transposed
copies, so that every kernel of products serves them, too; there what is summed over is padded with zeros to a multiple
of PADDING, whatever the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, Int64, OutFloat, OutInt, OutT
from tessera.engine.ops.cuda.training import sm90
from tessera.engine.ops.cuda.types import CHUNK, ceil_div, cuda_type
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32, int32, zeros


class TransposeParams(NamedTuple):
    x: InT
    out: OutT
    rows: Int64
    columns: Int32
    out_columns: Int64


class EmbeddingCountParams(NamedTuple):
    ids: InInt
    places: OutInt
    num_tokens: Int32
    vocab_size: Int32


class EmbeddingStartsParams(NamedTuple):
    places: OutInt
    vocab_size: Int32


class EmbeddingPlaceParams(NamedTuple):
    ids: InInt
    places: OutInt
    order: OutInt
    num_tokens: Int32
    vocab_size: Int32


class EmbeddingGradientParams(NamedTuple):
    dy: InT
    ids: InInt
    order: InInt
    ends: InInt
    out: OutFloat
    num_tokens: Int32
    vocab_size: Int32
    hidden: Int32


TRANSPOSE = KernelSpec("training/transpose.cu", "transpose_kernel", ("T",), TransposeParams, on_demand=True)
EMBEDDING = "training/embedding.cu"
EMBEDDING_COUNT = KernelSpec(EMBEDDING, "embedding_count_kernel", (), EmbeddingCountParams, on_demand=True)
EMBEDDING_STARTS = KernelSpec(EMBEDDING, "embedding_starts_kernel", (), EmbeddingStartsParams, on_demand=True)
EMBEDDING_PLACE = KernelSpec(EMBEDDING, "embedding_place_kernel", (), EmbeddingPlaceParams, on_demand=True)
EMBEDDING_GRADIENT = KernelSpec(EMBEDDING, "embedding_gradient_kernel", ("T",), EmbeddingGradientParams, on_demand=True)
SORTING = (EMBEDDING_COUNT, EMBEDDING_STARTS, EMBEDDING_PLACE)
SPECS = (TRANSPOSE, *SORTING, EMBEDDING_GRADIENT)

READS_IN_PLACE = True  # where `sm90` can
PADDING = 8  # elements: rows of 16 bytes
TILE, TRANSPOSE_THREADS = Constant(64), Constant(256)
THREADS = Constant(256, "of a block")
MAX_THREADS = Constant(1024, "of the block that sums counts")
MAX_SORTED = Constant(1024, "tokens of one id")
declare_header("training_transpose", __name__, {"TILE": TILE, "THREADS": TRANSPOSE_THREADS}, (TransposeParams,))
declare_header(
    "training_embedding",
    __name__,
    {"THREADS": THREADS, "MAX_THREADS": MAX_THREADS, "MAX_SORTED": MAX_SORTED},
    (EmbeddingCountParams, EmbeddingStartsParams, EmbeddingPlaceParams, EmbeddingGradientParams),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    pairs: list[Instantiation] = [(spec, (dtype,)) for spec in (TRANSPOSE, EMBEDDING_GRADIENT) for dtype in dtypes]
    return pairs + [(spec, ()) for spec in SORTING]


def padded(size: int) -> int:
    return ceil_div(size, PADDING) * PADDING


class LinearOps(TrainingOps):
    """
    Attributes:
        products: multiplies.
        reads_in_place: products read their operands as they lie where they can; tests and benchmarks change it.
    """

    device: CudaDevice
    products: Ops
    reads_in_place: bool = READS_IN_PLACE

    def _matmul_input_gradient(self, dy: Tensor, weight: Tensor, out: Tensor) -> None:
        padded_dy = self._padded_columns(dy)
        if self._can_read(padded_dy, weight, out):
            sm90.launch(self.device, padded_dy, weight, out, turned_x=False)
        else:
            self.products.matmul(padded_dy, self._transposed(weight), out=out)

    def _matmul_weight_gradient(self, dy: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
        if self._can_read(dy, x, out):
            sm90.launch(self.device, dy, x, out, turned_x=True, accumulate=accumulate)
            return
        left, right = self._transposed(dy), self._transposed(x)
        if not accumulate or dy.dtype == float32:
            self.products.matmul(left, right, out=out, accumulate=accumulate)
        else:  # kernels with wgmma do not accumulate in float32
            self._add_to(out, self.products.matmul(left, right, out=empty(out.shape, float32, self.device)), 1.0)

    def _embedding_gradient(self, dy: Tensor, ids: Tensor, out: Tensor) -> None:
        (num_tokens, hidden), vocab_size = dy.shape, out.shape[0]
        places, order = zeros((vocab_size,), int32, self.device), empty((num_tokens,), int32, self.device)
        counted = EmbeddingCountParams(ids=ids, places=places, num_tokens=num_tokens, vocab_size=vocab_size)
        placed = EmbeddingPlaceParams(ids=ids, places=places, order=order, num_tokens=num_tokens, vocab_size=vocab_size)
        params = EmbeddingGradientParams(
            dy=dy,
            ids=ids,
            order=order,
            ends=places,
            out=out,
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            hidden=hidden,
        )
        each_token = LaunchConfig((ceil_div(num_tokens, THREADS), 1, 1), (THREADS, 1, 1))
        one_block = LaunchConfig((1, 1, 1), (MAX_THREADS, 1, 1))
        each_row = LaunchConfig((num_tokens, ceil_div(hidden, THREADS * CHUNK), 1), (THREADS, 1, 1))
        launch = self.device.launch
        launch(EMBEDDING_COUNT, (), each_token, counted)
        launch(EMBEDDING_STARTS, (), one_block, EmbeddingStartsParams(places=places, vocab_size=vocab_size))
        launch(EMBEDDING_PLACE, (), each_token, placed)
        launch(EMBEDDING_GRADIENT, (cuda_type(dy.dtype),), each_row, params)

    def _can_read(self, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        return self.reads_in_place and sm90.can_read(self.device, x, weight) and sm90.can_write(out)

    def _transposed(self, x: Tensor) -> Tensor:
        """[N, padded(M)] of x [M, N], with zeros behind the M."""
        rows, columns = x.shape
        out = empty((columns, padded(rows)), x.dtype, self.device)
        params = TransposeParams(x=x, out=out, rows=rows, columns=columns, out_columns=out.shape[1])
        grid = (ceil_div(out.shape[1], TILE), ceil_div(columns, TILE), 1)
        config = LaunchConfig(grid, (TRANSPOSE_THREADS, 1, 1))
        self.device.launch(TRANSPOSE, (cuda_type(x.dtype),), config, params)
        return out

    def _padded_columns(self, x: Tensor) -> Tensor:
        """[M, padded(N)] of x [M, N], with zeros behind the N; x itself where nothing is to be added."""
        rows, columns = x.shape
        if columns % PADDING == 0:
            return x
        wide = zeros((rows, padded(columns)), x.dtype, self.device)
        return self.add_columns(wide, x, 0, out=wide)
