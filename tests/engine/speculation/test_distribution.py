"""What is sampled behind drafts has the model's distribution: a chi-square test of tokens against probabilities.

The model is a table of logits by the last token. Its probabilities after temperature and filters are worked out here by
their definitions.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import FOLDER_METHODS, MODEL_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch, StepResult, TokenMask
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.tensor import CPU, from_numpy
from tests.support.cases.token_ids import token_ids
from tests.support.fakes.fake_runner import Done, fake_limits

Array: TypeAlias = np.ndarray[Any, Any]

VOCAB_SIZE = 12
SEQS_OF_SETTINGS = 40
PROMPT_LEN = 24
NUM_TOKENS = 50
SEED = 20261
LOGITS = np.random.default_rng(SEED).normal(0.0, 2.0, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
DRAFT_LOGITS = (LOGITS + np.random.default_rng(SEED + 1).normal(0.0, 1.0, LOGITS.shape)).astype(np.float32)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.6, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.8, "top_n_sigma": 1.0},
    {"temperature": 2.0, "top_n_sigma": 2.5, "min_p": 0.02, "top_k": 7, "top_p": 0.95},
]
NUM_SEQS = SEQS_OF_SETTINGS * len(SETTINGS)
MAX_SEQS = 56  # at a time, so that a step has room for whole drafts


class TableRunner:
    """Its logits are a row of the table, and those of its draft model much the same."""

    asynchronous = False
    full_sizes: tuple[int, ...] = ()
    num_awaited_graphs = 0

    def __init__(self) -> None:
        self._ops = CpuOps()
        self._drafts = np.zeros((8, MAX_SEQS), np.int32)

    def start(self, batch: StepBatch) -> Done:
        for number, step in enumerate(batch.drafting):
            newest = step.input_ids if number == 0 else self._drafts[number - 1, -1 - step.input_ids]
            self._drafts[number, step.sampling.slots] = self._choose(DRAFT_LOGITS, newest, step)
        ids = np.append(np.zeros(MAX_SEQS, np.int32), self._drafts)[np.maximum(-1 - batch.input_ids, 0)]
        chosen = self._choose(LOGITS, np.where(batch.input_ids < 0, ids, batch.input_ids), batch)
        return Done(StepResult(chosen), self._drafts.copy())

    def _choose(self, table: Array, input_ids: Array, batch: StepBatch) -> Array:
        logits = from_numpy(table[input_ids[batch.logits_indices]].copy(), CPU)
        rows = from_numpy(batch.sampling.rows, CPU)
        return self._ops.sample(logits, rows, filtered=batch.sampling.needs_filter).numpy().copy()

    def sample(self, running: Any, mask: TokenMask | None) -> None:
        raise AssertionError("nothing is constrained")


def probabilities(
    temperature: float, top_n_sigma: float = 0.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray[Any, Any]:
    """[before, token]"""
    logits = LOGITS.astype(np.float64)
    table = np.exp(logits / temperature)
    if top_n_sigma:
        table[logits < logits.max(axis=1, keepdims=True) - top_n_sigma * logits.std(axis=1, keepdims=True)] = 0.0
    for row in table:
        row[row < min_p * row.max()] = 0.0
        order = np.argsort(-row)
        if top_k:
            row[order[top_k:]] = 0.0
        row /= row.sum()
        reached = np.cumsum(row[order])
        row[order[np.searchsorted(reached, top_p * (1 - 1e-9)) + 1 :]] = 0.0
        row /= row.sum()
    return table


def predict(number: int) -> list[int]:
    """A text such as the sequence may have."""
    rng, table, text = np.random.default_rng(number), probabilities(1.0), [number % VOCAB_SIZE]
    while len(text) < 3 * NUM_TOKENS:
        text.append(int(rng.choice(VOCAB_SIZE, p=table[text[-1]])))
    return text[1:]


def sample_texts(method: str) -> list[list[int]]:
    """The last token of the prompt and the completion of each sequence; settings take turns.

    What is looked up in prompts has another distribution than the model's.
    """
    config = EngineConfig(
        model="table",
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=4096,
        speculation="on",
        speculative_method="ngram" if method == "prediction" else method,  # type: ignore[arg-type]
        speculative_model="table" if method in FOLDER_METHODS else None,
        prompt_lookup_min=1,
    )
    core = EngineCore(
        config,
        TableRunner(),
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        num_kv_blocks=8192,
        eos_token_ids=[],
        draft_limits=fake_limits(method, None, 256) if method in MODEL_METHODS else None,
    )
    prompts = np.random.default_rng(SEED).integers(0, VOCAB_SIZE, (NUM_SEQS, PROMPT_LEN)).tolist()
    texts = [prompt[-1:] for prompt in prompts]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=SEED + number, **SETTINGS[number % len(SETTINGS)])
        prediction = token_ids(predict(number)) if method == "prediction" else None
        request = AddRequest(str(number), token_ids(prompt), params, 0.0, prediction_token_ids=prediction)
        core.add_request(request, b"client")
    while core.has_work:
        for output in core.step().get(b"client", []):
            texts[int(output.request_id)] += output.token_ids
    assert core.metrics.speculator is not None
    counts = core.metrics.speculator.by_source[method]
    assert counts.num_accepted > 500
    assert counts.num_tokens > 1.5 * counts.num_accepted
    return texts


@pytest.mark.parametrize("method", ["ngram", "suffix", "prediction", *MODEL_METHODS])
def test_chosen_tokens_have_the_model_s_probabilities(method: str) -> None:
    print(f"seeds {SEED} to {SEED + NUM_SEQS - 1}")
    texts = sample_texts(method)
    for number, settings in enumerate(SETTINGS):
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
        for text in texts[number :: len(SETTINGS)]:
            np.add.at(counts, (text[:-1], text[1:]), 1)
        expected = probabilities(**settings) * counts.sum(axis=1, keepdims=True)
        assert not counts[expected == 0].any(), f"{settings}: a token that the filters exclude was chosen"
        often = expected >= 5
        statistic = float((np.square(counts - expected)[often] / expected[often]).sum())
        freedom = int(often.sum()) - VOCAB_SIZE
        # Wilson and Hilferty's approximation of the quantile for 4 standard deviations.
        limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
        print(f"{settings}: {statistic:.1f} with {freedom} degrees of freedom, at most {limit:.1f}")
        assert statistic < limit
