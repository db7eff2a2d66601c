"""Weights that no kernel multiplies as they are stored: dequantised into a scratch, then multiplied as dense ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InInt, Int32, OutT, Pointer
from tessera.engine.formats import (
    FORMATS,
    DenseFormat,
    Fp8Format,
    LinearWeight,
    PackedBlockFormat,
    PackedFormat,
    WeightFormat,
    WeightPart,
)
from tessera.engine.ops.cuda.fp8.dequantize import FP8_DEQUANTIZE, launch_dequantize
from tessera.engine.ops.cuda.quant import blocks, gather
from tessera.engine.ops.cuda.quant.blocks import DEQUANTIZE_BLOCKS, LANE_ELEMENTS, PACK_BLOCKS
from tessera.engine.ops.cuda.quant.product import kernels_of, takes_any_rows, turned_bytes
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, cuda_type, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, int8, uint8, uint32

C_ELEMENTS = C_TYPE_NAMES | {int8: "signed char", uint8: "unsigned char", uint32: "unsigned"}


def _params(format: type[WeightFormat]) -> Any:
    """The tensors of the format's layout, and where rows come from and go to."""
    layouts = format().layout(1, 1)
    tensors = [
        (name, Annotated[Pointer, f"const {C_ELEMENTS[layout.dtype]}*"])
        for name, layout in zip(format.tensor_names, layouts, strict=True)
    ]
    others = [("ids", InInt), ("sampled", InInt), ("out", OutT), ("num_stored", Int32), ("columns", Int32)]
    named_tuple: Any = NamedTuple
    return named_tuple(f"Dequantize{format.name.title().replace('_', '')}Params", [*tensors, *others])


def _spec(format: type[WeightFormat]) -> KernelSpec[Any]:
    return KernelSpec(
        file="quant/dequantize.cu",
        name=f"dequantize_{format.name}_kernel",
        template=("T",),
        params=_params(format),
        writes_weights=True,
        on_demand=True,
    )


DEQUANTIZE = {
    name: _spec(format)
    for name, format in FORMATS.items()
    if format.on_cuda and not issubclass(format, (DenseFormat, PackedFormat, Fp8Format))
}
SPECS = tuple(DEQUANTIZE.values())
declare_header("dequantize", __name__, params=[spec.params for spec in SPECS])


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(spec, (dtype,)) for spec in SPECS for dtype in dtypes]


def _kernel(format: WeightFormat, dtype: np.dtype[Any]) -> Instantiation:
    if isinstance(format, PackedFormat):
        return DEQUANTIZE_BLOCKS, (cuda_type(dtype), format.kernel_type)
    if isinstance(format, Fp8Format):
        return FP8_DEQUANTIZE, (cuda_type(dtype),)
    return DEQUANTIZE[format.name], (cuda_type(dtype),)


