"""A model that two GPUs share against the same on the CPU. Needs two GPUs that see each other's memory."""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import RankError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.cuda.driver import find_device
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.ranks.parallel_runner import ParallelRunner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU
from tests.support.decoder_harness import Row, scattered_blocks, step_batch
from tests.support.models.tiny_models import TINY_MODELS, build, prompt

# The first compiles all kernels in float32. A thread that hangs in the driver hears no signal; this method prints where
# all threads are, and ends the process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

BLOCK_SIZE = 8
MODELS = ("llama", "llama-tied-biases", "qwen3", "gpt2", "stablelm-parallel", "qwen2moe", "gptoss")


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if os.environ.get("TESSERA_EMULATED") == "1":
        pytest.skip("the emulation has no model runner")
    found = find_device(1)
    if not found.usable:
        pytest.skip(f"two GPUs are needed: {found.reason}")


def completions(runner: ModelRunner | ParallelRunner, count: int) -> list[list[int]]:
    """Of prompts of several lengths, of which the longest comes in chunks, side by side."""
    greedy = SamplingParams(max_tokens=count, temperature=0.0)
    lengths = (3, 12, 24)
    rows = [
        Row(slot=slot, blocks=scattered_blocks(8, first=8 * slot), prompt=prompt()[:length], params=greedy)
        for slot, length in enumerate(lengths)
    ]
    for number in range(count + 1):
        counts = [3, 12, 10] if number == 0 else None
        batch = step_batch(rows, BLOCK_SIZE, counts)
        sampled = runner.start(batch).result().token_ids.tolist()
        done = [row for row in rows if row.num_computed == len(row.tokens)]
        for row, token_id in zip(done, sampled, strict=True):
            row.output.append(token_id)
    return [row.output for row in rows]


def show_threads(error: RankError) -> None:
    assert sys.__stderr__ is not None
    print(error, file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_cpu(name: str, eager: bool, tmp_path: Path) -> None:
    """In float32, by CUDA graphs and kernel by kernel."""
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ranks.cuda_runner import make_cuda_runner

    folder = build(TINY_MODELS[name], tmp_path)
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "num_kv_blocks": 64,
        "max_num_batched_tokens": 64,
    }
    config = EngineConfig(
        model=str(folder), dtype="float32", tensor_parallel_size=2, enforce_eager=eager, **settings
    ).with_device_defaults("cuda")
    model, device = load_config(folder), CudaDevice(0)
    alone = EngineConfig(model=str(folder), dtype="float32", **settings)
    expected = completions(ModelRunner(alone, model, CPU, make_ops(CPU)), 8)
    with closing(make_cuda_runner(config, model, device, make_ops(device), on_hang=show_threads)) as ranks:
        assert completions(ranks, 8) == expected
