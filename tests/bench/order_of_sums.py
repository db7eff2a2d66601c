"""What one order of sums costs, and what it is for: `python -m tests.bench.order_of_sums` on a CUDA device.

Each figure without and with `--batch-invariant`, one after the other: a layer's products, attention, whole decode
steps, and canaries whose answers differ alone and together. `--only loads` compares loads over HTTP.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tessera.engine.contract.config import EngineConfig
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import load_config
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.linear import ordered, portable, sm90
from tessera.engine.ops.cuda.linear.problem import LinearOperands, LinearProblem
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import bfloat16, empty, float32
from tests.bench import kernels, serve, steps
from tests.bench.models import CONFIGS, write_model
from tests.support.cases.canaries import ask, ask_each_alone, differing, make_canaries, make_core, write_config

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
LAYER_ROWS = (1, 4, 16, 32, 64, 128, 256)
HEADS = {"0.6B": (1024, 151936), "8B": (4096, 128256)}
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_CONTEXT = 640
KERNEL_ROWS = (1, 4, 8, 16, 17, 24, 32, 48, 64, 128)
PARTS = ("products", "kernels", "attention", "steps", "canaries", "loads")
CANARIES = ("qwen3-0.6b", "llama-8b", "window")

Row = tuple[str, str, float, float]  # what, size, without and with


def products(apart: CudaOps, in_order: CudaOps, device: CudaDevice) -> Iterator[Row]:
    """Microseconds of each product of a layer as the decoder calls it, of all of a layer in a chain, and of logits."""
    for model, (hidden, q_size, qkv_size, inter, chained) in kernels.LAYERS.items():
        shapes = ((qkv_size, hidden), (hidden, q_size), (2 * inter, hidden), (hidden, inter))
        copies = max(chained, *(min(kernels.CALLS, kernels.COLD_BYTES // (2 * n * k)) for n, k in shapes))
        weights = [[kernels.random_tensor(apart, *shape) for shape in shapes] for _ in range(copies)]
        for m in ROWS:
            both = [kernels._layer_calls(ops, m, hidden, q_size, qkv_size, inter) for ops in (apart, in_order)]
            for i, form in enumerate(both[0]):
                times = [
                    kernels.measure(
                        device, [partial(calls[form], weights[j % copies][i]) for j in range(kernels.CALLS)]
                    )
                    for calls in both
                ]
                yield f"{model} {form}", f"{m} rows", *times  # type: ignore[misc]
            if m in LAYER_ROWS:
                times = [
                    kernels.measure(
                        device,
                        [partial(call, w) for each in weights for call, w in zip(calls.values(), each, strict=True)],
                    )
                    * len(shapes)
                    for calls in both
                ]
                yield f"{model} layer's products", f"{m} rows", *times  # type: ignore[misc]
        del weights
        k, n = HEADS[model]
        heads = [kernels.random_tensor(apart, n, k)]
        for m in ROWS:
            x, out = kernels.random_tensor(apart, m, k), empty((m, n), float32, device)
            times = [
                kernels.measure(device, [partial(ops.matmul, x, heads[0], out=out)] * 5) for ops in (apart, in_order)
            ]
            yield f"{model} logits", f"{m} rows", *times  # type: ignore[misc]
        del heads


def kernel_choices(in_order: CudaOps, device: CudaDevice) -> Iterator[tuple[str, str, str]]:
    """Microseconds of every kernel that gives a product in order, the fastest first, the chosen one with a star."""
    for k, n in kernels.SHAPES:
        copies = max(1, min(kernels.CALLS, kernels.COLD_BYTES // (2 * k * n)))
        weights = [kernels.random_tensor(in_order, n, k) for _ in range(copies)]
        for m in KERNEL_ROWS:
            x, out = kernels.random_tensor(in_order, m, k), kernels.random_tensor(in_order, m, n)
            operands = [LinearOperands(x, weight, None, out) for weight in weights]
            problem = LinearProblem.of(operands[0], in_order=True)
            plans = _plans(problem, device)
            chosen = in_order.linear_kernels.choose(problem)
            times = {}
            for name, (launch, plan) in plans.items():
                calls = [partial(launch, device, problem, plan, each) for each in operands]
                star = "*" if chosen is not None and (launch, plan) == (chosen.candidate.launch, chosen.plan) else ""
                times[name + star] = kernels.measure(device, (calls * kernels.CALLS)[: kernels.CALLS])
            best = sorted(times.items(), key=lambda item: item[1])
            shown = best[:6] + [item for item in best[6:] if item[0].endswith("*")]
            yield f"{k} x {n}", f"{m} rows", "  ".join(f"{name} {us:.1f}" for name, us in shown)
        del weights


def _plans(problem: LinearProblem, device: CudaDevice) -> dict[str, tuple[Any, Any]]:
    plans: dict[str, tuple[Any, Any]] = {}
    tokens = next((tokens for tokens in ordered.TOKENS if tokens >= problem.num_rows), None)
    if tokens is not None:
        for units, warps, stages in ordered.SIZES:
            tile = ordered.OrderedTile(tokens, units, warps, stages)
            buffers = tile.x_buffers(problem.num_rows, problem.in_features, device.max_shared_bytes)
            if buffers:
                plans[f"ordered({units},{warps},{stages})"] = ordered._launch, ordered.OrderedPlan(tile, buffers)
    for slim in portable.SLIM_TILES:
        if problem.num_rows <= 2 * slim.m:
            plans[f"slim({slim.m},{slim.n})"] = portable._launch_slim, slim
    for tile_sm90 in sm90.TILES[3:]:
        if problem.num_rows > tile_sm90.m - 64:
            name = f"sm90({tile_sm90.warpgroups_m},{tile_sm90.warpgroup_n})"
            plans[name] = sm90._launch, sm90.Plan(tile_sm90)
    return plans


def attention(apart: CudaOps, in_order: CudaOps, device: CudaDevice) -> Iterator[Row]:
    for ops in (apart, in_order):
        ops.reserve_attention(256, 32, 128)
    for heads in ((16, 8), (32, 8)):
        for rows, context in ((1, 384), (1, 2048), (1, 8192), (16, 640), (64, 640), (64, 2048), (256, 640)):
            found = [kernels._attention(ops, device, *heads, rows, 1, context, None) for ops in (apart, in_order)]
            yield found[0]["kernel"], found[0]["shape"], found[0]["us"], found[1]["us"]
        for prompt in (512, 8192):
            found = [kernels._attention(ops, device, *heads, 1, prompt, prompt, None) for ops in (apart, in_order)]
            yield found[0]["kernel"], found[0]["shape"], found[0]["us"], found[1]["us"]
    both = [list(kernels.prefill_steps(ops, device, None)) for ops in (apart, in_order)]
    for before, after in zip(*both, strict=True):
        yield before["kernel"], before["shape"], before["us"], after["us"]


def decode_steps(name: str, device: CudaDevice, work: Path) -> Iterator[Row]:
    """Microseconds of whole decode steps by the model runner, one ahead."""
    folder = write_model(work, name)
    found = []
    for batch_invariant in (False, True):
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            max_model_len=2048,
            max_num_seqs=max(STEP_ROWS),
            num_kv_blocks=max(STEP_ROWS) * ((STEP_CONTEXT + steps.STEPS) // 16 + 2),
            dtype="bfloat16",
            batch_invariant=batch_invariant,
        )
        ops = CudaOps(device, batch_invariant=batch_invariant)
        runner = ModelRunner(config, load_config(folder), device, ops)
        found.append([steps.measure(runner, rows, STEP_CONTEXT)["step us"] for rows in STEP_ROWS])
        del runner
    for rows, before, after in zip(STEP_ROWS, *found, strict=True):
        yield f"{name} decode step", f"{rows} rows of {STEP_CONTEXT}", before, after


def canaries(device: CudaDevice, work: Path) -> Iterator[Row]:
    """How many of 64 canaries answer otherwise together than alone."""
    for model in CANARIES:
        folder = write_config(work / "canaries" / model, model)
        asked = make_canaries(3, 64, 1500, 32, 2048)
        counts = []
        for batch_invariant in (False, True):
            ops = CudaOps(device, batch_invariant=batch_invariant)
            settings: dict[str, Any] = {"max_model_len": 2048, "num_kv_blocks": 6000, "max_num_seqs": 128}
            core = make_core(folder, ops, batch_invariant=batch_invariant, **settings)
            expected = ask_each_alone(core, asked)
            core.reset_prefix_cache()
            counts.append(float(len(differing(ask(core, asked), expected))))
            del core
        yield f"{model}, 2 layers", "canaries of 64 that differ", counts[0], counts[1]


def loads(name: str, work: Path, output: Path) -> Iterator[Row]:
    """Tokens a second and milliseconds to the first token of the loads of `make bench-gpu`."""
    both = [serve.measure(name, serve.LOADS, work, output, *options) for options in ((), ("--batch-invariant",))]
    for before, after in zip(*both, strict=True):
        load = f"{before['concurrency']} x {before['input_len']}/{before['output_len']}"
        load += "" if before["stream"] else " whole"
        for figure, unit in (
            ("output_throughput", "tok/s"),
            ("median_ttft_ms", "TTFT ms"),
            ("median_itl_ms", "ITL ms"),
        ):
            if before[figure]:
                yield f"{name} {load}", unit, before[figure], after[figure]


def show(console: Console, title: str, rows: Iterator[Row]) -> None:
    table = Table("", "", "without", "with", "with / without", title=title)
    for what, size, before, after in rows:
        table.add_row(what, size, f"{before:.1f}", f"{after:.1f}", f"{after / before:.3f}" if before else "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.order_of_sums", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part (default: all but loads)")
    parser.add_argument("--model", choices=CONFIGS, action="append", help="of steps and loads (default: all)")
    parser.add_argument("--output", type=Path, default=Path(".out"), help="folder for logs (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    wanted = options.only or PARTS[:-1]
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if "loads" in wanted:  # by servers, before this process takes memory of the device
            for model in options.model or CONFIGS:
                show(console, f"Loads of {model}", loads(model, work, options.output))
        if set(wanted) == {"loads"}:
            return
        device = CudaDevice(0)
        apart, in_order = CudaOps(device), CudaOps(device, batch_invariant=True)
        for ops in (apart, in_order):
            ops.compile(bfloat16)
        if "products" in wanted:
            show(console, "Products, microseconds", products(apart, in_order, device))
        if "kernels" in wanted:
            table = Table("", "", "microseconds", title="Kernels of products in order")
            for row in kernel_choices(in_order, device):
                table.add_row(*row)
            console.print(table)
        if "attention" in wanted:
            show(console, "Attention, microseconds", attention(apart, in_order, device))
        if "steps" in wanted:
            for model in options.model or CONFIGS:
                show(console, "Decode steps, microseconds", decode_steps(model, device, work))
        if "canaries" in wanted:
            show(console, "Canaries", canaries(device, work))


if __name__ == "__main__":
    main()
