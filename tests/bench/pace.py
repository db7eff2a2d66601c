"""`python -m tests.bench.pace`: first tokens and gaps of loads on virtual time, with the prefill budget and without.

Without one each step takes as much of the prompts as it holds, as vLLM's do. It needs no GPU; see
`tests.support.fakes.virtual_engine` for what steps take.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.support.fakes.virtual_engine import LLAMA_8B, LLAMA_8B_FP8, QWEN3_06B, fill_steps, run_load

MODELS = {"llama-8b": LLAMA_8B, "llama-8b.fp8": LLAMA_8B_FP8, "qwen3-0.6b": QWEN3_06B}
LOADS = ((8, 6000, 256, 32), (16, 6000, 256, 64), (32, 6000, 256, 96), (64, 2000, 256, 192), (64, 512, 256, 256))


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.bench.pace", description=__doc__).parse_args()
    names = ("load", "steps", "tokens/s", "TTFT ms", "P99", "TPOT ms", "P99 ITL ms")
    table = Table(*names, title="Virtual time")
    for model, costs in MODELS.items():
        for load in LOADS:
            for name, patch in (("budgeted", None), ("full", fill_steps)):
                found = run_load(costs, *load, patch=patch)
                figures = (
                    f"{found.throughput:,.0f}",
                    f"{1000 * np.median(found.ttft):,.0f}",
                    f"{1000 * np.percentile(found.ttft, 99):,.0f}",
                    f"{1000 * np.median(found.tpot):.2f}",
                    f"{1000 * np.percentile(found.itl, 99):.1f}",
                )
                table.add_row(f"{model} {load[0]} x {load[1]:,}/{load[2]}", name, *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
