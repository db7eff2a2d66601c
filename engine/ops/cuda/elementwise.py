"""Sums, products, conversions, and rows of an embedding table."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda.types import cuda_type, flat_config, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

ADD = KernelSpec(
    file="elementwise/elementwise.cu",
    name="add_kernel",
    template=("T",),
    parameters=(("a", "pointer"), ("b", "pointer"), ("out", "pointer"), ("size", "int64")),
)
MUL = KernelSpec(
    file="elementwise/elementwise.cu",
    name="mul_kernel",
    template=("T",),
    parameters=(("a", "pointer"), ("b", "pointer"), ("out", "pointer"), ("size", "int64")),
)
SCALE = KernelSpec(
    file="elementwise/elementwise.cu",
    name="scale_kernel",
    template=("T",),
    parameters=(("x", "pointer"), ("out", "pointer"), ("size", "int64"), ("factor", "float32")),
)
SOFT_CAP = KernelSpec(
    file="elementwise/elementwise.cu",
    name="soft_cap_kernel",
    template=("T",),
    parameters=(("x", "pointer"), ("out", "pointer"), ("size", "int64"), ("cap", "float32")),
)
CONVERT = KernelSpec(
    file="elementwise/elementwise.cu",
    name="convert_kernel",
    template=("Source", "Target"),
    parameters=(("x", "pointer"), ("out", "pointer"), ("size", "int64")),
)
EMBEDDING = KernelSpec(
    file="elementwise/embedding.cu",
    name="embedding_kernel",
    template=("T",),
    parameters=(
        ("ids", "pointer"),
        ("table", "pointer"),
        ("sampled", "pointer"),
        ("out", "pointer"),
        ("vocab_size", "int32"),
        ("hidden", "int32"),
    ),
)
SCATTER = KernelSpec(
    file="elementwise/scatter.cu",
    name="scatter_kernel",
    template=(),
    parameters=(
        ("table", "pointer"),
        ("rows", "pointer"),
        ("columns", "pointer"),
        ("values", "pointer"),
        ("width", "int32"),
        ("count", "int32"),
    ),
)
SPECS = (ADD, MUL, SCALE, SOFT_CAP, CONVERT, EMBEDDING, SCATTER)


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
        self.device.launch(ADD, (cuda_type(a.dtype),), flat_config(a.size), a, b, out, a.size)

    def _mul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.device.launch(MUL, (cuda_type(a.dtype),), flat_config(a.size), a, b, out, a.size)

    def _scale(self, x: Tensor, factor: float, out: Tensor) -> None:
        self.device.launch(SCALE, (cuda_type(x.dtype),), flat_config(x.size), x, out, x.size, factor)

    def _soft_cap(self, x: Tensor, cap: float, out: Tensor) -> None:
        self.device.launch(SOFT_CAP, (cuda_type(x.dtype),), flat_config(x.size), x, out, x.size, cap)

    def _copy(self, x: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype:
            self.device.copy(out.pointer, x.pointer, x.nbytes)
        else:
            template = (cuda_type(x.dtype), cuda_type(out.dtype))
            self.device.launch(CONVERT, template, flat_config(x.size), x, out, x.size)

    def _embedding(self, ids: Tensor, table: Tensor, sampled: Tensor | None, out: Tensor) -> None:
        vocab_size, hidden = table.shape
        config = row_config(ids.shape[0], hidden)
        template = (cuda_type(table.dtype),)
        self.device.launch(EMBEDDING, template, config, ids, table, sampled, out, vocab_size, hidden)

    def _scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None:
        config = flat_config(rows.size, per_thread=1)
        self.device.launch(SCATTER, (), config, table, rows, columns, values, table.shape[1], rows.size)
