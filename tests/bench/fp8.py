"""All that is to be known of FP8 on a GPU, in order: `python -m tests.bench.fp8 [--parts tests kernels loads]`.

Tests of the kernels; layers and products beside cuBLAS; loads over HTTP. What each part prints goes to --output, and a
short table to the terminal. A part that fails leaves the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PARTS = ("tests", "layers", "kernels", "loads")
TESTS = ("tests/gpu/test_fp8_gpu.py", "tests/gpu/test_e4m3_cache_gpu.py")
LIMITS = {"tests": 900, "layers": 300, "kernels": 900, "loads": 1800}  # seconds
MODELS = ("llama-8b.fp8", "qwen3-0.6b.fp8", "llama-3b.fp8")


def commands(part: str, models: list[str], output: Path) -> list[list[str]]:
    python = sys.executable
    if part == "tests":
        return [[python, "-m", "pytest", "-q", "-m", "gpu", "-p", "tests.gpu.launched", *TESTS]]
    if part in ("layers", "kernels"):
        return [[python, "-m", "tests.bench.fp8_kernels", *(("--layers",) if part == "layers" else ())]]
    named = [argument for model in models for argument in ("--model", model)]
    loads = [python, "-m", "tests.bench", "--only", "loads", *named]
    caches = {"fp8": ("--", "--kv-cache-dtype", "fp8"), "16-bit": ()}
    return [
        [*loads, *load, "--output", str(output / f"{name}, {kind} cache"), *cache]
        for name, load in (("usual", ()), ("long prompts", ("--long-prompts",)))
        for kind, cache in caches.items()
    ]


def run(part: str, models: list[str], output: Path) -> None:
    """Print the last line of what each command says, or why there is none."""
    for number, command in enumerate(commands(part, models, output)):
        log, start = output / f"fp8-{part}-{number}.log", time.perf_counter()
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMITS[part], check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        said = log.read_text().splitlines()
        end = "ran too long" if code is None else "done" if code == 0 else f"ended with {code}"
        print(f"{part:8} {end} after {time.perf_counter() - start:.0f} s: {log}", flush=True)
        if part == "tests":
            print("\n".join(said[-8:]))
        elif part in ("layers", "kernels"):
            print("\n".join(line[:150] for line in said))


def print_loads(output: Path) -> None:
    """Of each load tokens a second, first token and inter-token latency."""
    for path in sorted(output.glob("*/bench.json")):
        for row in json.loads(path.read_text()).get("loads", []):
            name = f"{path.parent.name}: {row['model']} {row['concurrency']} x {row['input_len']}/{row['output_len']}"
            times = f"TTFT {row['median_ttft_ms']:.0f} ms, TPOT {row['median_tpot_ms']:.2f} ms"
            print(
                f"{name:56}{row['output_throughput']:9.0f} tok/s  {times}, {row['weight_read_share']:.0%} of the floor"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fp8", description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--model", action="append", choices=MODELS, help="of the loads (default: all)")
    parser.add_argument("--output", type=Path, default=Path(".out"), help="folder for logs (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        run(part, options.model or list(MODELS), options.output)
    if "loads" in options.parts:
        print_loads(options.output)


if __name__ == "__main__":
    main()
