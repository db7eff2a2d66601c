"""Tensors on a device. Public: the names below."""

from tessera.engine.tensor.cpu import CPU, CpuDevice
from tessera.engine.tensor.device import Buffer, Device, HostMemory, Mark
from tessera.engine.tensor.dtypes import FLOAT_DTYPES, bfloat16, float16, float32, int8, int32, uint8, uint32, uint64
from tessera.engine.tensor.tensor import Tensor, empty, from_numpy, zeros

__all__ = [
    "CPU",
    "FLOAT_DTYPES",
    "Buffer",
    "CpuDevice",
    "Device",
    "HostMemory",
    "Mark",
    "Tensor",
    "bfloat16",
    "empty",
    "float16",
    "float32",
    "from_numpy",
    "int8",
    "int32",
    "uint8",
    "uint32",
    "uint64",
    "zeros",
]
