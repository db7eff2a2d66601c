"""Conversations of many turns over a KV cache that holds a few of them: what is computed, with and without KV offload.

    python -m tests.bench.conversations

drives the engine alone, in this process: a tiny model, or `--model`. Turn follows turn
through all conversations, so each is evicted before it goes on. The cache holds `--held` of them at their ends, and
host memory all. The last lines are JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, Literal

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tests.bench.models import MODEL_HELP, engine_model, kv_block_bytes

BLOCK_SIZE: Literal[16] = 16
CLIENT = b"bench"


def make_core(given: argparse.Namespace, length: int, *, offload: bool, disk: str | None) -> EngineCore:
    """An engine whose KV cache holds `given.held` conversations of `length` tokens."""
    blocks = -(-length // BLOCK_SIZE)
    settings: dict[str, Any] = {}
    if offload:
        per_block = kv_block_bytes(given.model, BLOCK_SIZE, given.device)
        in_memory = given.conversations if disk is None else given.held
        settings["kv_offload_gib"] = max(in_memory * (blocks + 1) * per_block / 2**30, 0.001)
        settings["kv_offload_dir"] = disk
    config = EngineConfig(
        model=given.model,
        device=given.device,
        block_size=BLOCK_SIZE,
        num_kv_blocks=given.held * blocks,
        max_num_seqs=given.streams,
        max_model_len=length,
        load_format=given.load_format,
        **settings,
    )
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def run(core: EngineCore, given: argparse.Namespace) -> dict[str, Any]:
    """All turns of all conversations; -> what it took."""
    rng = random.Random(given.seed)
    histories = [[rng.randrange(3, 200) for _ in range(given.turn_tokens)] for _ in range(given.conversations)]
    begin, cpu = time.monotonic(), time.process_time()
    first_tokens: list[float] = []
    for turn in range(given.turns):
        upcoming = list(range(given.conversations))
        running: dict[str, int] = {}
        while upcoming or running:
            while upcoming and len(running) < given.streams:
                number = upcoming.pop(0)
                name = f"{turn}/{number}"
                params = SamplingParams(max_tokens=given.output_tokens, temperature=0.0, ignore_eos=True)
                core.add_request(AddRequest(name, array("i", histories[number]), params, time.monotonic()), CLIENT)
                running[name] = number
            for output in core.step().get(CLIENT, []):
                assert output.error is None, output.error
                histories[running[output.request_id]] += output.token_ids
                if output.prefill_time is not None and output.queue_time is not None:
                    first_tokens.append(output.queue_time + output.prefill_time)
                if output.finish_reason is not None:
                    del running[output.request_id]
        for history in histories:
            history += [rng.randrange(3, 200) for _ in range(given.turn_tokens)]
    metrics, tiers = core.metrics, core.block_manager.tiers
    seconds = time.monotonic() - begin
    return {
        "prompt_tokens": metrics.num_prompt_tokens,
        "computed_tokens": round(metrics.iteration_tokens.total),
        "cached_share": round(metrics.num_prompt_tokens_cached / metrics.num_prompt_tokens, 3),
        "offload_hits": tiers.metrics.num_hits if tiers is not None else 0,
        "copied_bytes": dict(tiers.metrics.num_bytes) if tiers is not None else {},
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "tokens_per_second": round(metrics.num_generation_tokens / seconds, 1),
        "median_ttft_ms": round(1000 * sorted(first_tokens)[len(first_tokens) // 2], 1),
        "outputs": hash(tuple(map(tuple, histories))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.conversations", description=__doc__)
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--held", type=int, default=16, help="conversations that the KV cache holds")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-tokens", type=int, default=24, help="of a question")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    length = given.turns * (given.turn_tokens + given.output_tokens) + BLOCK_SIZE
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        given.model, given.load_format = engine_model(given.model, Path(folder))
        for name, offload, disk in (
            ("without", False, None),
            ("host memory", True, None),
            ("disk", True, str(Path(folder) / "kv")),
        ):
            core = make_core(given, length, offload=offload, disk=disk)
            found[name] = run(core, given)
            if core.block_manager.tiers is not None:
                core.block_manager.tiers.close()
            print(json.dumps({name: found[name]}), flush=True)
    assert given.device == "cuda" or len({each["outputs"] for each in found.values()}) == 1, "tokens differ"


if __name__ == "__main__":
    main()
