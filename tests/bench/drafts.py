"""What a step that verifies drafts costs beside one that does not, on the device alone and with the host, and attention
of drafts by itself.

    python -m tests.bench.drafts steps --model llama-8b --streams 1 16 --profile
    python -m tests.bench.drafts attention

Each line is JSON. `steps` has random weights; `graph us` is the replay of a step's CUDA graph, `sampling us` that of
its choice of tokens, `whole us` all from the batch to the tokens on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import load_config
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import bfloat16, empty, float32, from_numpy
from tests.bench.kernels import CALLS, COLD_BYTES, measure, random_tensor
from tests.bench.models import CONFIGS, write_model
from tests.bench.steps import BLOCK_SIZE, profile_batches
from tests.support.decoder_harness import Row, as_verification, step_batch

QUERIES = (1, 2, 4, 8, 16)
ROWS = (1, 16, 64)
CONTEXTS = (384, 8192)
HEADS = ((32, 8), (16, 8))
HEAD_DIM = 128
REPLAYS = 30


def attention(ops: CudaOps, device: CudaDevice) -> Iterator[dict[str, Any]]:
    """A layer's: rotation, KV store and attention, by its own kernel and by that of prompts; one query a row is a
    decode."""
    ops.reserve_attention(max(ROWS) * max(QUERIES) + 1, 32, HEAD_DIM)
    for heads, kv_heads in HEADS:
        for rows in ROWS:
            for context in CONTEXTS:
                for queries in QUERIES:
                    found = {"drafts us": _attention(ops, device, (heads, kv_heads), rows, queries, context)}
                    if queries > 1:
                        ops.attention_kernels.restrict(without=["drafts"])
                        found["prompts us"] = _attention(ops, device, (heads, kv_heads), rows, queries, context)
                        ops.attention_kernels.restrict()
                    shape = f"{rows} x {queries} of {context}, heads {heads}/{kv_heads}"
                    yield {"attention": shape, **{name: round(us, 2) for name, us in found.items()}}


def _attention(
    ops: CudaOps, device: CudaDevice, heads: tuple[int, int], rows: int, queries: int, context: int
) -> float:
    num_heads, kv_heads = heads
    per_row = -(-context // BLOCK_SIZE)
    layers = max(1, min(CALLS, COLD_BYTES // (4 * rows * per_row * BLOCK_SIZE * kv_heads * HEAD_DIM)))
    shape = (layers * rows * per_row, kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = random_tensor(ops, *shape), random_tensor(ops, *shape)
    tables = np.random.default_rng(0).permutation(shape[0]).astype(np.int32).reshape(layers, rows, per_row)
    tokens = rows * queries
    places = np.arange(context - queries, context)
    qkv = random_tensor(ops, tokens, (num_heads + 2 * kv_heads) * HEAD_DIM)
    scratch, out = (random_tensor(ops, tokens, num_heads * HEAD_DIM) for _ in range(2))
    norm = random_tensor(ops, HEAD_DIM)
    cos_sin = ops.fill_normal(empty((context, HEAD_DIM), float32, device), std=1, seed=0)
    transform = HeadTransform(cos_sin, norm, norm)
    calls: list[Callable[[], object]] = []
    # As in a graph, which has room for a row a token: those beyond the last have no context.
    room = rows if queries == 1 else tokens
    ends = np.minimum(np.arange(room + 1) * queries, tokens).astype(np.int32)
    lengths = np.where(np.arange(room) < rows, context, 0).astype(np.int32)
    for layer in range(layers):
        slots = tables[layer][:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        metadata = AttentionMetadata(
            positions=from_numpy(np.tile(places.astype(np.int32), rows), device),
            slot_mapping=from_numpy(slots.reshape(-1).astype(np.int32), device),
            block_tables=from_numpy(tables[layer], device),
            table_rows=from_numpy((np.arange(room) % rows).astype(np.int32), device),
            cu_seqlens_q=from_numpy(ends, device),
            context_lens=from_numpy(lengths, device),
            max_seqlen_q=queries,
            max_context_len=max(context, 2049),
            verifies=queries > 1,
        )
        attend: dict[str, Any] = {"num_heads": num_heads, "scale": HEAD_DIM**-0.5, "queries": scratch, "out": out}
        calls.append(partial(ops.attention, qkv, keys, values, metadata, transform, **attend))
    return measure(device, calls * -(-CALLS // layers))


def make_batch(streams: int, tokens: int, context: int) -> StepBatch:
    """A step of `streams` sequences, each a token and a draft of tokens - 1."""
    params = SamplingParams(max_tokens=100, temperature=0.0)
    per_row = -(-context // BLOCK_SIZE)
    rows = [
        Row(slot, list(range(first, first + per_row)), [7] * context, params, num_computed=context - tokens)
        for slot, first in enumerate(range(0, streams * per_row, per_row))
    ]
    batch = step_batch(rows, BLOCK_SIZE)
    batch.slot_inits = []
    return as_verification(batch) if tokens > 1 else batch


def time_step(runner: ModelRunner, device: CudaDevice, batch: StepBatch) -> dict[str, float]:
    runner.execute(batch)  # writes the block tables
    step = runner._graphs.find(batch)
    assert step is not None, "the step has no graph"
    assert runner._sampler is not None
    sampling = runner._sampler._graphs[step.inputs.shape, False, False]
    found = {}
    for name, graph in (("graph us", step.graph), ("sampling us", sampling)):
        begin, end = device.event(timing=True), device.event(timing=True)
        graph.launch()
        begin.record()
        for _ in range(REPLAYS):
            graph.launch()
        end.record()
        end.synchronize()
        found[name] = end.milliseconds_since(begin) * 1e3 / REPLAYS
    wall = []
    for _ in range(REPLAYS):
        started = time.perf_counter()
        runner.execute(batch)
        wall.append(time.perf_counter() - started)
    return {**found, "whole us": statistics.median(wall) * 1e6}


def steps(given: argparse.Namespace, device: CudaDevice) -> Iterator[dict[str, Any]]:
    most = max(given.tokens)
    with tempfile.TemporaryDirectory() as work:
        folder = write_model(Path(work), given.model)
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            max_model_len=given.context + 64,
            block_size=BLOCK_SIZE,
            max_num_seqs=max(given.streams),
            batch_invariant=given.batch_invariant,
            speculation="on",
            num_speculative_tokens=most - 1,
        )
        begin = time.perf_counter()
        ops = CudaOps(device, batch_invariant=given.batch_invariant)
        runner = ModelRunner(config, load_config(folder), device, ops)
        yield {"model": given.model, "ready s": round(time.perf_counter() - begin, 2)}
    for streams in given.streams:
        plain: dict[str, float] = {}
        for tokens in given.tokens:
            batch = make_batch(streams, tokens, given.context)
            found = time_step(runner, device, batch)
            plain = plain or found
            ratios = {name.replace("us", "ratio"): round(us / plain[name], 3) for name, us in found.items()}
            times = {name: round(us, 1) for name, us in found.items()}
            yield {"streams": streams, "tokens": tokens, "context": given.context, **times, **ratios}
            if given.profile:
                for kernel, calls, us in profile_batches(runner, [batch] * 8)[:12]:
                    yield {"tokens": tokens, "kernel": kernel[:90], "calls": calls, "us": round(us, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drafts", description=__doc__)
    parser.add_argument("what", choices=("steps", "attention"))
    parser.add_argument("--model", choices=tuple(CONFIGS), default="llama-8b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8], help="of a sequence in a step")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--profile", action="store_true", help="each kernel of a step (needs PyTorch)")
    given = parser.parse_args()
    device = CudaDevice()
    if given.what == "steps":
        lines = steps(given, device)
    else:
        ops = CudaOps(device)
        ops.compile(bfloat16, head_dims={HEAD_DIM}, drafts=True)
        lines = attention(ops, device)
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
