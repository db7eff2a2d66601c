"""CUDA headers made from Python declarations, so that the two sides of a launch cannot drift apart.

The compiler gets them from memory; `python -m tessera.engine.ops.cuda.generate FOLDER` writes them down for an editor.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.params import fields_of, signature_of

C_TYPES = {
    "<i4": "int",
    "<u4": "unsigned",
    "<i8": "long long",
    "<u8": "unsigned long long",
    "<f4": "float",
}


class Constant(int):
    """An integer that Python and kernels share; `about` is its comment in the header."""

    about: str

    def __new__(cls, value: int, about: str = "") -> Constant:
        constant = super().__new__(cls, value)
        constant.about = about
        return constant


class Header(NamedTuple):
    """A header that is in no file.

    Attributes:
        source: the Python module that declares it.
        text: of the header.
    """

    source: str
    text: str


HEADERS: dict[str, Header] = {}  # all that are declared, by what kernels include them as


def declare_header(
    name: str,
    source: str,
    constants: Mapping[str, int] | None = None,
    params: Sequence[type[tuple[Any, ...]]] = (),
    declarations: str = "",
) -> None:
    """Make `generated/<name>.cuh` known to the compiler.

    It has constants, the signatures of kernels with these parameters, and other declarations in C++. `source` is the
    module that calls this. Raises: DeviceError if another module has declared the header.
    """
    path = f"generated/{name}.cuh"
    known = HEADERS.get(path)
    if known is not None and known.source != source:
        raise DeviceError(f"{source} and {known.source} both declare {path}")
    lines = "".join(_constant(name, value) for name, value in (constants or {}).items())
    parts = [f"// Generated from {source}.\n#pragma once\n", lines, *map(_signature, params), declarations]
    HEADERS[path] = Header(source, "\n".join(part for part in parts if part))


def _constant(name: str, value: int) -> str:
    about = value.about if isinstance(value, Constant) else ""
    kind = "int" if value < 1 << 31 else "unsigned"
    return f"constexpr {kind} {name} = {int(value)};" + (f"  // {about}" if about else "") + "\n"


def _signature(params: type[tuple[Any, ...]]) -> str:
    fields = ", \\\n  ".join(f"{field.type} {field.name}" for field in fields_of(params))
    return f"#define {signature_of(params)} \\\n  {fields}\n"


def c_struct(name: str, dtype: np.dtype[Any], alignment: int) -> str:
    """A struct whose fields lie where those of a structured dtype do.

    Raises: ValueError for a dtype that C lays out otherwise. A compiler that does fails at the size.
    """
    fields, end = [], 0
    for field in dtype.names or ():
        format, offset = dtype.fields[field][:2]  # type: ignore[index]
        end = -(-end // format.itemsize) * format.itemsize
        if format.str not in C_TYPES or offset != end:
            raise ValueError(f"{name}.{field} is {format} at byte {offset}; C has it at {end}, if it has such a type")
        end += format.itemsize
        fields.append(f"  {C_TYPES[format.str]} {field};\n")
    if -(-end // alignment) * alignment != dtype.itemsize:
        raise ValueError(f"{name} has {dtype.itemsize} bytes, where C has {end} aligned to {alignment}")
    size = f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");\n'
    return "".join([f"struct alignas({alignment}) {name} {{\n", *fields, "};\n", size])


def c_enum(name: str, values: type[enum.IntEnum]) -> str:
    """Its members as `name::MEMBER`, unsigned."""
    members = "".join(f"  {member} = {int(value)}u,\n" for member, value in values.__members__.items())
    return f"struct {name} {{ enum : unsigned {{\n{members}}}; }};\n"
