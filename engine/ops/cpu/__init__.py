"""The operations in NumPy: the reference for the kernels, and what serves machines without a GPU."""

from __future__ import annotations

from tessera.engine.ops.cpu.activation import ActivationOps
from tessera.engine.ops.cpu.attention import AttentionOps
from tessera.engine.ops.cpu.elementwise import ElementwiseOps
from tessera.engine.ops.cpu.encoder import EncoderOps
from tessera.engine.ops.cpu.linear import LinearOps
from tessera.engine.ops.cpu.moe import MoEOps
from tessera.engine.ops.cpu.norm import NormOps
from tessera.engine.ops.cpu.random import RandomOps
from tessera.engine.ops.cpu.sampling import SamplingOps
from tessera.engine.ops.cpu.softmax import SoftmaxOps
from tessera.engine.ops.cpu.workspace import Workspace
from tessera.engine.tensor import CPU, CpuDevice


class CpuOps(
    LinearOps,
    MoEOps,
    AttentionOps,
    NormOps,
    ActivationOps,
    ElementwiseOps,
    SoftmaxOps,
    RandomOps,
    SamplingOps,
    EncoderOps,
):
    """Computes in float32 whatever the dtype, and rounds once at the output. For one thread at a time."""

    def __init__(self, device: CpuDevice = CPU) -> None:
        self.device = device
        self.workspace = Workspace()
