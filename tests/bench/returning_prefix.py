"""Prefixes that come back from host memory while other streams decode: their first tokens, and the streams' steps.

    python -m tests.bench.returning_prefix --model llama-8b --device cuda

drives the engine alone, in this process. The KV cache holds the streams and one prefix. All prefixes are computed one
after the other, then others until the cache holds none of the first; these come back one by one while the streams
decode, and nothing else is computed then. The last line is JSON: milliseconds to the first token of a prefix that is
computed beside nothing, and of one that comes back; percentiles of the time between a stream's tokens alone, and while
a prefix comes back, where a step is one time for all streams; and of each that comes back the longest time between two
tokens, and the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tests.bench.models import MODEL_HELP, engine_model, kv_block_bytes

BLOCK_SIZE: Final[Literal[16]] = 16
CLIENT = b"bench"
STREAM_PROMPT = 512  # tokens
QUIET_STEPS = 200  # of the streams alone, before the first prefix comes back
PAUSE_STEPS = 5  # between two that come back


class Timed:
    """An engine, and when each request's tokens came."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.times: dict[str, list[float]] = {}

    def add(self, name: str, prompt: list[int], num_tokens: int) -> float:
        """-> when."""
        now = time.monotonic()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.core.add_request(AddRequest(name, array("i", prompt), params, now), CLIENT)
        self.times[name] = []
        return now

    def step(self) -> None:
        outputs = self.core.step().get(CLIENT, [])
        now = time.monotonic()
        for output in outputs:
            assert output.error is None, output.error
            self.times[output.request_id] += [now] * bool(output.token_ids)

    def first_token_of(self, name: str, prompt: list[int]) -> float:
        """Seconds until a request has its one token; others go on meanwhile."""
        begin = self.add(name, prompt, 1)
        while not self.times[name]:
            self.step()
        return self.times[name][0] - begin


def gaps(times: dict[str, list[float]], spans: list[tuple[float, float]]) -> list[float]:
    """Seconds between two tokens of a stream, of those whose second one came within a span."""
    found = []
    for of_stream in times.values():
        for earlier, later in pairwise(of_stream):
            if any(begin <= later <= end for begin, end in spans):
                found.append(later - earlier)
    return found


def longest(times: dict[str, list[float]], span: tuple[float, float]) -> float:
    return max(gaps(times, [span]))


def make_core(given: argparse.Namespace, root: Path, num_stream_tokens: int) -> EngineCore:
    """An engine with room for the streams and a prefix, and host memory for all prefixes."""
    folder, load_format = engine_model(given.model, root)
    prefix_blocks = -(-given.prefix_tokens // BLOCK_SIZE) + 2
    stream_blocks = given.streams * (-(-(STREAM_PROMPT + num_stream_tokens) // BLOCK_SIZE) + 2)
    num_blocks = stream_blocks + prefix_blocks + prefix_blocks // 4
    others = -(-num_blocks // prefix_blocks)
    host_bytes = (given.prefixes + others + 2) * prefix_blocks * kv_block_bytes(folder, BLOCK_SIZE, given.device)
    config = EngineConfig(
        model=folder,
        device=given.device,
        load_format=load_format,
        seed=1,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_num_seqs=given.streams + 1,
        max_model_len=max(given.prefix_tokens + 2, STREAM_PROMPT + num_stream_tokens),
        kv_offload_gib=host_bytes / 2**30,
    )
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def measure(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    rng = random.Random(given.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 200) for _ in range(count)]

    num_stream_tokens = QUIET_STEPS + given.prefixes * (given.return_steps + PAUSE_STEPS)
    core = make_core(given, root, num_stream_tokens)
    gc.collect()
    gc.freeze()  # as the engine's process does once all is loaded
    engine = Timed(core)
    engine.first_token_of("warm", tokens(given.prefix_tokens))
    prefixes = [tokens(given.prefix_tokens) for _ in range(given.prefixes)]
    computed = [engine.first_token_of(f"computed/{number}", prefix) for number, prefix in enumerate(prefixes)]
    for number in range(-(-core.block_manager.num_blocks * BLOCK_SIZE // given.prefix_tokens)):
        engine.first_token_of(f"other/{number}", tokens(given.prefix_tokens))
    streams = [f"stream/{number}" for number in range(given.streams)]
    for name in streams:
        engine.add(name, tokens(STREAM_PROMPT), num_stream_tokens)
    while not all(engine.times[name] for name in streams):
        engine.step()
    begin = time.monotonic()
    for _ in range(QUIET_STEPS):
        engine.step()
    quiet = (begin, time.monotonic())
    spans, returned, num_steps = [], [], []
    tiers = core.block_manager.tiers
    assert tiers is not None
    before = tiers.metrics.num_hits
    for number, prefix in enumerate(prefixes):
        begin, before_step = time.monotonic(), core.num_steps
        returned.append(engine.first_token_of(f"returned/{number}", prefix))
        spans.append((begin, time.monotonic()))
        num_steps.append(core.num_steps - before_step)
        for _ in range(PAUSE_STEPS):
            engine.step()
        assert core.has_work, "the streams have ended; --return-steps is too small"
    num_hits = tiers.metrics.num_hits - before
    while core.has_work:
        engine.step()
    tiers.close()
    times = {name: engine.times[name] for name in streams}
    alone, beside = gaps(times, [quiet]), gaps(times, spans)
    return {
        "prefix_tokens": given.prefix_tokens,
        "streams": given.streams,
        "returned_share": num_hits / (given.prefixes * given.prefix_tokens),
        "computed_ms": 1000 * statistics.median(computed),
        "returned_ms": 1000 * statistics.median(returned),
        "slowest_returned_ms": 1000 * max(returned),
        "quiet_p50_ms": 1000 * statistics.median(alone),
        "quiet_p99_ms": 1000 * float(np.percentile(alone, 99)),
        "beside_p50_ms": 1000 * statistics.median(beside),
        "beside_p99_ms": 1000 * float(np.percentile(beside, 99)),
        "p99_ratio": float(np.percentile(beside, 99) / np.percentile(alone, 99)),
        "longest_ms": [round(1000 * longest(times, span), 2) for span in spans],
        "steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.returning_prefix", description=__doc__)
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prefix-tokens", type=int, default=8000)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--return-steps", type=int, default=40, help="at most, of the streams for each that comes back")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as root:
        found = measure(given, Path(root))
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
