"""The batch of a step that verifies drafts, from their lengths to the arrays on the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.runner.upload import StepUpload
from tessera.engine.speculation.draft_layout import find_layout
from tessera.engine.tensor import CPU, from_numpy, int32, zeros
from tests.support.decoder_harness import Row, as_verification, step_batch
from tests.support.fakes.fake_runner import Harness

BLOCK_SIZE = 8


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_has_each_token_once_in_the_order_of_the_rounds(seed: int) -> None:
    rng = random.Random(seed)
    num_drafts = tuple(rng.choice((0, 1, 7, rng.randrange(12))) for _ in range(rng.randrange(1, 30)))
    layout = find_layout(num_drafts)
    assert find_layout(num_drafts) is layout
    tokens = [(row, offset) for row, count in enumerate(num_drafts) for offset in range(count + 1)]
    assert list(zip(layout.rows.tolist(), layout.offsets.tolist(), strict=True)) == tokens
    assert layout.cu_seqlens_q.tolist() == [tokens.index((row, 0)) for row in range(len(num_drafts))] + [len(tokens)]
    if not any(num_drafts):
        return
    in_rounds = sorted(tokens, key=lambda token: (token[1], token[0]))
    assert [tokens[place] for place in layout.logits_indices.tolist()] == in_rounds
    assert layout.sampled_tokens == layout.logits_indices.tolist()
    assert (
        list(layout.rounds.sizes)
        == [sum(count >= depth for count in num_drafts) for depth in range(13)][: max(num_drafts) + 1]
    )
    for index, rows in layout.rounds.drafted:
        assert [in_rounds[row] for row in rows] == [(index, depth) for depth in range(1, num_drafts[index] + 1)]
    assert [index for index, _ in layout.rounds.drafted] == [row for row, count in enumerate(num_drafts) if count]


def test_drafts_that_are_more_than_a_step_takes_are_cut_alike() -> None:
    engine = Harness(
        num_blocks=4000, max_num_seqs=100, max_num_batched_tokens=2048, speculation="on", speculative_method="ngram"
    )
    engine.runner.say = lambda context: 1 + len(context) % 4
    found: list[tuple[int, ...]] = []
    engine.runner.inspect = lambda batch: found.append(batch.rounds)
    for number in range(64):
        engine.add(f"r{number}", [1 + number % 90, 2, 3, 4, 1, 2, 3, 4], 60)
    engine.run()
    assert (64,) * 5 in found, "256 draft tokens, four of each sequence"
    assert all(sum(rounds[1:]) <= 256 for rounds in found)


def arrays(inputs: StepInputs) -> list[Any]:
    metadata = inputs.attention
    tensors = (
        inputs.input_ids,
        inputs.logits_indices,
        metadata.positions,
        metadata.slot_mapping,
        metadata.table_rows,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        *(inputs.updates or ()),
    )
    return [tensor.numpy().tolist() for tensor in tensors] + [inputs.sampling_rows.numpy().tobytes()]


def make_batch(rng: random.Random, most: int) -> StepBatch:
    params = SamplingParams(max_tokens=100, temperature=0.0)
    lengths = [rng.randrange(20, 60) for _ in range(rng.randrange(1, most))]
    tokens = rng.randrange(1, 9)
    rows = [
        Row(slot, list(range(8 * slot, 8 * slot + 8)), [7] * length, params, num_computed=length - tokens)
        for slot, length in enumerate(lengths)
    ]
    batch = step_batch(rows, BLOCK_SIZE)
    batch.slot_inits = []
    return as_verification(batch) if tokens > 1 else batch


def test_padding_that_an_earlier_step_has_left_is_that_of_a_new_one() -> None:
    rng = random.Random(3)
    upload, tables = StepUpload(CPU, 1 << 16), zeros((8, 8), int32, CPU)
    numbers = from_numpy(np.arange(65, dtype=np.int32), CPU)

    def make(upload: StepUpload, shape: StepShape) -> StepInputs:
        return StepInputs(upload, shape, tables, numbers, max_seqlen_q=9, max_context_len=64)

    shapes = [StepShape(64, 64, 64, verifies=True), StepShape(8, 8, 8), StepShape(64, 9, 9)]
    kept = [make(upload, shape) for shape in shapes]
    for _ in range(60):
        batch = make_batch(rng, 8)
        number = rng.choice((0, 0, 2)) if batch.verifies else rng.choice((0, 1, 1))
        if batch.num_sampled > shapes[number].num_sampled:
            number = 0
        kept[number].submit(batch, batch.table_updates if rng.random() < 0.5 and number == 0 else None)
        fresh = make(StepUpload(CPU, 1 << 16), shapes[number])
        fresh.submit(batch, None)
        updates = kept[number].updates
        assert updates is not None
        if updates[0].numpy().max() < 0:
            assert arrays(kept[number]) == arrays(fresh)
        else:
            assert arrays(kept[number])[:7] == arrays(fresh)[:7]
