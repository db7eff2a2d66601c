"""Training on a GPU, with random weights: operations one by one, and steps of the trainer.

    python -m tests.bench.training --device cuda

measures the operations of Llama-3.1-8B and GPT-2 in bfloat16, the products of their backward with operands as they lie
and by transposed copies, LoRA of rank 16 on all projections of Llama-3.1-8B with 4 x 2,048 tokens, with checkpointed
layers 8 x 2,048, and all weights of GPT-2 124M with 64 x 1,024. The last line is JSON. `tests.bench.autograd` does the
same for the CPU's operations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.ops.cuda.training.linear import READS_IN_PLACE, LinearOps
from tessera.engine.ops.training.interface import AdamWStep, PackedSequences
from tessera.engine.runner.devices import select_device
from tessera.engine.tensor import Device, Tensor, bfloat16, empty, float32, from_numpy, zeros
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.lora import LoraSettings, adapter_parameters, make_adapters
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import initial_parameters
from tessera.engine.training.trainer import Trainer
from tests.bench.models import LLAMA_8B

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
EPS = 1e-5
GIB = 2**30

Function = Callable[[Functions, list[Variable]], Variable]


class Case(NamedTuple):
    """An operation: shapes of its inputs, how many of the first require a gradient, and the multiplications and
    additions of its forward and backward."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    learnt: int = 1
    forward: float = 0.0
    backward: float = 0.0


class Run(NamedTuple):
    """Steps of the trainer; `config` is a model's config.json."""

    name: str
    config: dict[str, Any]
    sequences: int
    length: int
    lora: bool
    checkpointed: bool


RUNS = (
    Run("llama-8b lora", LLAMA_8B, 4, 2048, lora=True, checkpointed=False),
    Run("llama-8b lora, checkpointed", LLAMA_8B, 8, 2048, lora=True, checkpointed=True),
    Run("gpt2-124m", GPT2, 64, 1024, lora=False, checkpointed=False),
)


# Of the backward, in which x [tokens, width] was multiplied by a weight [features, width]: tokens, features, width.
PRODUCTS = {
    "gpt2-124m qkv": (65536, 2304, 768),
    "gpt2-124m attention out": (65536, 768, 768),
    "gpt2-124m fc": (65536, 3072, 768),
    "gpt2-124m proj": (65536, 768, 3072),
    "gpt2-124m head, a chunk": (2560, 50264, 768),
    "llama-8b qkv": (8192, 6144, 4096),
    "llama-8b attention out": (8192, 4096, 4096),
    "llama-8b gate, up": (8192, 28672, 4096),
    "llama-8b down": (8192, 4096, 14336),
    "llama-8b lora a, 4096": (8192, 16, 4096),
    "llama-8b lora a, 14336": (8192, 16, 14336),
    "llama-8b lora b, 4096": (8192, 4096, 16),
    "llama-8b lora b, 28672": (8192, 28672, 16),
}
MAX_CAPTURED_BYTES = 4 << 30  # of transposed copies in a graph
MAX_CAPTURED = 10


