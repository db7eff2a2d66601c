"""Which kernels a grid of problems launches on devices of four kinds: `python -m tests.cuda.choices` writes CHOICES.

A line is a device, a problem, and its launches: kernel, grid, threads, dynamic shared memory, cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig, P
from tessera.engine.formats import KERNEL_FORMATS, Fp8Format, LinearWeight, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.types import C_TYPE_NAMES
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.ops.linear_interface import Activate, RMSNorm
from tessera.engine.tensor import Buffer, CpuDevice, Tensor, bfloat16, float32, int32

CHOICES = Path(__file__).parent / "choices.txt"
CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # of 1, 2, ... blocks that an H200 runs at a time
DEVICES = {
    "h200": ("90a", 132, 227 << 10),
    "a100": ("80", 108, 163 << 10),
    "l4": ("89", 58, 99 << 10),
    "b200": ("100a", 148, 227 << 10),
}
BATCH_INVARIANT = ("h200", "a100")
FEATURES = [(6144, 4096), (14336, 4096), (4096, 14336), (1024, 3072), (3072, 1024), (100, 72)]  # of result and x
ROWS = [1, 3, 8, 16, 17, 32, 33, 64, 65, 200, 1000, 1024, 1280, 8192]
INT8_ROWS = [257, 512, 1024, 2048, 8192]
DRAFTS = [([8], [384]), ([8] * 16, [384] * 16), ([3, 1, 16], [300, 9, 9000])]
STEPS = [([1], [3000]), ([1] * 8, [2048] * 8), ([1] * 40, [2049] * 40), ([300, 1], [300, 9]), ([2000], [9000])]


class GridDevice(CpuDevice):
    name = "cuda:0"
    device_name = "grid"
    is_capturing = False

    def __init__(self, arch: str, multiprocessors: int, max_shared_bytes: int) -> None:
        number = int(arch.rstrip("a"))
        self.arch, self.compute_capability = arch, (number // 10, number % 10)
        self.multiprocessors, self.max_shared_bytes = multiprocessors, max_shared_bytes
        self.launches: list[str] = []

    def allocate(self, nbytes: int) -> Buffer:
        return Buffer(self, 1 << 20, nbytes, None)

    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None: ...

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return CLUSTERS[config.cluster - 1]

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        grid = "x".join(map(str, config.grid))
        sizes = f"{grid} {config.block[0]} {config.shared_bytes} {config.cluster}"
        self.launches.append(f"{spec.instantiation(template)} {sizes}")

    def tensor(self, *shape: int, dtype: np.dtype[Any] = bfloat16) -> Tensor:
        return Tensor(Buffer(self, 1 << 20, 1 << 42, None), shape, dtype)


Problems: TypeAlias = "Callable[[CudaOps, GridDevice], Iterator[tuple[str, Callable[[], object]]]]"


def linear_problems(ops: CudaOps, device: GridDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    for (n, k), m, dtype in product(FEATURES, ROWS, (bfloat16, float32)):
        if dtype == float32 and (m > 64 or n > 6144):
            continue
        x, out, weight = (device.tensor(*shape, dtype=dtype) for shape in ((m, k), (m, n), (n, k)))
        name = f"{C_TYPE_NAMES[dtype]} {m}x{k}x{n}"
        yield f"plain {name}", partial(ops.matmul, x, weight, out=out)
        if dtype == float32:
            continue
        logits = device.tensor(m, n, dtype=float32)
        yield f"logits {name}", partial(ops.matmul, x, weight, out=logits)
        both = LinearWeight.of(device.tensor(2 * n, k))
        norm = RMSNorm(device.tensor(k), 1e-5, device.tensor(m, k))
        gate = Activate("silu_mul", device.tensor(m, 2 * n))
        yield (
            f"normed gated {name}",
            partial(ops.linear, x, both, prologue=norm, epilogue=gate, out=out),
        )


def fp8_problems(ops: CudaOps, device: GridDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    for scheme, (n, k), m in product((Fp8Format(), Fp8Format(block=(128, 128))), FEATURES[1:4], ROWS[::2]):
        layouts = scheme.layout(n, k)
        tensors = [device.tensor(*layout.shape, dtype=layout.dtype) for layout in layouts]
        weight = LinearWeight((WeightPart(scheme, (n, k), dict(zip(scheme.tensor_names, tensors, strict=True))),))
        x, out, half = device.tensor(m, k), device.tensor(m, n), device.tensor(m, n // 2)
        norm = RMSNorm(device.tensor(k), 1e-5, device.tensor(m, k))
        name = f"fp8 {'rows' if scheme.block is None else 'blocks'} {m}x{k}x{n}"
        yield f"plain {name}", partial(ops.linear, x, weight, out=out)
        gate = Activate("silu_mul", device.tensor(m, n))
        yield f"normed gated {name}", partial(ops.linear, x, weight, prologue=norm, epilogue=gate, out=half)


def int8_problems(ops: CudaOps, device: GridDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    format = KERNEL_FORMATS["Q4_K"]
    for (n, k), m in product(FEATURES[:3], INT8_ROWS):
        tensors = [device.tensor(*layout.shape, dtype=layout.dtype) for layout in format.layout(n, k)]
        weight = LinearWeight((WeightPart(format, (n, k), dict(zip(format.tensor_names, tensors, strict=True))),))
        x, out, half = device.tensor(m, k), device.tensor(m, n), device.tensor(m, n // 2)
        norm = RMSNorm(device.tensor(k), 1e-5, device.tensor(m, k))
        yield f"plain int8 {m}x{k}x{n}", partial(ops.linear, x, weight, out=out)
        gate = Activate("silu_mul", device.tensor(m, n))
        yield f"normed gated int8 {m}x{k}x{n}", partial(ops.linear, x, weight, prologue=norm, epilogue=gate, out=half)


def attention_problems(
    ops: CudaOps, device: GridDevice, *, drafts: bool = False
) -> Iterator[tuple[str, Callable[[], object]]]:
    steps = DRAFTS if drafts else STEPS
    for head_dim, (heads, kv_heads), (queries, contexts) in product((64, 72, 80, 128, 256), ((32, 8), (4, 4)), steps):
        tokens, rows, width = sum(queries), len(queries), -(-max(contexts) // 16)
        metadata = AttentionMetadata(
            positions=device.tensor(tokens, dtype=int32),
            slot_mapping=device.tensor(tokens, dtype=int32),
            block_tables=device.tensor(rows, width, dtype=int32),
            table_rows=device.tensor(rows, dtype=int32),
            cu_seqlens_q=device.tensor(rows + 1, dtype=int32),
            context_lens=device.tensor(rows, dtype=int32),
            max_seqlen_q=max(queries),
            max_context_len=max(contexts),
            verifies=drafts,
        )
        cache = device.tensor(4096, kv_heads, 16, head_dim)
        out = device.tensor(tokens, heads * head_dim)
        qkv = device.tensor(tokens, (heads + 2 * kv_heads) * head_dim)
        name = f"{'drafts' if drafts else 'attention'} {heads}/{kv_heads}x{head_dim} rows {rows}"
        yield (
            f"{name} queries {max(queries)} context {max(contexts)}",
            partial(
                ops.attention,
                *(qkv, cache, cache, metadata, HeadTransform()),
                num_heads=heads,
                scale=0.1,
                queries=out,
                out=out,
            ),
        )


def choices() -> Iterator[str]:
    """Lines of CHOICES. Tensor maps must be made without a driver."""
    kinds = [(name, False) for name in DEVICES] + [(name, True) for name in BATCH_INVARIANT]
    for name, batch_invariant in kinds:
        device = GridDevice(*DEVICES[name])
        ops = CudaOps(device, batch_invariant=batch_invariant)  # type: ignore[arg-type]
        ops.reserve_attention(64, 32, 128)
        ops.rounds_many_rows = name == "h200" and not batch_invariant
        kinds_of_problems: list[Problems] = [linear_problems, fp8_problems, attention_problems]
        kinds_of_problems += [partial(attention_problems, drafts=True), *[int8_problems] * ops.rounds_many_rows]
        for problems in kinds_of_problems:
            for problem, run in problems(ops, device):
                device.launches.clear()
                run()
                kind = f"{name} batch-invariant" if batch_invariant else name
                yield f"{kind} {problem}: {'; '.join(device.launches)}\n"


if __name__ == "__main__":
    from tessera.engine.ops.cuda.attention import sm90_prefill
    from tessera.engine.ops.cuda.fp8 import sm90 as sm90_fp8
    from tessera.engine.ops.cuda.fp8 import sm90_rows
    from tessera.engine.ops.cuda.linear import sm90

    maps = [(module, "box_map") for module in (sm90, sm90_fp8, sm90_rows)]
    for module, name in (*maps, (sm90_rows, "parts_map"), (sm90_prefill, "row_groups_map")):
        setattr(module, name, lambda *_: bytes(128))
    CHOICES.write_text("".join(choices()))
