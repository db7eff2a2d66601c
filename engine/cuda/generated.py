"""CUDA headers made from Python declarations, so that the two sides of a launch cannot drift apart."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

C_TYPES = {
    "<i4": "int",
    "<u4": "unsigned",
    "<i8": "long long",
    "<u8": "unsigned long long",
    "<f4": "float",
}


class GeneratedHeader(NamedTuple):
    """A header that a kernel's source includes by `name`, but that is in no file."""

    name: str
    text: str


def c_struct(name: str, dtype: np.dtype[Any], alignment: int) -> str:
    """A struct whose fields lie where those of a structured dtype do; a compiler that sees it otherwise fails.

    Raises: ValueError for a dtype that C has no struct for.
    """
    fields, sizes = [], []
    for field in dtype.names or ():
        format, offset = dtype.fields[field][:2]  # type: ignore[index]
        if format.str not in C_TYPES or offset % format.itemsize:
            raise ValueError(f"{name}.{field} is {format} at byte {offset}, which no C struct has")
        fields.append(f"  {C_TYPES[format.str]} {field};\n")
        sizes.append(f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "{name}.{field}");\n')
    if dtype.itemsize % alignment:
        raise ValueError(f"{name} has {dtype.itemsize} bytes, not a multiple of {alignment}")
    sizes.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");\n')
    return "".join([f"struct alignas({alignment}) {name} {{\n", *fields, "};\n", *sizes])


def c_enum(name: str, values: type[enum.IntEnum]) -> str:
    """Its members as `name::MEMBER`, unsigned."""
    members = "".join(f"  {member} = {int(value)}u,\n" for member, value in values.__members__.items())
    return f"struct {name} {{ enum : unsigned {{\n{members}}}; }};\n"
