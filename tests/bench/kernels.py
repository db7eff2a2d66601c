"""Microseconds of each kernel on the shapes that matter, beside PyTorch's where that is installed.

Each figure is the mean over a replayed graph of calls that rotate through enough copies of the weights to
find the L2 cache cold, as a decode step does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.ops.sampling_interface import SamplingState
from tessera.engine.tensor import Tensor, bfloat16, empty, float32, from_numpy, int32, uint32
from tests.support.cases.sampling_cases import SlotTables, make_rows, make_state

COLD_BYTES = 300 << 20  # several times the L2
CODE = 0x2A  # of e4m3, 0.3
CALLS = 20
REPLAYS = 5
LARGEST_CACHE = 64 * 8192  # tokens
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (1024, 4096), (1024, 6144), (3072, 1024))
HEADS = ((4096, 128256), (1024, 151936))
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_HEAD_ROWS = 512  # of logits, one a sequence
REST = 0.05  # seconds before each figure: large products draw so much power that the clock falls
# A layer's hidden size, query heads' width, width of q, k and v, intermediate size; layers in a chain.
LAYERS = {"0.6B": (1024, 2048, 4096, 3072, 28), "8B": (4096, 4096, 6144, 14336, 8)}
LAYER_ROWS = (1, 4, 16, 32, 64)
HEAD_DIM = 128  # of attention
READ_GB_S = 4300  # of memory, as measured

Row = dict[str, Any]


def measure(device: CudaDevice, calls: Sequence[Callable[[], object]]) -> float:
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


def random_tensor(ops: CudaOps, *shape: int) -> Tensor:
    """Small activations in bfloat16."""
    return ops.fill_normal(empty(shape, bfloat16, ops.device), std=0.05, seed=math.prod(shape))


def matmuls(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    for k, n in (*SHAPES, *HEADS):
        copies = max(1, min(CALLS, COLD_BYTES // (2 * k * n)))
        weights = [random_tensor(ops, n, k) for _ in range(copies)]
        head = (k, n) in HEADS
        for m in ROWS:
            if head and m > MOST_HEAD_ROWS:
                continue
            x = random_tensor(ops, m, k)
            out = empty((m, n), float32 if head else bfloat16, device)
            calls = [partial(ops.matmul, x, weights[i % copies], out=out) for i in range(CALLS)]
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
        weights = [[random_tensor(ops, *shape) for shape in shapes] for _ in range(copies)]
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

    def linear(x: Tensor, weight: Tensor, out: Tensor, **around: Any) -> Tensor:
        return ops.linear(x, LinearWeight.of(weight), out=out, **around)

    norm = random_tensor(ops, hidden)
    residual, normed, qkv = (random_tensor(ops, m, width) for width in (hidden, hidden, qkv_size))
    attended, up, activated = (random_tensor(ops, m, width) for width in (q_size, 2 * inter, inter))
    before, gate, add = RMSNorm(norm, 1e-6, normed), Activate("silu_mul", up), Accumulate()
    return {
        "norm + qkv": lambda w: linear(residual, w, qkv, prologue=before),
        "out + residual": lambda w: linear(attended, w, residual, epilogue=add),
        "norm + gate, up + silu": lambda w: linear(residual, w, activated, prologue=before, epilogue=gate),
        "down + residual": lambda w: linear(activated, w, residual, epilogue=add),
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


def _random_cache(ops: CudaOps, cached: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
    if cached == bfloat16:
        return random_tensor(ops, *shape)
    codes = empty(shape, cached, ops.device)
    ops.device.fill_bytes(codes.pointer, CODE, codes.nbytes)
    return codes


def attention(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    ops.reserve_attention(256, 32, HEAD_DIM)
    for heads, kv_heads in ((16, 8), (32, 8)):
        for rows in (1, 16, 64, 256):
            for context in (384, 640, 2048, 8192):
                if rows * context <= LARGEST_CACHE:
                    yield _attention(ops, device, heads, kv_heads, rows, 1, context, reference)
        for prompt in (512, 4096, 8192):
            yield _attention(ops, device, heads, kv_heads, 1, prompt, prompt, reference)


def _attention(
    ops: CudaOps,
    device: CudaDevice,
    heads: int,
    kv_heads: int,
    rows: int,
    queries: int,
    context: int,
    reference: TorchReference | None,
    cached: np.dtype[Any] = bfloat16,
) -> Row:
    calls = attention_calls(ops, device, heads, kv_heads, rows, queries, context, cached)
    microseconds = measure(device, calls)
    pairs = rows * (queries * context - queries * (queries - 1) // 2)
    return {
        "kernel": "attention decode" if queries == 1 else "attention prefill",
        "shape": f"{rows} x {queries} of {context}, heads {heads}/{kv_heads}",
        "us": microseconds,
        "GB/s": 2 * cached.itemsize * rows * context * kv_heads * HEAD_DIM / microseconds / 1e3,
        "TFLOP/s": 4 * pairs * heads * HEAD_DIM / microseconds / 1e6,
        "reference_us": reference.attention(heads, kv_heads, rows, queries, context) if reference else None,
    }


def ragged_calls(
    ops: CudaOps,
    device: CudaDevice,
    heads: int,
    kv_heads: int,
    lengths: Sequence[int],
    longest: int,
    cached: np.dtype[Any],
) -> list[Callable[[], object]]:
    """Decodes of rows of these lengths with all that surrounds them in a layer, as for rows of up to `longest` tokens.

    Rows share blocks of a pool that L2 has no room for.
    """
    block_size, rows, random = 16, len(lengths), np.random.default_rng(0)
    pool = COLD_BYTES // (2 * cached.itemsize * block_size * kv_heads * HEAD_DIM)
    keys, values = (_random_cache(ops, cached, (pool, kv_heads, block_size, HEAD_DIM)) for _ in range(2))
    qkv = random_tensor(ops, rows, (heads + 2 * kv_heads) * HEAD_DIM)
    q, out = (random_tensor(ops, rows, heads * HEAD_DIM) for _ in range(2))
    norm, cos_sin = random_tensor(ops, HEAD_DIM), empty((longest, HEAD_DIM), float32, device)
    ops.fill_normal(cos_sin, std=1, seed=0)
    newest = np.array(lengths, np.int32) - 1
    calls: list[Callable[[], object]] = []
    for _ in range(CALLS):
        tables = random.integers(0, pool, (rows, -(-longest // block_size)), dtype=np.int32)
        slots = tables[np.arange(rows), newest // block_size] * block_size + newest % block_size
        metadata = AttentionMetadata(
            positions=from_numpy(newest, device),
            slot_mapping=from_numpy(slots.astype(np.int32), device),
            block_tables=from_numpy(tables, device),
            table_rows=from_numpy(np.arange(rows, dtype=np.int32), device),
            cu_seqlens_q=from_numpy(np.arange(rows + 1, dtype=np.int32), device),
            context_lens=from_numpy(newest + 1, device),
            max_seqlen_q=1,
            max_context_len=longest,
        )
        attend: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "out": out, "num_heads": heads, "queries": q}
        calls.append(partial(ops.attention, qkv, keys, values, metadata, HeadTransform(cos_sin, norm, norm), **attend))
    return calls


def attention_calls(
    ops: CudaOps,
    device: CudaDevice,
    heads: int,
    kv_heads: int,
    rows: int,
    queries: int,
    context: int,
    cached: np.dtype[Any],
) -> list[Callable[[], object]]:
    """A decode with all that surrounds it in a layer: norms, rotation, KV store; a prefill alone.

    The cache holds `cached`: bfloat16, or uint8 for e4m3, all of which are alike.
    """
    decodes = queries == 1
    block_size = 16
    per_row = -(-context // block_size)
    layer_bytes = 2 * cached.itemsize * rows * per_row * block_size * kv_heads * HEAD_DIM
    layers = max(1, min(2 * CALLS, COLD_BYTES // layer_bytes)) if decodes else 1
    cache_shape = (layers * rows * per_row, kv_heads, block_size, HEAD_DIM)
    keys, values = (_random_cache(ops, cached, cache_shape) for _ in range(2))
    order = np.random.default_rng(0).permutation(layers * rows * per_row).astype(np.int32)
    tables = order.reshape(layers, rows, per_row)
    tokens = rows * queries
    qkv = random_tensor(ops, tokens, (heads + 2 * kv_heads) * HEAD_DIM)
    q, out = (random_tensor(ops, tokens, heads * HEAD_DIM) for _ in range(2))
    norm, cos_sin = random_tensor(ops, HEAD_DIM), empty((context, HEAD_DIM), float32, device)
    ops.fill_normal(cos_sin, std=1, seed=0)
    slots = tables[:, :, -1] * block_size + (context - 1) % block_size
    calls: list[Callable[[], object]] = []
    for layer in range(layers):
        metadata = AttentionMetadata(
            positions=from_numpy(np.tile(np.arange(context - queries, context, dtype=np.int32), rows), device),
            slot_mapping=from_numpy(slots[layer] if decodes else np.full(tokens, -1, np.int32), device),
            block_tables=from_numpy(tables[layer], device),
            table_rows=from_numpy(np.arange(rows, dtype=np.int32), device),
            cu_seqlens_q=from_numpy(np.arange(rows + 1, dtype=np.int32) * queries, device),
            context_lens=from_numpy(np.full(rows, context, np.int32), device),
            max_seqlen_q=queries,
            max_context_len=context,
        )
        attend: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "out": out}
        if decodes:
            transform = HeadTransform(cos_sin, norm, norm)
            attend |= {"num_heads": heads, "queries": q}
            calls.append(partial(ops.attention, qkv, keys, values, metadata, transform, **attend))
        else:
            calls.append(partial(ops.paged_attention, q, keys, values, metadata, **attend))
    return calls * (-(-CALLS // layers) if decodes else 3)


def prefill_steps(ops: CudaOps, device: CudaDevice, reference: TorchReference | None) -> Iterator[Row]:
    """Chunks behind a cached context, sliding windows, prompts together, and a chunk beside decodes."""
    ops.reserve_attention(256, 32, HEAD_DIM)
    decodes = ((1, 640),) * 63
    steps: tuple[tuple[str, tuple[tuple[int, int], ...], int | None], ...] = (
        ("2048 of 8192", ((2048, 8192),), None),
        ("512 of 32768", ((512, 32768),), None),
        ("180 of 8192", ((180, 8192),), None),
        ("180 of 8192 and 63 x 1 of 640", ((180, 8192), *decodes), None),
        ("8192 of 8192, window 1024", ((8192, 8192),), 1024),
        ("8192 of 8192, window 4096", ((8192, 8192),), 4096),
        ("8 x 1024 of 1024", ((1024, 1024),) * 8, None),
        ("32 x 128 of 128", ((128, 128),) * 32, None),
        ("63 x 1 of 640", decodes, None),
        ("8192 of 8192 and 63 x 1 of 640", ((8192, 8192), *decodes), None),
    )
    for heads, kv_heads in ((16, 8), (32, 8)):
        for name, rows, window in steps:
            microseconds = _step(ops, device, heads, kv_heads, rows, window)
            visible = [
                np.minimum(np.arange(context - queries, context) + 1, window or context) for queries, context in rows
            ]
            chunk = len(rows) == 1 and window is None
            yield {
                "kernel": "attention step",
                "shape": f"{name}, heads {heads}/{kv_heads}",
                "us": microseconds,
                "GB/s": None,
                "TFLOP/s": 4 * sum(int(keys.sum()) for keys in visible) * heads * 128 / microseconds / 1e6,
                "reference_us": reference.chunk(heads, *rows[0]) if reference and chunk else None,
            }


def _step(
    ops: CudaOps,
    device: CudaDevice,
    heads: int,
    kv_heads: int,
    rows: tuple[tuple[int, int], ...],
    window: int | None,
) -> float:
    """`rows` are (queries, context length); their blocks of 16 tokens lie in random order."""
    block_size = 16
    query_lens, context_lens = np.array(rows, np.int32).T
    counts = -(-context_lens // block_size)
    cache_shape = (int(counts.sum()), kv_heads, block_size, HEAD_DIM)
    keys, values = random_tensor(ops, *cache_shape), random_tensor(ops, *cache_shape)
    blocks = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    tables = np.zeros((len(rows), int(counts.max())), np.int32)
    for table, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        table[:count] = blocks[end - count : end]
    tokens = int(query_lens.sum())
    metadata = AttentionMetadata(
        positions=from_numpy(np.concatenate([np.arange(c - q, c, dtype=np.int32) for q, c in rows]), device),
        slot_mapping=from_numpy(np.full(tokens, -1, np.int32), device),
        block_tables=from_numpy(tables, device),
        table_rows=from_numpy(np.arange(len(rows), dtype=np.int32), device),
        cu_seqlens_q=from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32), device),
        context_lens=from_numpy(context_lens.copy(), device),
        max_seqlen_q=int(query_lens.max()),
        max_context_len=int(context_lens.max()),
    )
    q, out = random_tensor(ops, tokens, heads * 128), empty((tokens, heads * 128), bfloat16, device)

    def call() -> None:
        ops.paged_attention(q, keys, values, metadata, scale=128**-0.5, sliding_window=window, out=out)

    return measure(device, [call] * (CALLS if metadata.max_seqlen_q == 1 else 3))


def sampling(ops: CudaOps, device: CudaDevice) -> Iterator[Row]:
    """A choice from logits that the head has just written, and all that parameters can ask for."""
    vocab_size = 151936
    logits = ops.fill_normal(empty((256, vocab_size), float32, device), std=3, seed=0)
    words = empty((256, -(-vocab_size // 32)), uint32, device)
    device.fill_bytes(words.pointer, 0x11, words.nbytes)
    state = make_state(device, [SlotTables({1: 1.0, 2: -1.0}, [3])] * 256, vocab_size)
    every: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "min_tokens": 1}
    every |= {"repetition_penalty": 1.001, "presence_penalty": 1e-3, "frequency_penalty": 1e-3}
    for rows in (1, 16, 64, 256):
        part, masked = logits[:rows], from_numpy(np.arange(rows, dtype=np.int32), device)
        out = empty((rows,), int32, device)
        settings: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0},
            "temperature": {},
            "top_p": {"top_p": 0.95},
            "top_k, top_p, min_p": {name: every[name] for name in ("temperature", "top_k", "top_p", "min_p")},
            "everything": every,
        }
        for name, values in settings.items():
            parameters = make_rows(device, rows, seed=np.arange(rows), **values)

            changes = (state, words[:rows], masked) if name == "everything" else None
            filtered = "top_p" in values
            call = partial(_choose, ops, part, parameters, out, filtered, changes)
            microseconds = measure(device, [call] * CALLS)
            yield {
                "kernel": "sample",
                "shape": f"{rows} x {vocab_size}, {name}",
                "us": microseconds,
                "GB/s": part.nbytes / microseconds / 1e3,
                "TFLOP/s": None,
                "reference_us": None,
            }


def _choose(
    ops: CudaOps,
    logits: Tensor,
    parameters: Tensor,
    out: Tensor,
    filtered: bool,
    changes: tuple[SamplingState, Tensor, Tensor] | None,
) -> None:
    if changes is not None:
        state, words, rows = changes
        ops.adjust_logits(logits, state, parameters)
        ops.apply_token_mask(logits, words, rows)
    ops.sample(logits, parameters, filtered=filtered, out=out)
    if changes is not None:
        ops.record_tokens(state, rows, out)


def small(ops: CudaOps, device: CudaDevice) -> Iterator[Row]:
    """Memory-bound kernels at one and many rows."""
    for hidden in (1024, 4096):
        weight = random_tensor(ops, hidden)
        for rows in (1, 64, 4096):
            x, out = random_tensor(ops, rows, hidden), random_tensor(ops, rows, hidden)
            gate_up, act = random_tensor(ops, rows, 6 * hidden), random_tensor(ops, rows, 3 * hidden)
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "rmsnorm": (partial(ops.rmsnorm, x, weight, 1e-6, out), 2 * x.nbytes),
                "silu_mul": (partial(ops.silu_mul, gate_up, act), gate_up.nbytes + act.nbytes),
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
        import torch.nn.attention.bias

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

        return self._measure([partial(product, weights[i % copies]) for i in range(CALLS)])

    def attention(self, heads: int, kv_heads: int, rows: int, queries: int, context: int) -> float:
        q = self._random(rows, heads, queries, HEAD_DIM)
        k, v = (self._random(rows, kv_heads, context, HEAD_DIM) for _ in range(2))
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        causal = queries > 1
        return self._measure([lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True)] * (3 if causal else CALLS))

    def chunk(self, heads: int, queries: int, context: int) -> float:
        """A chunk's queries behind a cached context; SDPA shares no heads there, so all have keys of their own."""
        bias = self.torch.nn.attention.bias.causal_lower_right(queries, context)
        q = self._random(1, heads, queries, HEAD_DIM)
        k, v = (self._random(1, heads, context, 128) for _ in range(2))
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        return self._measure([lambda: sdpa(q, k, v, attn_mask=bias)] * 3)


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
    return [
        *matmuls(ops, device, reference),
        *layers(ops, device, reference),
        *attention(ops, device, reference),
        *prefill_steps(ops, device, reference),
        *sampling(ops, device),
        *small(ops, device),
    ]
