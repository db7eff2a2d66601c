"""Steps that verify drafts replay CUDA graphs of their own, whose padding changes nothing.

A recording on the CPU is a forward that is computed again at each launch, over the same padded inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.cuda_graphs import MAX_VERIFIED_TOKENS, StepGraphs
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.tensor import CPU, Tensor
from tests.engine.runner.recorder import Recorder
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.speculation import Asked, ask_all, make_core, num_accepted, predicted


def test_padded_verification_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = build(TINY_MODELS["qwen3"], tmp_path)
    config = EngineConfig(
        model=str(folder),
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_kv_blocks=128,
        speculation="on",
        num_speculative_tokens=5,
    )
    runner = ModelRunner(config, load_config(folder), CPU, make_ops(CPU))
    settings: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    )
    asked = [
        Asked(prompt()[number : 9 + 4 * number], SamplingParams(max_tokens=25, **settings[number % 3]))
        for number in range(5)
    ]
    expected = ask_all(make_core(folder, runner), asked)
    recorder = Recorder()

    def forward(inputs: StepInputs) -> Tensor:
        recorder.forwarded = runner._forward, inputs
        return runner.buffers.logits[: inputs.shape.num_sampled]

    runner._graphs.capture(recorder, runner._inputs, forward)
    replayed: list[tuple[StepShape, StepBatch]] = []
    find = runner._graphs.find

    def watch(batch: StepBatch) -> object:
        found = find(batch)
        if found is not None and batch.rounds:
            replayed.append((found.inputs.shape, batch))
        return found

    runner._graphs.find = watch  # type: ignore[method-assign, assignment]
    for most, at_once in ((5, 100), (1, 2)):
        core = make_core(folder, runner, speculation="on", num_speculative_tokens=most)
        told = ask_all(core, predicted(asked, expected), at_once=at_once)
        assert [each.token_ids for each in told] == [each.token_ids for each in expected]
        assert num_accepted(told) > 6 * most
    assert any(shape.num_tokens > batch.num_tokens for shape, batch in replayed), "some steps were padded"
    assert all(shape.verifies == (batch.num_sampled == batch.num_tokens) for shape, batch in replayed)
    assert not all(shape.verifies for shape, _ in replayed), "some drafts were beside prompts"


def test_without_drafts_nothing_more_is_captured() -> None:
    plain = StepGraphs(256, 8192, 8192, 2048)
    drafting = StepGraphs(256, 8192, 8192, 2048, max_drafts=256, draft_tokens=7)
    assert not any(shape.verifies for shape in plain.shapes())
    more = set(drafting.shapes()) - set(plain.shapes())
    assert set(plain.shapes()) < set(drafting.shapes())
    assert all(shape.verifies and 1 < shape.num_tokens <= MAX_VERIFIED_TOKENS for shape in more)
