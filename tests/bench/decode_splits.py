"""Attention of decodes by how many splits of a row's keys a block takes: `python -m tests.bench.decode_splits`.

Neither that nor the number of blocks changes a bit of the results. A line for each number of rows and context over
each kind of cache, as it is measured: microseconds by splits a block, with what is chosen today in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest import mock

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import decode
from tessera.engine.ops.cuda.attention.memory import MAX_SPLITS
from tessera.engine.tensor import bfloat16, uint8
from tests.bench import kernels
from tests.bench.cache_kernels import HEADS

ROWS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
CONTEXTS = (640, 2000, 6000)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
CACHES = {"bfloat16": bfloat16, "e4m3": uint8}


def measure(
    ops: CudaOps, device: CudaDevice, rows: int, context: int, cache: str, splits: tuple[int, ...]
) -> Iterator[tuple[int, float]]:
    """Splits a block, and the microseconds with so many; the first number is today's."""
    ops.reserve_attention(rows, HEADS[0], kernels.HEAD_DIM)
    calls = kernels.attention_calls(ops, device, *HEADS, rows, 1, context, CACHES[cache])
    today = decode.splits_per_block(rows, decode.head_groups(*HEADS))
    for number in (today, *splits):
        with mock.patch.object(decode, "splits_per_block", lambda *_, number=number: number):
            decode.plan_decode.cache_clear()
            yield number, kernels.measure(device, calls)
    decode.plan_decode.cache_clear()


def most_splits(context: int) -> int:
    """That a row has."""
    division = decode.Division(1, decode.MIN_SPLIT_KEYS, MAX_SPLITS, 1)
    return decode.decode_splits(context, context, division)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decode_splits", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--cache", choices=CACHES, action="append", help="default: all")
    options = parser.parse_args()
    device = CudaDevice()
    ops = CudaOps(device)
    for cache in options.cache or CACHES:
        ops.compile(bfloat16, head_dims={kernels.HEAD_DIM}, e4m3_cache=cache == "e4m3")
        for context in options.contexts:
            splits = tuple(number for number in SPLITS if number < most_splits(context))
            for rows in options.rows:
                (today, us), *others = measure(ops, device, rows, context, cache, (*splits, most_splits(context)))
                times = "  ".join(
                    f"{number}: {other:.1f} ({100 * (us / other - 1):+.1f} %)" for number, other in others
                )
                print(f"{cache} {rows} x {context} ({today}: {us:.1f})  {times}", flush=True)


if __name__ == "__main__":
    main()
