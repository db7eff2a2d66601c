"""`apply_token_mask` in NumPy, the bits it reads, and the step that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import TesseraError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import TokenMask
from tessera.engine.grammar.token_tables import every_token, token_words
from tessera.engine.models.config import load_config
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, CpuDevice, from_numpy
from tests.support.decoder_harness import Row, scattered_blocks, step_batch
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build, prompt

SEED = 20261121
BLOCK_SIZE: Final = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


def make_runner(folder: Path) -> ModelRunner:
    config = EngineConfig(model=str(folder), block_size=BLOCK_SIZE, max_num_seqs=4)
    device = CpuDevice()
    return ModelRunner(config, load_config(folder), device, make_ops(device))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2560, 32011])
def test_only_excluded_tokens_of_the_named_rows_change(vocab_size: int) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    logits = rng.normal(0, 3, (6, vocab_size)).astype(np.float32)
    rows = np.array([4, -1, 0], np.int32)
    allowed = [np.flatnonzero(rng.random(vocab_size) < share) for share in (0.5, 0.0, 0.02)]
    words = np.stack([token_words(ids.tolist(), vocab_size) for ids in allowed])
    masked = from_numpy(logits.copy(), CPU)
    CpuOps().apply_token_mask(masked, from_numpy(words, CPU), from_numpy(rows, CPU))
    expected = logits.copy()
    for row, ids in ((4, allowed[0]), (0, allowed[2])):
        kept = expected[row, ids].copy()
        expected[row] = -np.inf
        expected[row, ids] = kept
    assert np.array_equal(masked.numpy(), expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2560])
def test_every_token_has_no_bit_beyond_the_vocabulary(vocab_size: int) -> None:
    assert np.array_equal(every_token(vocab_size), token_words(list(range(vocab_size)), vocab_size))
    bits = np.unpackbits(every_token(vocab_size).view(np.uint8), bitorder="little")
    assert bits.sum() == vocab_size
    assert bits[:vocab_size].all()


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)),
        (np.zeros((2, 1), np.uint32), np.zeros(1, np.int32)),
        (np.zeros((1, 1), np.int32), np.zeros(1, np.int32)),
        (np.zeros((1, 1), np.uint32), np.zeros(1, np.int64)),
    ],
)
def test_masks_that_do_not_fit_are_refused(words: Any, rows: Any) -> None:
    logits = from_numpy(np.zeros((2, 32), np.float32), CPU)
    with pytest.raises(TesseraError, match="apply_token_mask"):
        CpuOps().apply_token_mask(logits, from_numpy(words, CPU), from_numpy(rows, CPU))


# ---- in a step ----------------------------------------------------------------------------------


def row(slot: int, tokens: list[int], **params: Any) -> Row:
    settings = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
    return Row(slot=slot, blocks=scattered_blocks(8, first=8 * slot), prompt=tokens, params=settings)


def sample(runner: ModelRunner, rows: list[Row], allowed: dict[int, list[int]]) -> Any:
    """One step in which the rows of `allowed` may choose these ids only."""
    batch = step_batch(rows, BLOCK_SIZE)
    mask = None
    if allowed:
        words = np.stack([token_words(ids, VOCAB_SIZE) for ids in allowed.values()])
        mask = TokenMask(np.array(list(allowed), np.int32), words)
        batch.is_constrained = True
    return runner.execute(batch, mask)


def test_a_masked_row_chooses_among_its_tokens_and_others_as_before(folder: Path) -> None:
    prompts = [prompt()[:9], prompt()[3:9], prompt()[5:20]]
    plain = sample(make_runner(folder), [row(i, p, logprobs=3) for i, p in enumerate(prompts)], {})
    best = plain.token_ids.tolist()
    others = [token for token in range(VOCAB_SIZE) if token != best[1]]
    masked = sample(make_runner(folder), [row(i, p, logprobs=3) for i, p in enumerate(prompts)], {1: others})
    assert [masked.token_ids[0], masked.token_ids[2]] == [best[0], best[2]]
    assert masked.token_ids[1] == plain.logprobs[1].top_token_ids[1], "the second best"
    assert masked.logprobs[1].top_token_ids == plain.logprobs[1].top_token_ids, "the model's own distribution"
    assert masked.logprobs[1].rank == 2


def test_a_bias_does_not_bring_back_what_is_excluded(folder: Path) -> None:
    [token] = sample(make_runner(folder), [row(0, prompt()[:9], logit_bias={7: 100.0})], {0: [8, 9]}).token_ids
    assert token in (8, 9)


def test_a_row_whose_tokens_are_all_excluded_gets_none(folder: Path) -> None:
    rows = [row(0, prompt()[:9]), row(1, prompt()[:9], temperature=1.0, top_p=0.9, top_k=5)]
    result = sample(make_runner(folder), [*rows, row(2, prompt()[:9])], {0: [], 1: []})
    assert result.token_ids.tolist()[:2] == [-1, -1]
    assert result.token_ids[2] >= 0
