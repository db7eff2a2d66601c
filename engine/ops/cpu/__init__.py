"""The operations in NumPy: the reference for the kernels, and what serves machines without a GPU."""

from __future__ import annotations

from engine.ops.cpu.activation import ActivationOps
from engine.ops.cpu.attention import AttentionOps
from engine.ops.cpu.elementwise import ElementwiseOps
from engine.ops.cpu.encoder import EncoderOps
from engine.ops.cpu.linear import LinearOps
from engine.ops.cpu.norm import NormOps
from engine.ops.cpu.random import RandomOps
from engine.ops.cpu.sampling import SamplingOps
from engine.ops.cpu.softmax import SoftmaxOps
from engine.ops.cpu.workspace import Workspace
from engine.tensor import CPU, CpuDevice


class CpuOps(
    LinearOps, AttentionOps, NormOps, ActivationOps, ElementwiseOps, SoftmaxOps, RandomOps, SamplingOps, EncoderOps
):
    """Computes in float32 whatever the dtype, and rounds once at the output. For one thread at a time."""

    def __init__(self, device: CpuDevice = CPU) -> None:
        self.device = device
        self.workspace = Workspace()