class DequantizeOps(Ops):
    device: CudaDevice
    batch_invariant = False  # see `CudaOps`
    _scratch: Tensor | None = None
    _ordered: Tensor | None = None
    _rows_scratch: Tensor | None = None
    _room: Tensor | None = None  # in which products turn their rows

    def reserve_linear(self, weights: Iterable[LinearWeight], dtype: np.dtype[Any], max_rows: int = 0) -> None:
        """Compile and allocate beforehand what products of up to `max_rows` rows of `dtype` by these weights take."""
        stored = [weight for weight in weights if weight.dense is None]
        formats = {
            part.format for weight in stored for part in weight.parts if not isinstance(part.format, DenseFormat)
        }
        kernels = {_kernel(format, dtype) for format in formats}
        for weight in stored:
            kernels |= kernels_of(weight, cuda_type(dtype), self.device)
        self.device.compile(sorted(kernels, key=lambda kernel: (kernel[0].name, kernel[1])))
        ordered = [weight.shape[1] for weight in stored if weight.order is not None]
        if ordered:
            self.device.compile(gather.instantiations((cuda_type(dtype),)))
            self._in_order_of(max_rows * max(ordered) * dtype.itemsize)
        always = self.batch_invariant or dtype.itemsize != HALF_BYTES
        nbytes = 0 if always else turned_bytes(stored, self.device)
        if nbytes and (self._room is None or self._room.nbytes < nbytes):
            self._room = empty((nbytes,), uint8, self.device)
        copied = [weight.shape for weight in stored if always or not takes_any_rows(weight)]
        if copied:
            self.dequantises = True
            self._scratch_of(max(rows * columns for rows, columns in copied) * dtype.itemsize)

    def _scratch_of(self, nbytes: int) -> Tensor:
        """At least this much memory, the same for every product: they run one after the other."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            assert not self.device.is_capturing, "reserve_linear comes before a recording"
            self._scratch = empty((nbytes,), uint8, self.device)
        return self._scratch

    def _rows_scratch_of(self, nbytes: int) -> Tensor:
        """At least this much memory for activations in 8 bits, the same for every product."""
        if self._rows_scratch is None or self._rows_scratch.nbytes < nbytes:
            assert not self.device.is_capturing, "reserve_linear comes before a recording"
            self._rows_scratch = empty((nbytes,), uint8, self.device)
        return self._rows_scratch

    def _in_order_of(self, nbytes: int) -> Tensor:
        """At least this much memory for activations, the same for every product."""
        if self._ordered is None or self._ordered.nbytes < nbytes:
            assert not self.device.is_capturing, "reserve_linear comes before a recording"
            self._ordered = empty((nbytes,), uint8, self.device)
        return self._ordered

    def _in_order(self, x: Tensor, order: Tensor) -> Tensor:
        """x with its columns in a weight's order, until the next call."""
        scratch = self._in_order_of(x.nbytes)
        out = Tensor(scratch.buffer, x.shape, x.dtype, scratch.offset)
        gather.gather_columns(self.device, x, order, out)
        return out

    def _place_of(self, weight: LinearWeight, dtype: np.dtype[Any]) -> Tensor:
        """Where `_dequantized` puts the elements."""
        rows, columns = weight.shape
        scratch = self._scratch_of(rows * columns * dtype.itemsize)
        return Tensor(scratch.buffer, (rows, columns), dtype, scratch.offset)

    def _dequantized(self, weight: LinearWeight, dtype: np.dtype[Any]) -> Tensor:
        """[N, K] in `dtype`, until the next call."""
        out = self._place_of(weight, dtype)
        starts = accumulate((part.shape[0] for part in weight.parts), initial=0)
        places = [(part, out[start : start + part.shape[0]]) for start, part in zip(starts, weight.parts, strict=False)]
        # Dense parts first: it is after a kernel that writes weights that the product does not start early.
        for part, place in sorted(places, key=lambda pair: not isinstance(pair[0].format, DenseFormat)):
            if isinstance(part.format, DenseFormat):
                self._copy(part.tensors["values"], place)
            else:
                self._dequantize(part, None, None, place)
        return out

    def _lookup(self, ids: Tensor, part: WeightPart, sampled: Tensor | None, out: Tensor) -> None:
        self._dequantize(part, ids, sampled, out)

    def _dequantize(self, part: WeightPart, ids: Tensor | None, sampled: Tensor | None, out: Tensor) -> None:
        if isinstance(part.format, Fp8Format):
            launch_dequantize(self.device, part, ids, sampled, out)
            return
        if isinstance(part.format, PackedFormat):
            blocks.launch_dequantize(self.device, part, ids, sampled, out)
            return
        stored, columns = part.shape
        config = row_config(out.shape[0], columns)
        spec, template = _kernel(part.format, out.dtype)
        tensors = {name: part.tensors[name] for name in part.format.tensor_names}
        params = spec.params(**tensors, ids=ids, sampled=sampled, out=out, num_stored=stored, columns=columns)
        self.device.launch(spec, template, config, params)

    def _pack_blocks(self, stored: Tensor, part: WeightPart, first: int) -> None:
        assert isinstance(part.format, PackedBlockFormat)
        rows, columns = stored.shape[0], part.shape[1]
        codes, headers = (part.tensors[name][first : first + rows] for name in part.format.tensor_names)
        params = PACK_BLOCKS.params(stored=stored, codes=codes, headers=headers, columns=columns)
        config = row_config(rows, columns, LANE_ELEMENTS)
        self.device.launch(PACK_BLOCKS, (part.format.type.name,), config, params)
