"""How a kernel is described to Python: once, by name, so that a drifted argument is found by a test.

A `KernelSpec` names the file, the template arguments and the parameters of one `__global__`
function; `Kernel` (made by `CudaDevice.kernel`) is its compiled form for one choice of template
arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, NamedTuple

ParameterType = Literal["pointer", "int32", "int64", "uint32", "uint64", "float32"]

C_TYPES: dict[ParameterType, type[ctypes._SimpleCData]] = {
    "pointer": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
}


class LaunchConfig(NamedTuple):
    """Grid and block in (x, y, z), dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """One `__global__` template.

    Attributes:
        file: under `cuda_src/`, for example `rmsnorm.cu`.
        name: of the function, for example `rmsnorm_kernel`.
        template: names of its template parameters in order, as in the source.
        parameters: names and types of its parameters in order, as in the source.
        min_arch: lowest compute capability times ten it compiles for (80, 90); `arch_specific`
            kernels (sm_90a) compile for that architecture only.
    """

    file: str
    name: str
    template: tuple[str, ...]
    parameters: tuple[tuple[str, ParameterType], ...]
    min_arch: int = 80
    arch_specific: bool = False