def cases(device: Device, divisor: int) -> Iterator[Case]:
    """With so many times fewer tokens."""
    hidden, inner, vocab, heads, kv_heads, head_dim = 4096, 14336, 128256, 32, 8, 128
    tokens, length = 8192 // divisor, 2048 // divisor
    rng = np.random.default_rng(1)

    def attention(count: int, length: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Function, int, float]:
        packed = PackedSequences.of_lengths([length] * count, device)
        sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "scale": head_dim**-0.5}
        forward = 2.0 * count * length * length * heads * head_dim  # half of two products, causal
        width = (heads + 2 * kv_heads) * head_dim
        return lambda f, x: f.packed_attention(x[0], packed, **sizes), width, forward

    ids = from_numpy(rng.integers(0, vocab, tokens).astype(np.int32), device)
    factors = from_numpy(np.full(tokens, 1 / tokens, np.float32), device)
    angles = from_numpy(rng.normal(size=(length, head_dim)).astype(np.float32), device)
    positions = PackedSequences.of_lengths([length] * 4, device).positions
    stream = (tokens, hidden)
    for columns, rows, name in (
        (hidden, hidden, "4096 -> 4096"),
        (hidden, 2 * inner, "4096 -> 28672"),
        (inner, hidden, "14336 -> 4096"),
    ):
        work, shapes = 2.0 * tokens * rows * columns, ((tokens, columns), (rows, columns))
        yield Case(f"matmul {name}, frozen", lambda f, x: f.matmul(x[0], x[1]), shapes, 1, work, work)
    work = 2.0 * tokens * hidden * hidden
    shapes = (stream, (hidden, hidden))
    yield Case("matmul 4096 -> 4096", lambda f, x: f.matmul(x[0], x[1]), shapes, 2, work, 2 * work)
    yield Case(
        "matmul 4096 -> 16 -> 4096",
        lambda f, x: f.matmul(f.matmul(x[0], x[1]), x[2]),
        (stream, (16, hidden), (hidden, 16)),
        3,
    )
    for count, size in ((4, length), (1, tokens)):
        function, width, forward = attention(count, size, heads, kv_heads, head_dim)
        name = f"attention 32/8 x 128, {count} x {size}"
        yield Case(name, function, ((count * size, width),), 1, forward, 2.5 * forward)
    yield Case(
        "rope 40 x 128",
        lambda f, x: f.rope(x[0], angles, positions, head_dim=head_dim, num_rotated=heads + kv_heads),
        ((tokens, (heads + 2 * kv_heads) * head_dim),),
    )
    yield Case("rmsnorm 4096, frozen", lambda f, x: f.rmsnorm(x[0], x[1], EPS), (stream, (hidden,)))
    yield Case("silu_mul 14336", lambda f, x: f.silu_mul(x[0]), ((tokens, 2 * inner),))
    yield Case("add 4096", lambda f, x: f.add(x[0], x[1]), (stream, stream), 2)
    work = 2.0 * tokens * hidden * vocab
    yield Case(
        "linear_cross_entropy 128256, frozen",
        lambda f, x: f.linear_cross_entropy(x[0], x[1], ids, factors),
        (stream, (vocab, hidden)),
        *(1, work, work),
    )
    tokens, length = 65536 // divisor, 1024 // divisor
    narrow = (tokens, 768)
    gpt2_ids = from_numpy(rng.integers(0, 50257, tokens).astype(np.int32), device)
    gpt2_factors = from_numpy(np.full(tokens, 1 / tokens, np.float32), device)
    function, width, forward = attention(64, length, 12, 12, 64)
    yield Case(f"attention 12 x 64, 64 x {length}", function, ((tokens, width),), 1, forward, 2.5 * forward)
    work = 2.0 * tokens * 768 * 3072
    with_bias = (narrow, (3072, 768), (3072,))
    yield Case("matmul 768 -> 3072, bias", lambda f, x: f.matmul(x[0], x[1], x[2]), with_bias, 3, work, 2 * work)
    yield Case("layernorm 768", lambda f, x: f.layernorm(x[0], x[1], x[2], EPS), (narrow, (768,), (768,)), 3)
    yield Case("gelu 3072", lambda f, x: f.gelu(x[0], tanh=True), ((tokens, 3072),))
    yield Case("embedding 50257 x 768", lambda f, x: f.embedding(gpt2_ids, x[0]), ((50257, 768),))
    work = 2.0 * tokens * 768 * 50257
    yield Case(
        "linear_cross_entropy 50257",
        lambda f, x: f.linear_cross_entropy(x[0], x[1], gpt2_ids, gpt2_factors),
        (narrow, (50257, 768)),
        *(2, work, 2 * work),
    )


