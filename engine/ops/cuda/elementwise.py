"""Sums, products, conversions, and rows of an embedding table."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InInt, InT, Int32, Int64, OutInt, OutT, Pointer
from tessera.engine.ops.cuda.types import cuda_type, flat_config, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class BinaryParams(NamedTuple):
    a: InT
    b: InT
    out: OutT
    size: Int64


class ScaleParams(NamedTuple):
    x: InT
    out: OutT
    size: Int64
    factor: Float32


class SoftCapParams(NamedTuple):
    x: InT
    out: OutT
    size: Int64
    cap: Float32


class ConvertParams(NamedTuple):
    x: Annotated[Pointer, "const Source*"]
    out: Annotated[Pointer, "Target*"]
    size: Int64


class EmbeddingParams(NamedTuple):
    ids: InInt
    table: InT
    sampled: InInt
    out: OutT
    vocab_size: Int32
    hidden: Int32
    factor: Float32


class ScatterParams(NamedTuple):
    table: OutInt
    rows: InInt
    columns: InInt
    values: InInt
    width: Int32
    num_values: Int32


ADD = KernelSpec(
    file="elementwise/elementwise.cu",
    name="add_kernel",
    template=("T",),
    params=BinaryParams,
)
MUL = KernelSpec(
    file="elementwise/elementwise.cu",
    name="mul_kernel",
    template=("T",),
    params=BinaryParams,
)
SCALE = KernelSpec(
    file="elementwise/elementwise.cu",
    name="scale_kernel",
    template=("T",),
    params=ScaleParams,
)
SOFT_CAP = KernelSpec(
    file="elementwise/elementwise.cu",
    name="soft_cap_kernel",
    template=("T",),
    params=SoftCapParams,
)
CONVERT = KernelSpec(
    file="elementwise/elementwise.cu",
    name="convert_kernel",
    template=("Source", "Target"),
    params=ConvertParams,
)
EMBEDDING = KernelSpec(
    file="elementwise/embedding.cu",
    name="embedding_kernel",
    template=("T",),
    params=EmbeddingParams,
    overlaps=True,
)
SCATTER = KernelSpec(
    file="elementwise/scatter.cu",
    name="scatter_kernel",
    template=(),
    params=ScatterParams,
)
SPECS = (ADD, MUL, SCALE, SOFT_CAP, CONVERT, EMBEDDING, SCATTER)
declare_header("elementwise", __name__, params=(BinaryParams, ScaleParams, SoftCapParams, ConvertParams))
declare_header("embedding", __name__, params=(EmbeddingParams,))
declare_header("scatter", __name__, params=(ScatterParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types; conversions also to and from float."""
    same: list[Instantiation] = [(spec, (dtype,)) for spec in (ADD, MUL, EMBEDDING) for dtype in dtypes]
    types = tuple(dict.fromkeys(("float", *dtypes)))  # logits are float
    same += [(spec, (dtype,)) for spec in (SCALE, SOFT_CAP) for dtype in types]
    same.append((SCATTER, ()))
    return same + [(CONVERT, (source, target)) for source in types for target in types if source != target]


class ElementwiseOps(Ops):
    device: CudaDevice

    def _add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        params = BinaryParams(a=a, b=b, out=out, size=a.size)
        self.device.launch(ADD, (cuda_type(a.dtype),), flat_config(a.size), params)

    def _mul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        params = BinaryParams(a=a, b=b, out=out, size=a.size)
        self.device.launch(MUL, (cuda_type(a.dtype),), flat_config(a.size), params)

    def _scale(self, x: Tensor, factor: float, out: Tensor) -> None:
        params = ScaleParams(x=x, out=out, size=x.size, factor=factor)
        self.device.launch(SCALE, (cuda_type(x.dtype),), flat_config(x.size), params)

    def _soft_cap(self, x: Tensor, cap: float, out: Tensor) -> None:
        params = SoftCapParams(x=x, out=out, size=x.size, cap=cap)
        self.device.launch(SOFT_CAP, (cuda_type(x.dtype),), flat_config(x.size), params)

    def _copy(self, x: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype:
            self.device.copy(out.pointer, x.pointer, x.nbytes)
        else:
            template = (cuda_type(x.dtype), cuda_type(out.dtype))
            self.device.launch(CONVERT, template, flat_config(x.size), ConvertParams(x=x, out=out, size=x.size))

    def _embedding(self, ids: Tensor, table: Tensor, sampled: Tensor | None, factor: float, out: Tensor) -> None:
        vocab_size, hidden = table.shape
        config = row_config(ids.shape[0], hidden)
        params = EmbeddingParams(
            ids=ids, table=table, sampled=sampled, out=out, vocab_size=vocab_size, hidden=hidden, factor=factor
        )
        self.device.launch(EMBEDDING, (cuda_type(table.dtype),), config, params)

    def _scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None:
        config = flat_config(rows.size, per_thread=1)
        params = ScatterParams(
            table=table, rows=rows, columns=columns, values=values, width=table.shape[1], num_values=rows.size
        )
        self.device.launch(SCATTER, (), config, params)
