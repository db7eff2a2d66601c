"""The weight of a linear layer: rows in one or several formats, and a bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats.dense import DenseFormat
from tessera.engine.formats.format import WeightFormat
from tessera.engine.formats.lora import LoraStack
from tessera.engine.tensor import FLOAT_DTYPES, Device, Tensor, empty


@dataclass(frozen=True, eq=False)
class WeightPart:
    """Rows [R, K] in one format; `tensors` has those of `format.tensor_names`."""

    format: WeightFormat
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]

    @classmethod
    def empty(cls, format: WeightFormat, rows: int, columns: int, device: Device) -> WeightPart:
        """Uninitialised."""
        tensors = (empty(*tensor, device) for tensor in format.layout(rows, columns))
        return cls(format, (rows, columns), dict(zip(format.tensor_names, tensors, strict=True)))


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """W [N, K] and bias [N] of y = x W^T + b.

    The parts lie one below the other: a fused matrix (query, key and value; gate and up) is one part where all
    of it has one format, several where formats differ.

    Attributes:
        order: int32 [K]; column c of the parts is for feature order[c] of x. None: they are in x's order.
        adapters: low-rank ones, which `Ops.linear` applies between the product and the epilogue.

    Raises: TesseraError where parts, bias and order do not fit each other or lie on several devices.
    """

    parts: tuple[WeightPart, ...]
    bias: Tensor | None = None
    order: Tensor | None = None
    adapters: LoraStack | None = None

    def __post_init__(self) -> None:
        if len({part.shape[1] for part in self.parts}) != 1:
            raise TesseraError(f"the parts of a weight differ in width: {[part.shape for part in self.parts]}")
        if self.bias is not None and self.bias.shape != self.shape[:1]:
            raise TesseraError(f"a bias of shape {self.bias.shape} does not fit a weight of shape {self.shape}")
        if self.order is not None and self.order.shape != self.shape[1:]:
            raise TesseraError(f"an order of shape {self.order.shape} does not fit a weight of shape {self.shape}")
        stack = self.adapters
        if stack is not None and (stack.b.shape[1], stack.a.shape[3]) != self.shape:
            raise TesseraError(f"adapters {stack.a}, {stack.b} do not fit a weight of shape {self.shape}")
        if len(devices := {tensor.device.name for tensor in self.tensors()}) > 1:
            raise TesseraError(f"the tensors of a weight are on {' and '.join(sorted(devices))}")

    @classmethod
    def of(cls, values: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """The dense weight that lies in `values` [N, K]."""
        rows, columns = values.shape
        return cls((WeightPart(DenseFormat(values.dtype), (rows, columns), {"values": values}),), bias)

    @cached_property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @cached_property
    def dense(self) -> Tensor | None:
        """[N, K] where it is one dense part."""
        only = self.parts[0] if len(self.parts) == 1 else None
        if only is None or self.order is not None or not isinstance(only.format, DenseFormat):
            return None
        return only.tensors["values"]

    @cached_property
    def device(self) -> Device:
        return next(self.tensors()).device

    @cached_property
    def activation_dtypes(self) -> frozenset[np.dtype[Any]]:
        """Of what it can multiply; a bias has the activations' dtype."""
        return frozenset(
            dtype
            for dtype in FLOAT_DTYPES
            if all(part.format.multiplies(dtype) for part in self.parts)
            and (self.bias is None or self.bias.dtype == dtype)
        )

    @property
    def num_parameters(self) -> int:
        return int(np.prod(self.shape)) + (0 if self.bias is None else self.bias.size)

    def __repr__(self) -> str:
        formats = ", ".join(f"{part.shape[0]} rows {part.format}" for part in self.parts)
        return f"LinearWeight({self.shape}, {formats}, {self.device})"

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.tensors.values()
        if self.bias is not None:
            yield self.bias
        if self.order is not None:
            yield self.order
