"""Kernel parameters, declared in Python.

A kernel's parameters are a NamedTuple whose field types say what they are in C++: `InT` is a `const T*`, `Int32` an
`int`. Its signature is the macro that is generated from it (`RmsnormParams` becomes `RMSNORM_PARAMS(T)`), and a launch
names the fields.

The macro is a list of parameters and not a struct, because compilers load a struct's members into registers where they
take a parameter from constant memory at each use: with structs 116 of 258 kernels for sm_90a had other registers,
decode attention up to 59 more or spills.
"""

from __future__ import annotations

import re
import struct
from typing import Annotated, Any, NamedTuple, get_type_hints

from tessera.engine.contract.errors import DeviceError
from tessera.engine.tensor import Tensor

Pointer = Tensor | int | None  # a tensor of the device, an address, or null

InT = Annotated[Pointer, "const T*"]
OutT = Annotated[Pointer, "T*"]
OutOut = Annotated[Pointer, "Out*"]
InCached = Annotated[Pointer, "const Cached*"]
OutCached = Annotated[Pointer, "Cached*"]
InInt = Annotated[Pointer, "const int*"]
OutInt = Annotated[Pointer, "int*"]
InUint = Annotated[Pointer, "const unsigned*"]
OutUint = Annotated[Pointer, "unsigned*"]
InFloat = Annotated[Pointer, "const float*"]
OutFloat = Annotated[Pointer, "float*"]
Int32 = Annotated[int, "int"]
Int64 = Annotated[int, "long long"]
Uint32 = Annotated[int, "unsigned"]
Uint64 = Annotated[int, "unsigned long long"]
Float32 = Annotated[float, "float"]
TensorMap = Annotated[bytes, "const __grid_constant__ TensorMap"]

# Memory that nothing else writes while the kernel runs: loads may take the way of constant memory. Not for kernels that
# overlap with earlier ones.
RestrictInT = Annotated[Pointer, "const T* __restrict__"]
RestrictInCached = Annotated[Pointer, "const Cached* __restrict__"]
RestrictOutT = Annotated[Pointer, "T* __restrict__"]
RestrictOutOut = Annotated[Pointer, "Out* __restrict__"]
RestrictInInt = Annotated[Pointer, "const int* __restrict__"]
RestrictInFloat = Annotated[Pointer, "const float* __restrict__"]
RestrictOutFloat = Annotated[Pointer, "float* __restrict__"]

MAP_BYTES = 128  # of a tensor map
POINTER_CODE = "Q"  # of the `struct` module, as the others
MAP_CODE = f"{MAP_BYTES}s"
CODES = {
    "int": "i",
    "long long": "q",
    "unsigned": "I",
    "unsigned long long": "Q",
    "float": "f",
    "const __grid_constant__ TensorMap": MAP_CODE,
}
TYPE_PARAMETERS = re.compile(r"\b(?:T|Out|Cached|Source|Target)\b")  # of kernels, as far as fields have them
WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Field(NamedTuple):
    """A kernel's parameter: its name, its type in C++ and its code for the `struct` module."""

    name: str
    type: str
    code: str

    @property
    def is_pointer(self) -> bool:
        return "*" in self.type

    def fits(self, value: object) -> bool:
        """Whether a value can be passed, a pointer as a number."""
        if self.code == MAP_CODE:
            return isinstance(value, bytes) and len(value) == MAP_BYTES
        try:
            struct.pack(self.code, value)
        except (struct.error, TypeError):
            return False
        return True


def fields_of(params: type[tuple[Any, ...]]) -> tuple[Field, ...]:
    """The fields of a NamedTuple of the types above. Raises: DeviceError for a field of another type."""
    fields = []
    for name, hint in get_type_hints(params, include_extras=True).items():
        (text,) = getattr(hint, "__metadata__", ("",))
        code = POINTER_CODE if "*" in text else CODES.get(text)
        if code is None:
            raise DeviceError(f"{params.__name__}.{name} has no type that a kernel takes: {hint}")
        fields.append(Field(name, text, code))
    return tuple(fields)


def signature_of(params: type[tuple[Any, ...]]) -> str:
    """The macro that stands for a kernel's parameters, with its arguments: `RMSNORM_PARAMS(T)`."""
    types = " ".join(field.type for field in fields_of(params))
    template = ", ".join(dict.fromkeys(TYPE_PARAMETERS.findall(types)))
    name = WORD_STARTS.sub("_", params.__name__).upper()
    return f"{name}({template})" if template else name
