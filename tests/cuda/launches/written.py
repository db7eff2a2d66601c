"""Launches that a device without a GPU writes down, and what must hold for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.engine.cuda.kernel import Kernel, KernelSpec, LaunchConfig, P
from tessera.engine.ops.cuda.types import C_TYPE_NAMES
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.tensor import (
    Buffer,
    CpuDevice,
    Tensor,
    bfloat16,
    empty,
    int8,
    int32,
    uint8,
    uint32,
    uint64,
)

SMALLEST_SHARED_BYTES = 99 << 10  # what a block may use on sm_86, 89 and 120
LARGE_SHARED_BYTES = 227 << 10  # sm_90, 100
C_TYPES = {name: dtype for dtype, name in C_TYPE_NAMES.items()} | {
    "int": int32,
    "signed char": int8,
    "unsigned char": uint8,
    "unsigned": uint32,
    "unsigned long long": uint64,
}
LARGEST_GRID = (2**31 - 1, 65535, 65535)


@dataclass
class Launch:
    spec: KernelSpec[Any]
    template: tuple[str, ...]
    config: LaunchConfig
    params: Any


class WritingDevice(CpuDevice):
    name = "cuda:0"
    device_name = "written"
    is_capturing = False

    def __init__(self, multiprocessors: int = 132, arch: str = "80", *, clusters: bool = False) -> None:
        self.multiprocessors = multiprocessors
        self.arch = arch
        self.compute_capability = (9, 0) if clusters else (8, 9)
        self.max_shared_bytes = LARGE_SHARED_BYTES if clusters else SMALLEST_SHARED_BYTES
        self.launches: list[Launch] = []
        self.allocated: list[int] = []

    def allocate(self, nbytes: int) -> Buffer:
        self.allocated.append(nbytes)
        return Buffer(self, 1 << 20, nbytes, None)

    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None:
        pass

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        self.launches.append(Launch(spec, template, config, params))


def check_launch(
    launch: Launch, compiled: set[tuple[KernelSpec[Any], tuple[str, ...]]], shared_bytes: int = SMALLEST_SHARED_BYTES
) -> None:
    assert (launch.spec, launch.template) in compiled, f"{launch.spec.name} {launch.template} is not compiled ahead"
    check_params(launch)
    assert launch.config.shared_bytes <= shared_bytes
    assert all(1 <= size <= most for size, most in zip(launch.config.grid, LARGEST_GRID, strict=True))


def check_params(launch: Launch) -> None:
    """Every parameter fits its field, and tensors have the type that the kernel takes them for."""
    Kernel(launch.spec, None).set_params(launch.params)
    types = dict(zip(launch.spec.template, launch.template, strict=True))
    for field, value in zip(launch.spec.fields, launch.params, strict=True):
        if isinstance(value, Tensor):
            element = field.type.replace("const ", "").split("*")[0]
            if element == "SamplingRow":
                continue  # as bytes
            assert C_TYPES[types.get(element, element)] == value.dtype, f"{launch.spec.name}: {field.type} {field.name}"


def attention_step(
    device: WritingDevice,
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    block_size = 16
    width = -(-max(context_lens) // block_size)
    metadata = AttentionMetadata(
        positions=empty((num_tokens,), int32, device),
        slot_mapping=empty((num_tokens,), int32, device),
        block_tables=empty((num_seqs, width), int32, device),
        table_rows=empty((num_seqs,), int32, device),
        cu_seqlens_q=empty((num_seqs + 1,), int32, device),
        context_lens=empty((num_seqs,), int32, device),
        max_seqlen_q=max(query_lens),
        max_context_len=max(context_lens),
    )
    q = empty((num_tokens, num_heads * head_dim), bfloat16, device)
    return q, empty((64, num_kv_heads, block_size, head_dim), bfloat16, device), metadata
