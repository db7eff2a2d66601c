"""A kernel's description, and its compiled form with the memory that a launch's parameters are written to."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.params import MAP_BYTES, MAP_CODE, Field, fields_of
from tessera.engine.tensor import Tensor

P = TypeVar("P", bound=tuple[Any, ...])


class LaunchConfig(NamedTuple):
    """Grid and block in (x, y, z), dynamic shared memory in bytes, blocks along x that form a cluster (sm_90 on)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, eq=False)
class KernelSpec(Generic[P]):
    """One `__global__` template; compared by identity, because launches look kernels up by it.

    Attributes:
        file: under `cuda_src/`, for example `norm/rmsnorm.cu`.
        name: of the function, for example `rmsnorm_kernel`.
        template: names of its template parameters in order, as in the source.
        params: NamedTuple of its parameters (`tessera.engine.cuda.params`).
        min_arch: lowest compute capability times ten it compiles for (80, 90); `arch_specific`
            kernels (sm_90a) compile for that architecture only.
        overlaps: the source calls `wait_for_earlier_kernels` before it touches what earlier kernels
            write, so in a graph it may start while they end (programmatic dependent launch, sm_90 on).
        writes_weights: it writes what the next kernel takes for weights and may read before it waits, so that
            one never starts early.
        batch_invariant: only engines whose results must not depend on the batch launch it.
        on_demand: only some models launch it: those with weights of certain formats, for which `Ops.reserve_linear`
            compiles it, or with operations that few models have, for which `CudaOps.compile` is told; or
            training alone does.
    """

    file: str
    name: str
    template: tuple[str, ...]
    params: type[P]
    min_arch: int = 80
    arch_specific: bool = False
    overlaps: bool = False
    writes_weights: bool = False
    batch_invariant: bool = False
    on_demand: bool = False

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The parameters in order."""
        return fields_of(self.params)

    def supports(self, arch: str) -> bool:
        """Whether it compiles for `arch` ('80', '90a')."""
        number = int(arch.rstrip("a"))
        return number == self.min_arch if self.arch_specific else number >= self.min_arch

    def instantiation(self, template: tuple[str, ...]) -> str:
        """The C++ expression that names it with these template arguments."""
        if len(template) != len(self.template):
            raise DeviceError(f"{self.name} has template parameters {self.template}, but was given {template}")
        return f"{self.name}<{', '.join(template)}>" if template else self.name


Instantiation = tuple[KernelSpec[Any], tuple[str, ...]]


class Kernel:
    """A loaded function and the memory of its parameters.

    Attributes:
        function: the driver's handle.
        arguments_address: of the array of pointers to the parameters, as a launch wants it.
    """

    __slots__ = ("_block", "_maps", "_pack_into", "_pointers", "_tensors", "arguments_address", "function", "spec")

    def __init__(self, spec: KernelSpec[Any], function: Any) -> None:
        codes = [field.code for field in spec.fields]
        # Padding comes before a parameter, never after it, so each ends where those up to it do.
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        packer = struct.Struct("@" + "".join(codes))
        self.spec = spec
        self.function = function
        self._tensors = [index for index, field in enumerate(spec.fields) if field.is_pointer]
        self._maps = [index for index, code in enumerate(codes) if code == MAP_CODE]
        self._pack_into = packer.pack_into
        self._block = ctypes.create_string_buffer(max(packer.size, 1))
        base = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * max(len(codes), 1))(*[base + offset for offset in offsets])
        self.arguments_address = ctypes.addressof(self._pointers)

    def set_params(self, params: tuple[Any, ...]) -> None:
        """Write one launch's parameters.

        Raises: DeviceError if they are another kernel's, or if a field's type or range does not fit.
        """
        if params.__class__ is not self.spec.params:
            raise DeviceError(f"{self.spec.name} takes {self.spec.params.__name__}, not {type(params).__name__}")
        values = list(params)
        for index in self._tensors:
            value = values[index]
            if value.__class__ is Tensor:
                values[index] = value.buffer.pointer + value.offset
            elif value is None:
                values[index] = 0
        for index in self._maps:
            if len(values[index]) != MAP_BYTES:  # the packer would cut it or fill it up
                raise self._misfit(values)
        try:
            self._pack_into(self._block, 0, *values)
        except (struct.error, TypeError):
            raise self._misfit(values) from None

    def _misfit(self, values: list[Any]) -> DeviceError:
        """The error that names the fields that do not fit."""
        wrong = [
            f"{field.type} {field.name} cannot be {value!r}"
            for field, value in zip(self.spec.fields, values, strict=True)
            if not field.fits(value)
        ]
        return DeviceError(f"{self.spec.name} was launched with wrong parameters: {'; '.join(wrong)}")
