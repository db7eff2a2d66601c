"""Attention of decodes by how many blocks share a row: `python -m tests.bench.decode_splits`.

A line for each number of rows and context over each kind of cache, as it is measured: microseconds by what is chosen
today, by so many blocks a row that merge through memory, by clusters of so many that merge in shared memory (c), each
with the warps of few rows and of many (m).

With --long TOKENS one of the rows is so long and the others have the context: microseconds of what is chosen today
without the long row and with it, as a graph for rows of any length has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest import mock

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import decode
from tessera.engine.ops.cuda.attention.division import NO_LIMIT, Division
from tessera.engine.tensor import bfloat16, uint8
from tests.bench import kernels
from tests.bench.cache_kernels import HEADS

ROWS = (2, 4, 8, 12, 16, 24, 28, 32, 40, 48, 64, 96, 128, 256)
CONTEXTS = (640, 2000, 6100)
BLOCKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
CLUSTERS = (2, 4, 8)
LEAST = 128  # keys of a split
FEW = decode.MANY_ROW_GROUPS
CACHES = {"bfloat16": bfloat16, "e4m3": uint8}


def divisions(rows: int, context: int) -> Iterator[tuple[str, Division, int]]:
    """Label, division, and the value of MANY_ROW_GROUPS to measure it with."""
    groups = decode.head_groups(*HEADS)
    most = -(-context // LEAST)
    for name, many in (("", FEW), ("m", 1)):
        if many == 1 and rows * groups >= FEW:
            continue
        for blocks in BLOCKS:
            if blocks <= most:
                yield f"{blocks}{name}", Division(1, blocks, LEAST, NO_LIMIT, blocks, 1), many
    for cluster in CLUSTERS:
        if rows * groups < FEW and context <= SHORT_CONTEXT:
            for splits in {cluster, most}:
                yield f"{cluster}c{splits}", Division(cluster, splits, 64, NO_LIMIT, splits, 1), FEW


def measure(ops: CudaOps, device: CudaDevice, rows: int, context: int, cache: str) -> Iterator[tuple[str, float]]:
    """Label of each division and its microseconds; the first is today's choice."""
    ops.reserve_attention(rows, HEADS[0], kernels.HEAD_DIM)
    calls = kernels.attention_calls(ops, device, *HEADS, rows, 1, context, CACHES[cache])
    decode.plan_decode.cache_clear()
    yield "today", kernels.measure(device, calls)
    for name, division, many in divisions(rows, context):
        chosen = mock.patch.object(decode, "divide", return_value=division)
        with chosen, mock.patch.object(decode, "MANY_ROW_GROUPS", many):
            decode.plan_decode.cache_clear()
            yield name, kernels.measure(device, calls)
    decode.plan_decode.cache_clear()


def measure_long(ops: CudaOps, device: CudaDevice, rows: int, context: int, longest: int, cache: str) -> list[float]:
    """Microseconds without the long row and with it."""
    ops.reserve_attention(rows, HEADS[0], kernels.HEAD_DIM)
    found = []
    for first in (context, longest):
        calls = kernels.ragged_calls(ops, device, *HEADS, [first, *[context] * (rows - 1)], longest, CACHES[cache])
        found.append(kernels.measure(device, calls))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decode_splits", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--cache", choices=CACHES, action="append", help="default: all")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="one row of so many")
    options = parser.parse_args()
    device = CudaDevice()
    ops = CudaOps(device)
    for cache in options.cache or CACHES:
        ops.compile(bfloat16, head_dims={kernels.HEAD_DIM}, e4m3_cache=cache == "e4m3")
        for context in options.contexts:
            for rows in options.rows:
                if options.long:
                    even, one_long = measure_long(ops, device, rows, context, options.long, cache)
                    print(f"{cache} {rows} x {context}: {even:.1f}, one of {options.long}: {one_long:.1f}", flush=True)
                    continue
                (_, us), *others = measure(ops, device, rows, context, cache)
                best = min(others, key=lambda other: other[1])
                times = "  ".join(f"{name}: {other:.1f}" for name, other in others)
                print(
                    f"{cache} {rows} x {context}: {us:.1f}, best {best[0]} {best[1]:.1f} "
                    f"({100 * (us / best[1] - 1):+.1f} %)  {times}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
