"""Microseconds of each kernel on the shapes that matter, beside PyTorch's where that is installed.

Each figure is the mean over a replayed graph of calls that rotate through enough copies of the weights to
find the L2 cache cold, as a decode step does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from engine.cuda.device import CudaDevice
from engine.ops.cuda import CudaOps
from engine.ops.interface import AttentionMetadata
from engine.tensor import Tensor, bfloat16, empty, float32, from_numpy

COLD_BYTES = 300 << 20  # several times the L2
CALLS = 20
REPLAYS = 5
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (1024, 4096), (1024, 6144), (3072, 1024))
HEADS = ((4096, 128256), (1024, 151936))
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_HEAD_ROWS = 512  # of logits, one a sequence
REST = 0.05  # seconds before each figure: large products draw so much power that the clock falls
# A layer's hidden size, query heads' width, width of q, k and v, intermediate size; layers in a chain.
LAYERS = {"0.6B": (1024, 2048, 4096, 3072, 28), "8B": (4096, 4096, 6144, 14336, 8)}
LAYER_ROWS = (1, 4, 16, 32, 64)
READ_GB_S = 4300  # of memory, as measured

Row = dict[str, Any]


def measure(device: CudaDevice, calls: list[Callable[[], object]]) -> float:
    """Microseconds a call takes when all of `calls` are replayed as one graph."""
    for call in calls[:2]:
        call()
    with device.capture() as finish:
        for call in calls:
            call()
    graph = finish()
    graph.launch()
    device.synchronize()
    time.sleep(REST)
    start, end = device.event(timing=True), device.event(timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.launch()
    end.record()
    end.synchronize()
    return float(end.milliseconds_since(start)) * 1e3 / REPLAYS / len(calls)


def _random(ops: CudaOps, *shape: int) -> Tensor:
    return ops.fill_normal(empty(shape, bfloat16, ops.device), std=0.05, seed=math.prod(shape))


def matmuls(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    for k, n in (*SHAPES, *HEADS):
        copies = max(1, min(CALLS, COLD_BYTES // (2 * k * n)))
        weights = [_random(ops, n, k) for _ in range(copies)]
        head = (k, n) in HEADS
        for m in ROWS:
            if head and m > MOST_HEAD_ROWS:
                continue
            x = _random(ops, m, k)
            out = empty((m, n), float32 if head else bfloat16, device)
            calls = [lambda w=weights[i % copies], x=x, out=out: ops.matmul(x, w, out=out) for i in range(CALLS)]
            microseconds = measure(device, calls)
            moved = 2 * (k * n + m * k) + out.nbytes
            yield {
                "kernel": "matmul",
                "shape": f"{m} x {k} x {n}",
                "us": microseconds,
                "GB/s": moved / microseconds / 1e3,
                "TFLOP/s": 2 * m * k * n / microseconds / 1e6,
                "reference_us": reference.matmul(m, k, n, copies, logits=head) if reference else None,
            }


def layers(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    """The products of a decoder layer as the decoder calls them, each alone and all in a chain of layers.

    The reference is the time of the bare products, without norm, activation and residual.
    """
    for model, (hidden, q_size, qkv_size, inter, chained) in LAYERS.items():
        shapes = ((qkv_size, hidden), (hidden, q_size), (2 * inter, hidden), (hidden, inter))
        copies = max(chained, *(min(CALLS, COLD_BYTES // (2 * n * k)) for n, k in shapes))
        weights = [[_random(ops, *shape) for shape in shapes] for _ in range(copies)]
        elements = sum(n * k for n, k in shapes)
        for m in LAYER_ROWS:
            calls = _layer_calls(ops, m, hidden, q_size, qkv_size, inter)
            bare = 0.0
            for i, (form, call) in enumerate(calls.items()):
                n, k = shapes[i]
                microseconds = measure(device, [partial(call, weights[j % copies][i]) for j in range(CALLS)])
                alone = reference.matmul(m, k, n, copies) if reference else None
                bare += alone or 0.0
                yield _layer_row(f"{model} {form}", f"{m} x {k} x {n}", microseconds, m * n * k, n * k, alone)
            chain = [partial(call, w) for layer in weights for call, w in zip(calls.values(), layer, strict=True)]
            microseconds = measure(device, chain) * len(calls)
            yield _layer_row(f"{model} layer's products", str(m), microseconds, m * elements, elements, bare or None)


def _layer_calls(
    ops: CudaOps, m: int, hidden: int, q_size: int, qkv_size: int, inter: int
) -> dict[str, Callable[[Tensor], object]]:
    """Each takes its weight."""
    norm = _random(ops, hidden)
    residual, normed, qkv = (_random(ops, m, width) for width in (hidden, hidden, qkv_size))
    attended, up, activated = (_random(ops, m, width) for width in (q_size, 2 * inter, inter))
    buffers = {"normed": normed, "gate_up": up, "out": activated}
    return {
        "norm + qkv": lambda w: ops.rmsnorm_matmul(residual, norm, 1e-6, w, normed=normed, out=qkv),
        "out + residual": lambda w: ops.matmul(attended, w, out=residual, accumulate=True),
        "norm + gate, up + silu": lambda w: ops.rmsnorm_matmul_silu_mul(residual, norm, 1e-6, w, **buffers),
        "down + residual": lambda w: ops.matmul(activated, w, out=residual, accumulate=True),
    }


def _layer_row(
    kernel: str, shape: str, microseconds: float, products: int, elements: int, reference: float | None
) -> Row:
    rate = 2 * elements / microseconds / 1e3
    return {
        "kernel": f"{kernel} ({rate / READ_GB_S:.0%})",
        "shape": shape,
        "us": microseconds,
        "GB/s": rate,
        "TFLOP/s": 2 * products / microseconds / 1e6,
        "reference_us": reference,
    }


def attention(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    ops.reserve_attention(256, 32, 128)
    for heads, kv_heads in ((16, 8), (32, 8)):
        for rows, queries, context in (
            (1, 1, 384), (16, 1, 640), (64, 1, 640), (256, 1, 640), (1, 1, 8192), (16, 1, 8192), (1, 512, 512),
            (1, 4096, 4096), (1, 8192, 8192),
        ):  # fmt: skip
            microseconds = _attention(ops, device, heads, kv_heads, rows, queries, context)
            pairs = rows * (queries * context - queries * (queries - 1) // 2)
            prefill = queries > 1
            yield {
                "kernel": "attention prefill" if prefill else "attention decode",
                "shape": f"{rows} x {queries} of {context}, heads {heads}/{kv_heads}",
                "us": microseconds,
                "GB/s": 4 * rows * context * kv_heads * 128 / microseconds / 1e3,
                "TFLOP/s": 4 * pairs * heads * 128 / microseconds / 1e6,
                "reference_us": reference.attention(heads, kv_heads, rows, queries, context) if reference else None,
            }


def _attention(
    ops: CudaOps, device: CudaDevice, heads: int, kv_heads: int, rows: int, queries: int, context: int
) -> float:
    block_size = 16
    per_row = -(-context // block_size)
    cache_shape = (rows * per_row, kv_heads, block_size, 128)
    keys, values = _random(ops, *cache_shape), _random(ops, *cache_shape)
    tables = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    tokens = rows * queries
    metadata = AttentionMetadata(
        positions=from_numpy(np.tile(np.arange(context - queries, context, dtype=np.int32), rows), device),
        slot_mapping=from_numpy(np.full(tokens, -1, np.int32), device),
        block_tables=from_numpy(tables, device),
        table_rows=from_numpy(np.arange(rows, dtype=np.int32), device),
        cu_seqlens_q=from_numpy(np.arange(rows + 1, dtype=np.int32) * queries, device),
        context_lens=from_numpy(np.full(rows, context, np.int32), device),
        max_seqlen_q=queries,
        max_context_len=context,
    )
    q, out = _random(ops, tokens, heads * 128), empty((tokens, heads * 128), bfloat16, device)

    def call() -> None:
        ops.paged_attention(q, keys, values, metadata, scale=128**-0.5, out=out)

    return measure(device, [call] * (CALLS if queries == 1 else 3))


def small(ops: CudaOps, device: CudaDevice) -> Iterator[Row]:
    """Memory-bound kernels at one and many rows."""
    for hidden in (1024, 4096):
        weight = _random(ops, hidden)
        for rows in (1, 64, 4096):
            x, residual, out = _random(ops, rows, hidden), _random(ops, rows, hidden), _random(ops, rows, hidden)
            gate_up, act = _random(ops, rows, 6 * hidden), _random(ops, rows, 3 * hidden)
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "add_rmsnorm": (
                    lambda x=x, r=residual, w=weight, o=out: ops.add_rmsnorm(x, r, w, 1e-6, o),
                    4 * x.nbytes,
                ),
                "silu_mul": (lambda g=gate_up, o=act: ops.silu_mul(g, o), gate_up.nbytes + act.nbytes),
            }
            for name, (call, moved) in calls.items():
                microseconds = measure(device, [call] * CALLS)
                yield {
                    "kernel": name,
                    "shape": f"{rows} x {hidden}",
                    "us": microseconds,
                    "GB/s": moved / microseconds / 1e3,
                    "TFLOP/s": None,
                    "reference_us": None,
                }


class TorchReference:
    """cuBLAS and SDPA through PyTorch, timed the same way."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def _measure(self, calls: list[Callable[[], object]]) -> float:
        torch = self.torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(REST)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / REPLAYS / len(calls)

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=self.torch.bfloat16) * 0.05

    def matmul(self, m: int, k: int, n: int, copies: int, *, logits: bool = False) -> float:
        """Logits are float32, as ours are."""
        weights = [self._random(n, k) for _ in range(copies)]
        x = self._random(m, k)
        torch = self.torch

        def product(weight: Any) -> Any:
            if logits:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return torch.nn.functional.linear(x, weight)

        return self._measure([lambda w=weights[i % copies]: product(w) for i in range(CALLS)])

    def attention(self, heads: int, kv_heads: int, rows: int, queries: int, context: int) -> float:
        q = self._random(rows, heads, queries, 128)
        k, v = (self._random(rows, kv_heads, context, 128) for _ in range(2))
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        causal = queries > 1
        return self._measure([lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True)] * (3 if causal else CALLS))


def run(with_reference: bool = True) -> list[Row]:
    device = CudaDevice()
    ops = CudaOps(device)
    ops.compile(bfloat16)
    reference = None
    if with_reference:
        try:
            reference = TorchReference()
        except ImportError:
            print("PyTorch is not installed: no cuBLAS and SDPA figures beside ours")
    products = [*matmuls(ops, device, reference), *layers(ops, device, reference)]
    return [*products, *attention(ops, device, reference), *small(ops, device)]
