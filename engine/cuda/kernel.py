"""How a kernel is described to Python: once, by name, so that a drifted argument is found by a test.

A `KernelSpec` names the file, the template arguments and the parameters of one `__global__`
function; a `Kernel` is its compiled form for one choice of template arguments, with the block of
memory that its arguments are written to at each launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.generated import GeneratedHeader
from tessera.engine.tensor import Tensor

ParameterType = Literal["pointer", "int32", "int64", "uint32", "uint64", "float32", "tensor_map"]

STRUCT_CODES: dict[ParameterType, str] = {
    "pointer": "Q",
    "int32": "i",
    "int64": "q",
    "uint32": "I",
    "uint64": "Q",
    "float32": "f",
    "tensor_map": "128s",
}


class LaunchConfig(NamedTuple):
    """Grid and block in (x, y, z), dynamic shared memory in bytes, blocks along x that form a cluster (sm_90 on)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One `__global__` template; compared by identity, because launches look kernels up by it.

    Attributes:
        file: under `cuda_src/`, for example `norm/rmsnorm.cu`.
        name: of the function, for example `rmsnorm_kernel`.
        template: names of its template parameters in order, as in the source.
        parameters: names and types of its parameters in order, as in the source.
        headers: that the file includes but are not in `cuda_src/`.
        min_arch: lowest compute capability times ten it compiles for (80, 90); `arch_specific`
            kernels (sm_90a) compile for that architecture only.
        overlaps: the source calls `wait_for_earlier_kernels` before it touches what earlier kernels
            write, so in a graph it may start while they end (programmatic dependent launch, sm_90 on).
    """

    file: str
    name: str
    template: tuple[str, ...]
    parameters: tuple[tuple[str, ParameterType], ...]
    headers: tuple[GeneratedHeader, ...] = ()
    min_arch: int = 80
    arch_specific: bool = False
    overlaps: bool = False

    def supports(self, arch: str) -> bool:
        """Whether it compiles for `arch` ('80', '90a')."""
        number = int(arch.rstrip("a"))
        return number == self.min_arch if self.arch_specific else number >= self.min_arch

    def instantiation(self, template: tuple[str, ...]) -> str:
        """The C++ expression that names it with these template arguments."""
        if len(template) != len(self.template):
            raise DeviceError(f"{self.name} has template parameters {self.template}, but was given {template}")
        return f"{self.name}<{', '.join(template)}>" if template else self.name


Instantiation = tuple[KernelSpec, tuple[str, ...]]

Argument = Tensor | int | float | bytes | None  # a tensor stands for its pointer, None for 0; maps are bytes


class Kernel:
    """A loaded function and its argument block.

    Attributes:
        function: the driver's handle.
        arguments_address: of the array of pointers to the arguments, as a launch wants it.
    """

    __slots__ = ("_block", "_pack_into", "_pointers", "arguments_address", "function", "spec")

    def __init__(self, spec: KernelSpec, function: Any) -> None:
        codes = [STRUCT_CODES[kind] for _, kind in spec.parameters]
        # Padding comes before an argument, never after it, so each ends where those up to it do.
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        packer = struct.Struct("@" + "".join(codes))
        self.spec = spec
        self.function = function
        self._block = ctypes.create_string_buffer(max(packer.size, 1))
        base = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * max(len(codes), 1))(*[base + offset for offset in offsets])
        self._pack_into = packer.pack_into
        self.arguments_address = ctypes.addressof(self._pointers)

    def set_arguments(self, arguments: Sequence[Argument]) -> None:
        """Write one launch's arguments.

        Raises: DeviceError if number, type or range of the arguments do not fit the parameters.
        """
        values = [
            argument.pointer if isinstance(argument, Tensor) else 0 if argument is None else argument
            for argument in arguments
        ]
        try:
            self._pack_into(self._block, 0, *values)
        except (struct.error, TypeError) as error:
            wanted = ", ".join(f"{kind} {name}" for name, kind in self.spec.parameters)
            raise DeviceError(f"{self.spec.name}({wanted}) launched with {values}: {error}") from error
