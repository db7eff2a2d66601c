"""`make bench-gpu`: kernels, then loads over HTTP; a table at the end and JSON in --output.

The part `client` needs no GPU: it holds the load test itself against a server with known delays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import client, serve
from tests.bench.fp8_models import FP8_MODELS
from tests.bench.gguf_models import GGUF_CONFIGS
from tests.bench.mixtures import MIXTURES
from tests.bench.models import CONFIGS, DENSE
from tests.support.paths import ROOT

PARTS = ("client", "kernels", "loads", "start", "interference")


def kernel_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Kernels (bf16)")
    for column in ("kernel", "shape", "us", "GB/s", "TFLOP/s", "reference us", "reference / ours"):
        table.add_column(column, justify="left" if column in ("kernel", "shape") else "right")
    for row in rows:
        reference = row["reference_us"]
        table.add_row(
            row["kernel"],
            row["shape"],
            f"{row['us']:.1f}",
            f"{row['GB/s']:.0f}" if row["GB/s"] else "",
            f"{row['TFLOP/s']:.0f}" if row["TFLOP/s"] else "",
            f"{reference:.1f}" if reference else "",
            f"{reference / row['us']:.2f}" if reference else "",
        )
    return table


def load_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Loads over HTTP (greedy, bf16, random weights)")
    for column in (
        "model",
        "streams",
        "in/out",
        "tok/s",
        "TTFT ms",
        "TPOT ms",
        "P99 ITL ms",
        "share of floor",
        "ready s",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["concurrency"]),
            f"{row['input_len']}/{row['output_len']}{'' if row['stream'] else ' whole'}",
            f"{row['output_throughput']:.0f}",
            f"{row['median_ttft_ms']:.1f}",
            f"{row['median_tpot_ms']:.2f}",
            f"{row['p99_itl_ms']:.2f}",
            f"{row['weight_read_share']:.0%}",
            f"{row['ready_seconds']:.1f}",
        )
    return table


def plain_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="a part of it (default: all)")
    names = (
        *(*DENSE, *MIXTURES),
        *(name + serve.GGUF for name in GGUF_CONFIGS),
        *FP8_MODELS,
    )
    about = "of the loads (default: qwen3-0.6b and llama-8b); .gguf: in Q4_K_M's mix of blocks; .fp8: in e4m3"
    parser.add_argument("--model", action="append", choices=names, help=about)
    parser.add_argument("--sweep", action="store_true", help="of the loads: how cost grows with streams and lengths")
    parser.add_argument("--long-prompts", action="store_true", help="of the loads: 32 streams of 6,000 tokens alone")
    parser.add_argument("--streams", type=int, nargs="+", help="of the loads: those of so many streams")
    parser.add_argument("--repeats", type=int, default=1, help="of each load (%(default)s)")
    parser.add_argument("--no-reference", action="store_true", help="do not time PyTorch beside")
    parser.add_argument("--output", type=Path, default=Path(".out"), help="folder for JSON and logs (%(default)s)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="of the loads: whose server is measured (this one)")
    parser.add_argument("server", nargs="*", help="of the loads: options of the server, after --")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=130)
    figures: dict[str, Any] = {}
    models = options.model or list(CONFIGS)

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    if wanted("client"):
        figures["client"] = client.measure()
        console.print(plain_table("The load test against a server with known delays", figures["client"]))
    if wanted("kernels"):
        from tests.bench import kernels

        figures["kernels"] = kernels.run(with_reference=not options.no_reference)
        console.print(kernel_table(figures["kernels"]))
    with tempfile.TemporaryDirectory() as work:
        if wanted("loads"):
            loads = serve.SWEEP if options.sweep else serve.LONG_PROMPTS if options.long_prompts else serve.LOADS
            if options.streams is not None:
                loads = serve.of_streams(loads, options.streams)
            loads = tuple(load for load in loads for _ in range(options.repeats))
            arguments = ["--max-num-seqs", "512"] if options.sweep else []
            arguments += options.server
            figures["loads"] = [
                row
                for name in models
                for row in serve.measure(
                    name, loads, Path(work), options.output, *arguments, checkout=options.checkout.resolve()
                )
            ]
            console.print(load_table(figures["loads"]))
        if wanted("start"):
            figures["start"] = [row for name in models for row in serve.measure_start(name, Path(work), options.output)]
            console.print(plain_table("From the command", figures["start"]))
        if wanted("interference"):
            figures["interference"] = [serve.measure_interference(name, Path(work), options.output) for name in models]
            console.print(plain_table("16 streams, and a prompt of 8,000 tokens every second", figures["interference"]))
    (options.output / "bench.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
