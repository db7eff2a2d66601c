"""CUDA graphs of steps: the smallest shape that holds a batch, and padding that changes nothing.

A recording on the CPU is a forward that is computed again at each launch, over the same padded inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import OutOfMemoryError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.models.config import load_config
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.cuda_graphs import FULL_TOKENS_DEQUANTISED, PROMPT_TOKENS, StepGraphs, decode_sizes
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.tensor import CPU, Tensor
from tests.engine.runner.recorder import Recorder
from tests.support.decoder_harness import Row, scattered_blocks, step_batch
from tests.support.models.tiny_models import TINY_MODELS, build, prompt

BLOCK_SIZE: Final = 8
MAX_NUM_SEQS = 33


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["qwen3"], tmp_path_factory.mktemp("qwen3"))


def make_runner(folder: Path) -> ModelRunner:
    config = EngineConfig(
        model=str(folder), block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, num_kv_blocks=8 * MAX_NUM_SEQS
    )
    return ModelRunner(config, load_config(folder), CPU, make_ops(CPU))


def batch_of(num_tokens: int, num_seqs: int, *context_lens: int) -> Any:
    """As much of a batch as a graph is found by; further sequences have a context of one token."""
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_sampled=num_seqs,
        prompt_rows=None,
        context_lens=np.array([*context_lens, *[1] * (num_seqs - len(context_lens))], np.int32),
        verifies=False,
    )


def forward_nothing(inputs: StepInputs) -> Any:
    return inputs


def record(runner: ModelRunner) -> Recorder:
    recorder = Recorder()

    def forward(inputs: StepInputs) -> Tensor:
        recorder.forwarded = runner._forward, inputs
        return runner.buffers.logits[: inputs.shape.num_sampled]

    for step in runner._graphs.capture(recorder, runner._inputs, forward):
        assert step.inputs.shape.is_decode
    return recorder


def rows(count: int) -> list[Row]:
    settings = SamplingParams(max_tokens=64, temperature=0.0)
    return [
        Row(slot=i, blocks=scattered_blocks(8, first=8 * i), prompt=prompt()[i % 5 : i % 5 + 3 + i], params=settings)
        for i in range(count)
    ]


def run(runner: ModelRunner, sequences: list[Row], schedule: list[list[int] | None]) -> None:
    for num_scheduled in schedule:
        batch = step_batch(sequences, BLOCK_SIZE, num_scheduled)
        token_ids = runner.execute(batch).token_ids.tolist()
        for row, token_id in zip([r for r in sequences if r.num_computed == len(r.tokens)], token_ids, strict=True):
            row.output.append(token_id)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 12, 30, 31, 32, 33])
def test_padded_steps_choose_the_same_tokens(folder: Path, count: int) -> None:
    plain, replayed = rows(count), rows(count)
    # The second step has one token more than sequences, as when the end of a prompt joins decodes.
    chunks = [[1, *(len(row.prompt) for row in plain[1:])], *[None] * 6]
    run(make_runner(folder), plain, chunks)
    runner = make_runner(folder)
    recorder = record(runner)
    launches = sum(replay.launches for replay in recorder.replays)
    run(runner, replayed, chunks)
    assert sum(replay.launches for replay in recorder.replays) - launches == len(chunks), "all steps were replayed"
    assert [row.output for row in replayed] == [row.output for row in plain]


def test_a_shape_holds_its_batch_with_a_row_to_spare_for_padded_tokens() -> None:
    steps = StepGraphs(max_num_seqs=200, max_num_tokens=4096, max_model_len=8192, short_context=SHORT_CONTEXT)
    for shape in steps.shapes():
        assert shape.num_sampled == min(shape.num_seqs, 200)
        assert shape.num_seqs <= max(shape.num_tokens, shape.num_sampled)
    assert StepShape(512, 201, 200) in steps.shapes(), "a full server with a prompt beside"
    assert max(shape.num_seqs for shape in steps.shapes()) == 201, "as many rows as the runner reserves memory for"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 40, 128, 256])
def test_a_step_with_prompts_never_takes_the_recording_of_decodes(max_num_seqs: int) -> None:
    def make_inputs(shape: StepShape, max_seqlen_q: int, max_context_len: int) -> Any:
        return SimpleNamespace(shape=shape)

    steps = StepGraphs(max_num_seqs, max_num_tokens=2048, max_model_len=8192, short_context=SHORT_CONTEXT)
    recorder = Recorder()
    recorder.forwarded = None, None
    assert steps.full_sizes == (), "nothing is filled where nothing is recorded"
    steps.capture(recorder, make_inputs, forward_nothing)
    for num_seqs in range(1, max_num_seqs + 1):
        for num_tokens in range(num_seqs + 1, 2049, 1 if num_seqs < 40 else 7):
            step = steps.find(batch_of(num_tokens, num_seqs))
            assert step is not None, (num_tokens, num_seqs)
            shape = step.inputs.shape
            assert not shape.is_decode, (num_tokens, num_seqs, shape)
            assert num_tokens <= shape.num_tokens <= 2048
            assert shape.num_tokens == min(size for size in PROMPT_TOKENS if size >= max(num_tokens, num_seqs + 2))
            assert num_seqs < shape.num_seqs, "a row to spare for padded tokens"
    assert set(steps.full_sizes) <= set(PROMPT_TOKENS), "a step that is filled is not padded further"


def test_steps_that_dequantise_weights_are_filled_to_other_sizes() -> None:
    recorder = Recorder()
    recorder.forwarded = None, None
    steps = StepGraphs(8, 2048, 8192, SHORT_CONTEXT, full_tokens=FULL_TOKENS_DEQUANTISED)
    steps.capture(recorder, lambda shape, *_: SimpleNamespace(shape=shape), forward_nothing)  # type: ignore[arg-type]
    assert steps.full_sizes == FULL_TOKENS_DEQUANTISED
    assert set(steps.full_sizes) <= set(PROMPT_TOKENS)


def test_few_decodes_with_short_contexts_have_recordings_of_their_own() -> None:
    def make_inputs(shape: StepShape, max_seqlen_q: int, max_context_len: int) -> Any:
        return SimpleNamespace(shape=shape, max_context_len=max_context_len)

    recorder = Recorder()
    recorder.forwarded = None, None
    steps = StepGraphs(40, max_num_tokens=64, max_model_len=8192, short_context=SHORT_CONTEXT)
    decodes = steps.capture(recorder, make_inputs, forward_nothing)
    assert len({step.inputs.shape for step in decodes}) == len(decodes)

    def recorded_for(num_seqs: int, *context_lens: int) -> int:
        step = steps.find(batch_of(num_seqs, num_seqs, *context_lens))
        assert step is not None
        assert step.inputs.shape.num_seqs >= num_seqs
        return int(vars(step.inputs)["max_context_len"])

    assert recorded_for(1, SHORT_CONTEXT) == recorded_for(11, 5, SHORT_CONTEXT) == SHORT_CONTEXT
    assert recorded_for(1, SHORT_CONTEXT + 1) == recorded_for(11, SHORT_CONTEXT + 1, 5) == 8192
    assert recorded_for(40, 5) == 8192

    short_model = StepGraphs(40, max_num_tokens=64, max_model_len=SHORT_CONTEXT, short_context=SHORT_CONTEXT)
    before = len(recorder.replays)
    short_model.capture(recorder, make_inputs, forward_nothing)
    assert len(recorder.replays) - before == len(short_model.shapes()), "nothing twice where all contexts are short"


class ShapeRecorder(Recorder):
    """Keeps the shapes of what it captures, and has no memory for some."""

    def __init__(self, *, without: Callable[[StepShape], bool] = lambda shape: False) -> None:
        super().__init__()
        self.forwarded = None, None
        self.shapes: list[StepShape] = []
        self._without = without

    def make_inputs(self, shape: StepShape, max_seqlen_q: int, max_context_len: int) -> Any:
        self.shapes.append(shape)
        if self._without(shape):
            raise OutOfMemoryError("the device has no memory left")
        return SimpleNamespace(shape=shape)


def test_shapes_with_prompts_are_left_until_they_are_needed_or_nothing_else_is_to_do() -> None:
    recorder, at_once = ShapeRecorder(), ShapeRecorder()
    steps, whole = (StepGraphs(40, 2048, 8192, SHORT_CONTEXT) for _ in range(2))
    decodes = steps.capture(recorder, recorder.make_inputs, forward_nothing, leaves_prompts=True)
    assert all(shape.is_decode for shape in recorder.shapes)
    assert [step.inputs.shape for step in whole.capture(at_once, at_once.make_inputs, forward_nothing)] == [
        step.inputs.shape for step in decodes
    ]
    assert steps.full_sizes == whole.full_sizes
    assert steps.num_awaited == 0

    needed, again = steps.find(batch_of(300, 20)), steps.find(batch_of(310, 20))
    assert needed is not None
    assert needed is again
    assert steps.num_awaited == 1
    assert needed.inputs.shape == whole.find(batch_of(300, 20)).inputs.shape == recorder.shapes[-1]  # type: ignore[union-attr]
    before = len(recorder.shapes)
    assert steps.capture_next()
    assert recorder.shapes[before:] == [StepShape(16, 2, 2)], "one at a time, short prompts of few sequences first"
    for _ in range(len(whole.shapes())):
        if not steps.capture_next():
            break
    assert Counter(recorder.shapes) == Counter(at_once.shapes), "each as often"
    assert not steps.capture_next()
    assert not whole.capture_next()
    assert (steps.num_awaited, whole.num_awaited) == (1, 0), "no step waited for the others"


def test_a_shape_that_was_left_and_finds_no_memory_is_launched_kernel_by_kernel() -> None:
    def is_large(shape: StepShape) -> bool:
        return shape.num_tokens > 1000

    recorder = ShapeRecorder(without=is_large)
    steps = StepGraphs(40, 2048, 8192, SHORT_CONTEXT)
    steps.capture(recorder, recorder.make_inputs, forward_nothing, leaves_prompts=True)
    assert steps.find(batch_of(2000, 3)) is None
    tried = len(recorder.shapes)
    assert steps.find(batch_of(2000, 3)) is None
    assert len(recorder.shapes) == tried, "it is not tried at each step"
    assert steps.find(batch_of(500, 3)) is not None
    while steps.capture_next():
        pass
    assert len([shape for shape in recorder.shapes if is_large(shape)]) == len(
        {shape for shape in steps.shapes() if is_large(shape)}
    )


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (20, [1, 2, 4, 8, 16, 20])])
def test_decode_sizes_end_with_the_most_that_may_run(most: int, sizes: list[int]) -> None:
    assert decode_sizes(most) == sizes
    wasted = [after - before for before, after in zip(decode_sizes(512), decode_sizes(512)[1:], strict=False)]
    assert np.all(np.array(wasted) <= np.maximum(np.array(decode_sizes(512)[:-1]), 8)), "padding never doubles a step"
