"""stories260K, a real trained model: its reference logits and tokens at the model runner's level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, float32
from tests.support.decoder_harness import DecoderHarness, Row, relative_error, scattered_blocks, step_batch

BLOCK_SIZE: Final = 16

pytestmark = pytest.mark.shared


@pytest.fixture
def folder(shared_models: Path) -> Path:
    return shared_models / "stories260K"


def reference_cases(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "greedy_ref.json").read_text())["cases"]
    return cases


def test_logits_after_the_prompt(folder: Path) -> None:
    made = DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=512, block_size=BLOCK_SIZE)
    for case in reference_cases(folder):
        logits = made.logits(case["prompt_ids"])[-1]
        assert relative_error(logits, np.array(case["logits_after_prompt"])) < 1e-4


def greedy_rows(folder: Path) -> list[Row]:
    greedy = SamplingParams(max_tokens=120, temperature=0.0)
    return [
        Row(slot=slot, blocks=scattered_blocks(16, first=16 * slot), prompt=case["prompt_ids"], params=greedy)
        for slot, case in enumerate(reference_cases(folder))
    ]


def generate(runner: ModelRunner, rows: list[Row], count: int) -> None:
    for _ in range(count):
        result = runner.execute(step_batch(rows, BLOCK_SIZE))
        for row, token_id in zip(rows, result.token_ids.tolist(), strict=True):
            row.output.append(token_id)


def make_runner(folder: Path) -> ModelRunner:
    config = EngineConfig(model=str(folder), block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=256)
    return ModelRunner(config, load_config(folder), CPU, make_ops(CPU))


def test_every_greedy_token_is_the_reference_s(folder: Path) -> None:
    runner = make_runner(folder)
    for row, case in zip(greedy_rows(folder), reference_cases(folder), strict=True):
        generate(runner, [row], 120)
        assert row.output == case["greedy_ids"]


def test_both_stories_in_one_batch(folder: Path) -> None:
    rows = greedy_rows(folder)
    generate(make_runner(folder), rows, 120)
    for row, case in zip(rows, reference_cases(folder), strict=True):
        assert row.output == case["greedy_ids"]