def measure(f: Functions, case: Case, rounds: int) -> tuple[float, float]:
    """Seconds of a forward without gradients, and what one with its backward takes beyond it; means of the rounds."""
    inputs = []
    for number, shape in enumerate(case.shapes):
        value = empty(shape, bfloat16, f.device)
        f.ops.fill_normal(value, std=0.02 if number else 1.0, seed=number)
        inputs.append(Variable(value, requires_grad=number < case.learnt))

    def both() -> None:
        result = case.function(f, inputs)
        f.backward(result, upper)
        for variable in inputs:
            variable.gradient = None

    def forward() -> None:
        with f.no_grad():
            case.function(f, inputs)

    with f.no_grad():
        result = case.function(f, inputs)
    upper = None  # as a training has it
    if result.value.size > 1:
        upper = empty(result.shape, result.value.dtype, f.device)
        f.ops.fill_normal(upper, std=1.0, seed=99)
    of_forward, of_both = (seconds(f.device, work, rounds) for work in (forward, both))
    return of_forward, of_both - of_forward


def seconds(device: Device, work: Callable[[], None], rounds: int) -> float:
    work()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    device.synchronize()
    return (time.perf_counter() - start) / rounds


def operations_table(f: Functions, console: Console, rounds: int, divisor: int) -> dict[str, dict[str, float]]:
    table = Table("operation", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s", title="bfloat16")
    found: dict[str, dict[str, float]] = {}

    def rate(work: float, taken: float) -> str:
        return f"{work / taken / 1e12:.0f}" if work else ""

    for case in cases(f.device, divisor):
        forward, backward = measure(f, case, rounds)
        rates = rate(case.forward, forward), rate(case.backward, backward)
        table.add_row(case.name, f"{forward * 1e3:.3f}", rates[0], f"{backward * 1e3:.3f}", rates[1])
        found[case.name] = {"forward_ms": forward * 1e3, "backward_ms": backward * 1e3}
    tensors: list[Tensor] = [zeros((2**26 // divisor,), float32, f.device) for _ in range(4)]
    weight, gradient, first, second = tensors
    step = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1)
    taken = seconds(f.device, lambda: f.training.adamw(weight, gradient, first, second, step), rounds)
    table.add_row("adamw, 2^26 elements", f"{taken * 1e3:.3f}", "", "", "")
    found["adamw"] = {"forward_ms": taken * 1e3}
    console.print(table)
    return found


def products_table(
    device: CudaDevice, ops: LinearOps, console: Console, rounds: int, divisor: int
) -> dict[str, dict[str, float]]:
    """Of each product both ways in turn, replayed as a graph; milliseconds."""
    columns = ("as they lie, ms", "TFLOP/s", "copies, ms", "TFLOP/s", "ratio")
    table = Table("products", "", *columns, title="bfloat16")
    found: dict[str, dict[str, float]] = {}
    for name, (tokens, features, width) in PRODUCTS.items():
        tokens //= divisor
        dy, x, weight = (
            empty(shape, bfloat16, device) for shape in ((tokens, features), (tokens, width), (features, width))
        )
        for seed, tensor in enumerate((dy, x, weight)):
            ops.products.fill_normal(tensor, std=1.0, seed=seed)
        dx, gradient = empty(x.shape, bfloat16, device), zeros(weight.shape, float32, device)
        captured = max(1, min(MAX_CAPTURED, MAX_CAPTURED_BYTES // (dy.nbytes + x.nbytes + weight.nbytes)))
        calls: dict[str, Callable[[], object]] = {
            "dx": partial(ops.matmul_input_gradient, dy, weight, dx),
            "dw": partial(ops.matmul_weight_gradient, dy, x, gradient, accumulate=True),
        }
        work = 2.0 * tokens * features * width
        found[name] = {}
        for kind, call in calls.items():
            times = {}
            for in_place in (True, False):
                ops.reads_in_place = in_place
                times[in_place] = replayed(device, call, captured, rounds)
            ops.reads_in_place = READS_IN_PLACE
            cells = [
                f"{number:.{digits}f}"
                for way in times.values()
                for number, digits in ((way * 1e3, 3), (work / way / 1e12, 0))
            ]
            table.add_row(name, kind, *cells, f"{times[False] / times[True]:.2f}")
            found[name] |= {f"{kind}_in_place_ms": times[True] * 1e3, f"{kind}_copies_ms": times[False] * 1e3}
    console.print(table)
    return found


def replayed(device: CudaDevice, call: Callable[[], object], count: int, rounds: int) -> float:
    """Seconds of one of `count` calls that a graph holds."""
    call()  # kernels are compiled
    with device.capture() as finish:
        for _ in range(count):
            call()
    return seconds(device, finish().launch, rounds) / count


def load(config: dict[str, Any], layers: int | None) -> ModelConfig:
    """Of a config.json; with fewer layers, where that is given."""
    if layers is not None:
        config = {**config, **{name: layers for name in ("num_hidden_layers", "n_layer") if name in config}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_config(Path(folder))


def measure_run(f: Functions, run: Run, steps: int, divisor: int, layers: int | None) -> dict[str, float]:
    """Of the best of some steps after the first."""
    config, length = load(run.config, layers), run.length // divisor
    parameters = initial_parameters(config, f.ops, bfloat16, seed=1)
    adapters, trained = {}, list(parameters)
    if run.lora:
        parameters.freeze()
        adapters = make_adapters(parameters, LoraSettings(rank=16), f.device, bfloat16, seed=2)
        trained = list(adapter_parameters(adapters))
    decoder = TrainableDecoder(parameters, f, max_len=length, adapters=adapters, checkpoints_layers=run.checkpointed)
    optimizer = AdamW(trained, f.ops, f.training, AdamWSettings())
    tokens = run.sequences * length
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=tokens, max_gradient_norm=1.0)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, config.vocab_size, (run.sequences, length)).astype(np.int32)
    examples = [Example(row, np.ones(length, np.float32)) for row in ids]
    taken = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        trainer.step(examples, 1e-4)
        f.device.synchronize()
        taken.append(time.perf_counter() - start)
    best = min(taken[1:])
    tied = config.tie_word_embeddings
    matrices = sum(
        parameter.variable.value.size
        for (layer, field, kind), parameter in parameters.by_key.items()
        if kind == "weight"
        and parameter.decays
        and (layer is not None or field == ("embedding" if tied else "lm_head"))
    )
    found = {
        "tokens_per_second": tokens / best,
        "step_ms": best * 1e3,
        "mean_step_ms": float(np.mean(taken[1:])) * 1e3,
        "first_step_s": taken[0],
        # A multiplication and an addition of each weight, forward and by the input, of all weights by the weight, too.
        "matrix_tflops": (4 if run.lora else 6) * matrices * tokens / best / 1e12,
    }
    statistics = getattr(f.device, "pool_statistics", None)
    if statistics is not None:
        found["memory_gib"] = (statistics.in_use + statistics.cached) / GIB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", choices=("ops", "products", *(run.name for run in RUNS)), action="append", help="parts of it"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each operation (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are measured, after a first (%(default)s)")
    parser.add_argument("--divisor", type=int, default=1, help="so many times fewer tokens a sequence (%(default)s)")
    parser.add_argument("--layers", type=int, help="of the models (default: all)")
    options = parser.parse_args()
    device, reason = select_device(options.device)
    console = Console(width=120)
    console.print(reason)
    f = Functions.on(device)
    device.keep_large_memory()
    start = time.perf_counter()
    f.training.prepare(bfloat16, (64, 128))
    console.print(f"kernels are there after {time.perf_counter() - start:.1f} s")
    found: dict[str, Any] = {}
    if options.only is None or "ops" in options.only:
        found["ops"] = operations_table(f, console, options.rounds, options.divisor)
    if (options.only is None or "products" in options.only) and isinstance(device, CudaDevice):
        assert isinstance(f.training, LinearOps)
        found["products"] = products_table(device, f.training, console, options.rounds, options.divisor)
    table = Table("steps", "tokens/s", "ms", "mean ms", "first, s", "TFLOP/s by weights", "GiB")
    for run in RUNS:
        if options.only is not None and run.name not in options.only:
            continue
        getattr(device, "empty_cache", lambda: None)()
        figures = found[run.name] = measure_run(f, run, options.steps, options.divisor, options.layers)
        table.add_row(
            run.name,
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['step_ms']:.1f}",
            f"{figures['mean_step_ms']:.1f}",
            f"{figures['first_step_s']:.1f}",
            f"{figures['matrix_tflops']:.0f}",
            f"{figures.get('memory_gib', 0):.1f}",
        )
    console.print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
