"""The operations of training, one by one, and a step of the trainer: `python -m tests.bench.autograd`.

On the CPU, with the demonstration model's sizes. Times are the process's CPU time, so that what else runs counts
little; set OPENBLAS_NUM_THREADS=1 to have it that of one core. Rates count multiplications and additions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.ops.training.interface import AdamWStep, PackedSequences
from tessera.engine.tensor import CPU, Tensor, float32, from_numpy, zeros
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.lora import LoraSettings, adapter_parameters, make_adapters
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import load_parameters
from tessera.engine.training.trainer import Trainer
from tests.support.paths import BUILTIN

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 192, 512, 2560, 6, 3, 32
TOKENS = 2048
EPS = 1e-6

Function = Callable[[Functions, list[Variable]], Variable]


class Case(NamedTuple):
    """An operation: shapes of its inputs, and floating-point operations of its forward."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    operations: float = 0.0


class Timing(NamedTuple):
    """CPU seconds."""

    name: str
    forward: float
    backward: float
    operations: float


def cases(tokens: int) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    ids = from_numpy(rng.integers(0, VOCAB, tokens).astype(np.int32), CPU)
    factors = from_numpy(np.full(tokens, 1 / tokens, np.float32), CPU)
    table = from_numpy(rng.normal(size=(tokens, HEAD_DIM)).astype(np.float32), CPU)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    stream, inner, qkv = (tokens, HIDDEN), (tokens, 2 * INNER), (tokens, width)

    def attention(lengths: list[int], window: int | None = None) -> Function:
        packed = PackedSequences.of_lengths(lengths, CPU)
        heads: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "scale": HEAD_DIM**-0.5}
        return lambda f, x: f.packed_attention(x[0], packed, sliding_window=window, **heads)

    def rope(f: Functions, x: list[Variable]) -> Variable:
        positions = PackedSequences.of_lengths([tokens], CPU).positions
        return f.rope(x[0], table, positions, head_dim=HEAD_DIM, num_rotated=HEADS + KV_HEADS)

    yield Case("embedding", lambda f, x: f.embedding(ids, x[0]), ((VOCAB, HIDDEN),))
    yield Case("rmsnorm", lambda f, x: f.rmsnorm(x[0], x[1], EPS), (stream, (HIDDEN,)))
    yield Case("layernorm", lambda f, x: f.layernorm(x[0], x[1], x[2], EPS), (stream, (HIDDEN,), (HIDDEN,)))
    matmul = 2.0 * tokens * HIDDEN * 2 * INNER
    yield Case("matmul", lambda f, x: f.matmul(x[0], x[1]), (stream, (2 * INNER, HIDDEN)), matmul)
    yield Case("rope", rope, (qkv,))
    scores = 2.0 * tokens * tokens * HEADS * HEAD_DIM  # half of the two products, causal
    yield Case("attention", attention([tokens]), (qkv,), scores)
    yield Case("attention, window 256", attention([tokens], 256), (qkv,))
    yield Case("attention, 128 a sequence", attention([128] * (tokens // 128)), (qkv,), scores * 128 / tokens)
    yield Case("silu_mul", lambda f, x: f.silu_mul(x[0]), (inner,))
    yield Case("gelu, erf", lambda f, x: f.gelu(x[0], tanh=False), ((tokens, INNER),))
    yield Case("gelu, tanh", lambda f, x: f.gelu(x[0], tanh=True), ((tokens, INNER),))
    yield Case("softmax", lambda f, x: f.softmax(x[0]), ((tokens, VOCAB),))
    yield Case("add", lambda f, x: f.add(x[0], x[1]), (stream, stream))
    yield Case("add_row", lambda f, x: f.add_row(x[0], x[1]), (stream, (HIDDEN,)))
    yield Case("mul", lambda f, x: f.mul(x[0], x[1]), (stream, stream))
    yield Case("div", lambda f, x: f.div(x[0], x[1]), (stream, stream))
    loss = 2.0 * tokens * HIDDEN * VOCAB
    yield Case(
        "linear_cross_entropy",
        lambda f, x: f.linear_cross_entropy(x[0], x[1], ids, factors),
        (stream, (VOCAB, HIDDEN)),
        loss,
    )


def measure(case: Case, rounds: int) -> Timing:
    """The best of the rounds."""
    rng = np.random.default_rng(2)
    f = Functions.on(CPU)
    # Tables and matrices have small elements, as weights do.
    stds = [0.05 if shape[0] != case.shapes[0][0] and len(shape) == 2 else 1.0 for shape in case.shapes]
    inputs = [
        f.variable((std * rng.normal(size=shape)).astype(np.float32))
        for std, shape in zip(stds, case.shapes, strict=True)
    ]
    forward = backward = float("inf")
    for _ in range(rounds + 1):
        start = time.process_time()
        result = case.function(f, inputs)
        middle = time.process_time()
        f.backward(result, _ones(result))
        forward, backward = min(forward, middle - start), min(backward, time.process_time() - middle)
        for variable in inputs:
            variable.gradient = None
    return Timing(case.name, forward, backward, case.operations)


def measure_adamw(rounds: int) -> Timing:
    """A million elements."""
    f = Functions.on(CPU)
    weight, gradient, first, second = (zeros((1 << 20,), float32, CPU) for _ in range(4))
    best = float("inf")
    for step in range(1, rounds + 2):
        start = time.process_time()
        f.training.adamw(weight, gradient, first, second, AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step))
        best = min(best, time.process_time() - start)
    return Timing("adamw, 2^20 elements", best, 0.0, 0.0)


def measure_trainer(tokens: int, length: int, rounds: int, *, lora: bool, checkpointed: bool) -> float:
    """Tokens a CPU second of the demonstration model."""
    f = Functions.on(CPU)
    parameters = load_parameters(BUILTIN, f.ops)
    adapters, trained = {}, list(parameters)
    if lora:
        parameters.freeze()
        adapters = make_adapters(parameters, LoraSettings(), CPU, seed=1)
        trained = list(adapter_parameters(adapters))
    decoder = TrainableDecoder(parameters, f, max_len=length, adapters=adapters, checkpoints_layers=checkpointed)
    optimizer = AdamW(trained, f.ops, f.training, AdamWSettings())
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=tokens, max_gradient_norm=1.0)
    rng = np.random.default_rng(3)
    examples = [
        Example(rng.integers(3, VOCAB, length).astype(np.int32), np.ones(length, np.float32))
        for _ in range(tokens // length)
    ]
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.process_time()
        trainer.step(examples, 1e-4)
        best = min(best, time.process_time() - start)
    return tokens / best


def _ones(result: Variable) -> Tensor:
    return from_numpy(np.ones(result.shape, result.value.dtype), CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("ops", "trainer"), help="one part alone")
    options = parser.parse_args()
    console = Console()
    found: dict[str, dict[str, float]] = {}
    if options.only != "trainer":
        table = Table("operation", "forward, ms", "backward, ms", "GFLOP/s", title=f"{options.tokens} tokens")
        timings = [measure(case, options.rounds) for case in cases(options.tokens)]
        for timing in [*timings, measure_adamw(options.rounds)]:
            rate = f"{timing.operations / timing.forward / 1e9:.1f}" if timing.operations else ""
            backward = f"{timing.backward * 1e3:.2f}" if timing.backward else ""
            table.add_row(timing.name, f"{timing.forward * 1e3:.2f}", backward, rate)
            found[timing.name] = {"forward_ms": timing.forward * 1e3, "backward_ms": timing.backward * 1e3}
        console.print(table)
    if options.only != "ops":
        table = Table("demonstration model", "tokens a sequence", "tokens a CPU second")
        for length in (128, 1024):
            for name, lora, checkpointed in (
                ("all weights", False, False),
                ("all weights, layers checkpointed", False, True),
                ("LoRA, rank 16", True, False),
            ):
                tokens = measure_trainer(options.tokens, length, options.rounds, lora=lora, checkpointed=checkpointed)
                table.add_row(name, str(length), f"{tokens:,.0f}")
                found[f"{name}, {length}"] = {"tokens_per_second": tokens}
        console.print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
