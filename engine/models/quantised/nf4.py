"""Matrices of NF4: bitsandbytes, with absolute maxima that may be quantised themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import Nf4Format
from tessera.engine.formats.format import Array
from tessera.engine.formats.nf4 import NF4_VALUES
from tessera.engine.models.fields import Fields, is_integer, parse_json_object
from tessera.engine.models.quantised.stored import ModuleTensors, Scheme, StoredMatrix
from tessera.engine.tensor import bfloat16, float16, float32, uint8

STATE = "weight.quant_state.bitsandbytes__nf4"
MAX_BLOCK = 4096


@dataclass(frozen=True)
class Nf4Scheme(Scheme):
    """`weight` has two codes in a byte, the first in its high half, and `weight.absmax` the scale of each block.

    Blocks run through the rows one after the other. With double quantisation absmax is codes of
    `weight.nested_quant_map`, times `weight.nested_absmax` of their own blocks, plus an offset
    (bitsandbytes, functional.py).
    """

    weight = "weight"
    others = (
        *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(STATE, "weight.quant_state.bitsandbytes__fp4"),
    )

    def open(self, tensors: ModuleTensors) -> StoredMatrix:
        return Nf4Matrix(tensors)

    def __str__(self) -> str:
        return "NF4"


class Nf4Matrix(StoredMatrix):
    def __init__(self, tensors: ModuleTensors) -> None:
        state = Fields(f"{tensors.module}.{STATE}", _state(tensors))
        block = state.integer("blocksize", 2, MAX_BLOCK)
        shape = state.raw("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(is_integer(n) and 0 < n < 2**31 for n in shape):
            state.refuse("shape", "a list of two sizes")
        rows, columns = self.shape = (shape[0], shape[1])
        if columns % block or block % 2:
            raise ModelError(f"{tensors.module}: rows of {columns} columns are not whole blocks of {block}")
        stored = tensors.tensor("weight", (uint8, float32, float16, bfloat16))
        self._codes = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        if self._codes.size * 2 != rows * columns:
            tensors.refuse(
                "weight", f"has {self._codes.size} bytes, but {rows} x {columns} codes take half their number"
            )
        table = tensors.tensor("weight.quant_map", (float32,), (16,), why="codes of 4 bits")
        if not np.allclose(table, NF4_VALUES, atol=1e-6):
            tensors.refuse("weight.quant_map", "has other values than NF4")
        self.format = Nf4Format(block)
        self._scales = self._absolute_maxima(tensors, state, rows * columns // block).reshape(rows, -1)

    @staticmethod
    def _absolute_maxima(tensors: ModuleTensors, state: Fields, count: int) -> Array:
        why = f"{count} blocks"
        if not tensors.has("weight.nested_absmax"):
            return tensors.tensor("weight.absmax", (float32,), (count,), why=why)
        size = state.integer("nested_blocksize", 1, MAX_BLOCK)
        offset = np.float32(state.number("nested_offset", -1e6, 1e6))
        codes = tensors.tensor("weight.absmax", (uint8,), (count,), why=why)
        table = tensors.tensor("weight.nested_quant_map", (float32,), (256,), why="codes of 8 bits")
        largest = tensors.tensor("weight.nested_absmax", (float32,), (-(-count // size),), why=why)
        maxima: Array = table[codes] * np.repeat(largest, size)[:count] + offset
        return maxima

    def array(self, name: str, rows: slice) -> Array:
        if name == "scales":
            return self._scales[rows]
        stored = self._codes.reshape(self.shape[0], -1)[rows]
        return stored >> np.uint8(4) | stored << np.uint8(4)


def _state(tensors: ModuleTensors) -> dict[str, object]:
    stored = tensors.tensor(STATE, (uint8,))
    return parse_json_object(stored.tobytes(), f"{tensors.module}.{STATE}")
