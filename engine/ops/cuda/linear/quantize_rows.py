"""Activations in 8 bits, e4m3 or integers, with the norm before them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutFloat, Pointer
from tessera.engine.formats import Fp8Format
from tessera.engine.ops.cuda.types import (
    CHUNK,
    HALF_BYTES,
    NORM_CHUNKS,
    NORM_THREADS,
    ceil_div,
    cuda_type,
    rmsnorm_config,
)
from tessera.engine.tensor import Tensor, float32, uint8

OutBytes = Annotated[Pointer, "unsigned char*"]


class QuantizeRowsParams(NamedTuple):
    x: InT
    norm: InT
    values: OutBytes
    scales: OutFloat
    hidden: Int32
    eps: Float32
    static_scale: Float32


QUANTIZE_ROWS = KernelSpec(
    file="quant/quantize_rows.cu",
    name="quantize_rows_kernel",
    template=("T", "INT8", "GROUPS", "NORM", "CHUNKS"),
    params=QuantizeRowsParams,
    min_arch=89,
    overlaps=True,
    on_demand=True,
)
SPECS = (QUANTIZE_ROWS,)
GROUP = Constant(128, "columns that share a scale of e4m3, where a row has several")
INT8_GROUP = Constant(256, "columns that share a scale of integers")
WIDE_THREADS = Constant(1024, "of a row, at most, where there are few rows")
declare_header(
    "quantize_rows",
    __name__,
    {
        "MAX_THREADS": NORM_THREADS,
        "WIDE_THREADS": WIDE_THREADS,
        "ROW_CHUNKS": NORM_CHUNKS,
        "GROUP": GROUP,
        "INT8_GROUP": INT8_GROUP,
    },
    (QuantizeRowsParams,),
)

CHUNKS = (1, 2, int(NORM_CHUNKS))  # that a thread keeps of a row
FEW_ROWS = 256  # that multiprocessors take at once with many threads each
SCALES_ALIGNMENT = 256  # bytes, of where the scales begin behind the values


def kernels_of(dtype: str, *, groups: bool, integers: bool = False) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    return [
        (QUANTIZE_ROWS, _template(dtype, chunks, groups=groups, normed=normed, integers=integers))
        for normed in (False, True)
        for chunks in CHUNKS
    ]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    kinds = ((False, False), (False, True), (True, True))
    return [
        kernel
        for dtype in halves
        for integers, groups in kinds
        for kernel in kernels_of(dtype, groups=groups, integers=integers)
    ]


def _template(dtype: str, chunks: int, *, groups: bool, normed: bool, integers: bool) -> tuple[str, ...]:
    return (dtype, *("true" if flag else "false" for flag in (integers, groups, normed)), str(chunks))


def division(num_rows: int, columns: int, *, normed: bool) -> tuple[int, LaunchConfig]:
    """The chunks that a thread keeps, and the launch. Neither moves a bit: sums are added in the order of the norm."""
    config = rmsnorm_config(num_rows, columns)
    most = config.block[0] * NORM_CHUNKS  # chunks of a row that such a block keeps
    if num_rows > FEW_ROWS or columns > most * CHUNK:
        return CHUNKS[-1], config
    chunks = next(chunks for chunks in CHUNKS if most <= WIDE_THREADS * chunks)
    threads = most // chunks
    shared_bytes = most * CHUNK * HALF_BYTES if normed and chunks < NORM_CHUNKS else 0
    return chunks, LaunchConfig(config.grid, (threads, 1, 1), shared_bytes)


def scratch_bytes(num_rows: int, columns: int) -> int:
    """Of rows in 8 bits and of as many scales as they may have."""
    return _values_bytes(num_rows, columns) + num_rows * ceil_div(columns, GROUP) * float32.itemsize


def _values_bytes(num_rows: int, columns: int) -> int:
    return ceil_div(num_rows * columns, SCALES_ALIGNMENT) * SCALES_ALIGNMENT


def quantized(
    device: CudaDevice, x: Tensor, norm: Tensor | None, eps: float, format: Fp8Format, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """x [M, K], after the norm if there is one, as e4m3 [M, K] and scales [1 or ceil(K / 128), M] in `scratch`."""
    group = None if format.block is None else int(GROUP)
    return _launch(device, x, norm, eps, group, scratch, static_scale=format.input_scale or 0.0)


def as_integers(
    device: CudaDevice, x: Tensor, norm: Tensor | None, eps: float, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """x [M, K], after the norm if there is one, as int8 [M, K] and scales [ceil(K / 256), M] in `scratch`."""
    return _launch(device, x, norm, eps, int(INT8_GROUP), scratch, integers=True)


def _launch(
    device: CudaDevice,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    group: int | None,
    scratch: Tensor,
    *,
    integers: bool = False,
    static_scale: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`group`: columns that share a scale; None: all of a row."""
    num_rows, columns = x.shape
    values = Tensor(scratch.buffer, (num_rows, columns), uint8, scratch.offset)
    scales_at = scratch.offset + _values_bytes(num_rows, columns)
    groups = 1 if group is None else ceil_div(columns, group)
    scales = Tensor(scratch.buffer, (groups, num_rows), float32, scales_at)
    params = QuantizeRowsParams(
        x=x,
        norm=norm,
        values=values,
        scales=scales,
        hidden=columns,
        eps=eps,
        static_scale=static_scale,
    )
    normed = norm is not None
    chunks, config = division(num_rows, columns, normed=normed)
    template = _template(cuda_type(x.dtype), chunks, groups=group is not None, normed=normed, integers=integers)
    device.launch(QUANTIZE_ROWS, template, config, params)
    return values, scales
