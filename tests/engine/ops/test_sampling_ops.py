"""Sampling on the CPU against the definitions in `Ops`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cpu.philox import philox4x32_10
from tessera.engine.ops.cuda.sampling import split_config, split_vocab
from tessera.engine.ops.sampling_interface import RANDOM_GROUP
from tessera.engine.tensor import CPU, Tensor, from_numpy
from tests.support.cases.sampling_cases import (
    KEPT,
    N_SIGMA,
    SlotTables,
    gumbel_noise,
    int32s,
    kept_tokens,
    log_of,
    make_rows,
    make_state,
    plain_philox,
    rows_of,
    slots_of,
    softmax,
    tokens_of_slices,
    within_n_sigma,
)

SEED = 20261121
NO_TABLES = SlotTables({}, [])


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps()


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def draw(ops: CpuOps, logits: Any, parameters: Tensor, *, filtered: bool = True) -> np.ndarray[Any, Any]:
    return ops.sample(from_numpy(np.asarray(logits, np.float32), CPU), parameters, filtered=filtered).numpy()


def draw_many(ops: CpuOps, logits: Any, count: int, **values: Any) -> np.ndarray[Any, Any]:
    """Tokens of the same row at positions 0 to count - 1."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    return draw(ops, rows, make_rows(CPU, count, position=np.arange(count), **values))


# ---- generator ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's published known answers
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.array([int(word, 16) for word in text.split()], np.uint32)

    assert philox4x32_10(parse(counter), parse(key)).tolist() == parse(words).tolist()


def test_philox_takes_any_shape_and_a_key_per_counter(rng: np.random.Generator) -> None:
    counters = rng.integers(0, 2**32, (3, 5, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (3, 5, 2), dtype=np.uint32)
    words = philox4x32_10(counters, keys)
    for index in np.ndindex(3, 5):
        assert words[index].tolist() == plain_philox(counters[index].tolist(), keys[index].tolist())


# ---- choice -------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_the_best(ops: CpuOps) -> None:
    logits = [[1, 3, 3, 2], [-5, -6, -5, -7], [0, -0.0, -1, 0], [-0.0, 0.0, -1, 0], [-np.inf, -np.inf, -1e38, -np.inf]]
    assert draw(ops, logits, make_rows(CPU, 5, temperature=0.0)).tolist() == [1, 0, 0, 0, 2]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**31 - 1])
def test_choice_is_the_documented_formula(ops: CpuOps, rng: np.random.Generator, seed: int, position: int) -> None:
    vocab_size = 37
    for temperature in (0.3, 1.0, 2.0):
        logits = rng.normal(0, 3, vocab_size).astype(np.float32)
        noise = gumbel_noise(seed, position, vocab_size)
        expected = int(np.argmax(logits / temperature + noise))
        parameters = make_rows(CPU, 1, seed=seed, position=position, temperature=temperature)
        for filtered in (False, True):
            assert draw(ops, [logits], parameters, filtered=filtered).tolist() == [expected]


def test_words_do_not_depend_on_how_many_tokens_are_kept(ops: CpuOps, rng: np.random.Generator) -> None:
    """Few kept tokens get their noise one by one, many in bulk: both must be the noise of their id."""
    vocab_size, rows = 203, 40
    logits = rng.normal(0, 1, (rows, vocab_size)).astype(np.float32)
    parameters = make_rows(CPU, rows, seed=np.arange(rows) + 2**40, position=np.arange(rows), top_k=9)
    tokens = draw(ops, logits, parameters)
    for i in range(rows):
        kept = np.argsort(-logits[i])[:9]
        scores = logits[i][kept] + np.array(gumbel_noise(i + 2**40, i, vocab_size))[kept]
        assert tokens[i] == kept[np.argmax(scores)]


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_follow_the_filtered_softmax(ops: CpuOps, rng: np.random.Generator, name: str, vary: str) -> None:
    count, vocab_size = 2500, 9
    logits = rng.normal(0, 1, vocab_size).astype(np.float32)
    settings = DISTRIBUTIONS[name]
    parameters = make_rows(CPU, count, **settings, **{vary: np.arange(count)})
    tokens = draw(ops, np.broadcast_to(logits, (count, vocab_size)), parameters)

    probabilities = softmax(logits, settings.get("temperature", 1.0))
    kept = kept_tokens(
        probabilities.tolist(), settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0)
    )
    assert 2 <= len(kept) <= vocab_size
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[[i for i in range(vocab_size) if i not in kept]].sum() == 0
    ids = sorted(kept)
    expected = count * probabilities[ids] / probabilities[ids].sum()
    chi_square = float(((counts[ids] - expected) ** 2 / expected).sum())
    freedom = len(ids) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom)
    assert chi_square < limit, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


def test_neighbouring_seeds_and_positions_are_independent(ops: CpuOps) -> None:
    """Pairs of tokens from adjacent counters fill their square evenly."""
    count = 3000
    for vary in ("position", "seed"):
        parameters = make_rows(CPU, count, **{vary: np.arange(count)})
        tokens = draw(ops, np.zeros((count, 4)), parameters)
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        chi_square = float(((pairs - count / 16) ** 2 / (count / 16)).sum())
        assert chi_square < 15 + 5 * math.sqrt(30)


@pytest.mark.parametrize(("probabilities", "settings", "kept"), [c[1:] for c in KEPT], ids=[c[0] for c in KEPT])
def test_kept_tokens(ops: CpuOps, probabilities: list[float], settings: dict[str, Any], kept: set[int]) -> None:
    tokens = draw_many(ops, log_of(probabilities), 600, **settings)
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize(("logits", "settings", "kept"), [c[1:] for c in N_SIGMA], ids=[c[0] for c in N_SIGMA])
def test_top_n_sigma(ops: CpuOps, logits: list[float], settings: dict[str, Any], kept: set[int]) -> None:
    assert set(draw_many(ops, logits, 900, **settings).tolist()) == kept


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_top_n_sigma_of_a_large_vocabulary(ops: CpuOps, rng: np.random.Generator, n: float) -> None:
    logits = rng.normal(0, 2, 5000).astype(np.float32)
    tokens = set(draw_many(ops, logits, 900, top_n_sigma=n, temperature=2.0).tolist())
    kept = within_n_sigma(logits, n)
    assert 1 <= len(kept) < 5000
    assert tokens <= kept
    least = sorted(kept, key=lambda i: logits[i])[: (len(kept) + 1) // 2]
    assert tokens & set(least), "what is kept can be chosen"


def test_filters_of_a_large_vocabulary(ops: CpuOps, rng: np.random.Generator) -> None:
    vocab_size, count = 5000, 400
    logits = rng.normal(0, 2, vocab_size).astype(np.float32)
    probabilities = softmax(logits).tolist()
    for top_k, top_p, min_p in [(50, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.1), (40, 0.5, 0.02)]:
        tokens = draw_many(ops, logits, count, top_k=top_k, top_p=top_p, min_p=min_p)
        kept = kept_tokens(probabilities, top_k, top_p, min_p)
        assert set(tokens.tolist()) <= kept
        # What is left out would have been drawn: the least probable half of the kept tokens is reached.
        least = sorted(kept, key=lambda i: probabilities[i])[: len(kept) // 2]
        assert set(tokens.tolist()) & set(least)


def test_unfiltered_and_filters_off_are_the_same(ops: CpuOps, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 4, (50, 1000)).astype(np.float32)
    parameters = make_rows(CPU, 50, seed=np.arange(50), temperature=np.linspace(0, 2, 50))
    assert (draw(ops, logits, parameters, filtered=False) == draw(ops, logits, parameters, filtered=True)).all()


def test_a_row_alone_chooses_as_in_any_batch(ops: CpuOps, rng: np.random.Generator) -> None:
    rows, vocab_size = 24, 400
    logits = rng.normal(0, 2, (rows, vocab_size)).astype(np.float32)
    parameters = make_rows(
        CPU,
        rows,
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        position=rng.integers(0, 1000, rows),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.9], rows),
        top_k=rng.choice([0, 1, 20], rows),
        top_p=rng.choice([1.0, 0.9, 0.2], rows),
        min_p=rng.choice([0.0, 0.05], rows),
    )
    together = draw(ops, logits, parameters)
    order = rng.permutation(rows).tolist()
    assert (draw(ops, logits[order], rows_of(parameters, order)) == together[order]).all()
    for i in range(rows):
        assert draw(ops, logits[[i]], rows_of(parameters, [i])).tolist() == [together[i]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fault_nan_logits_fail_their_row_alone(ops: CpuOps, rng: np.random.Generator, temperature: float) -> None:
    logits = rng.normal(0, 1, (6, 50)).astype(np.float32)
    parameters = make_rows(CPU, 6, seed=np.arange(6), temperature=temperature, top_p=0.9)
    sound = draw(ops, logits, parameters)
    logits[1, 49] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, 7] = -np.nan
    tokens = draw(ops, logits, parameters)
    assert tokens.tolist() == [sound[0], -1, -1, -1, -1, sound[5]]


def test_padding_rows_are_left_out(ops: CpuOps) -> None:
    parameters = make_rows(CPU, 3, slot=[0, -1, 1], temperature=[0.0, 0.0, 1.0], min_tokens=5, presence_penalty=1.0)
    logits = from_numpy(np.array([[1, 2], [3, 4], [-np.inf, 5]], np.float32), CPU)
    state = make_state(CPU, [NO_TABLES, NO_TABLES], 2)
    tokens = ops.sample(logits, parameters, filtered=False)
    assert tokens.numpy().tolist() == [1, -1, 1]
    before = state.token_state.numpy().copy()
    ops.record_tokens(state, slots_of(parameters), tokens)
    assert (state.token_state.numpy() - before).tolist() == [[0, 1], [0, 1]]
    ops.adjust_logits(logits, state, parameters)
    assert logits.numpy()[1].tolist() == [3, 4]


def test_fault_nan_extreme_temperatures_and_logits_are_sound(ops: CpuOps) -> None:
    scale = np.float32(1e4)
    close = np.array([0.0, 1.0, 0.999], np.float32) * scale
    assert set(draw_many(ops, close, 200, temperature=1e-4).tolist()) == {1}
    assert set(draw_many(ops, close, 200, temperature=1e-40).tolist()) == {1}
    tied = draw_many(ops, [1e4, 1e4, 9.9e3], 400, temperature=1e-4)
    assert set(tied.tolist()) == {0, 1}
    assert 140 < np.count_nonzero(tied == 0) < 260
    assert set(draw_many(ops, [3e38, -3e38, 1.0], 50, temperature=1e-4, top_k=2, top_p=0.9).tolist()) == {0}
    nearly = draw_many(ops, [0.0, 1e-4], 400, temperature=1e-4)  # e to 1
    assert 0.65 < np.count_nonzero(nearly) / 400 < 0.81


def test_no_rows_is_no_work(ops: CpuOps) -> None:
    parameters = make_rows(CPU, 0)
    logits = from_numpy(np.empty((0, 10), np.float32), CPU)
    assert ops.sample(logits, parameters, filtered=True).shape == (0,)
    chosen, rank, top_ids, top_logprobs = ops.top_logprobs(logits, int32s(CPU, []), 3)
    assert (chosen.shape, rank.shape, top_ids.shape, top_logprobs.shape) == ((0,), (0,), (0, 3), (0, 3))


# ---- state and adjustment -----------------------------------------------------------------------


def test_reset_slot_describes_these_tokens_and_nothing_else(ops: CpuOps) -> None:
    state = make_state(CPU, [NO_TABLES] * 3, 6)
    before = state.token_state.numpy().copy()
    ops.reset_slot(state, 1, int32s(CPU, [0, 0, 3, 2**31 - 1]), int32s(CPU, [3, 5, 5, 5, -1, 6]))
    assert [hex(x) for x in state.token_state.numpy()[1]] == ["0x80000000", "0x0", "0x0", "0x80000001", "0x0", "0x3"]
    assert (state.token_state.numpy()[[0, 2]] == before[[0, 2]]).all()
    ops.reset_slot(state, 1, int32s(CPU, []), int32s(CPU, []))
    assert not state.token_state.numpy()[1].any()


def test_record_tokens_counts_in_the_slot(ops: CpuOps) -> None:
    state = make_state(CPU, [NO_TABLES] * 3, 4)
    for slot in range(3):
        ops.reset_slot(state, slot, int32s(CPU, [2]), int32s(CPU, [1]))
    ops.record_tokens(state, int32s(CPU, [2, 0, 1]), int32s(CPU, [2, 1, -1]))
    assert (state.token_state.numpy() & 0x7FFFFFFF).tolist() == [[0, 2, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    assert (state.token_state.numpy() >> 31).tolist() == [[0, 0, 1, 0]] * 3


def test_adjustment_against_a_plain_loop(ops: CpuOps, rng: np.random.Generator) -> None:
    rows, vocab_size = 12, 40
    tables, prompts, outputs = [], [], []
    for _ in range(rows):
        ids = rng.permutation(vocab_size)
        bias = {int(i): float(v) for i, v in zip(ids[:5], rng.normal(0, 20, 5), strict=True)}
        tables.append(SlotTables(bias, [int(i) for i in ids[3:6]]))
        prompts.append(rng.integers(0, vocab_size, 10).tolist())
        outputs.append(rng.integers(0, vocab_size, 12).tolist())
    state = make_state(CPU, tables, vocab_size)
    for slot in range(rows):
        ops.reset_slot(state, slot, int32s(CPU, prompts[slot]), int32s(CPU, outputs[slot]))
    settings: dict[str, Any] = {
        "slot": rng.permutation(rows),
        "num_output_tokens": rng.integers(0, 4, rows),
        "min_tokens": rng.integers(0, 4, rows),
        "repetition_penalty": rng.choice(np.array([1.0, 0.5, 1.7], np.float32), rows),
        "presence_penalty": rng.choice(np.array([0.0, -1.5, 2.0], np.float32), rows),
        "frequency_penalty": rng.choice(np.array([0.0, 0.25, -2.0], np.float32), rows),
    }
    logits = rng.normal(0, 5, (rows, vocab_size)).astype(np.float32)

    expected = logits.astype(np.float64)
    for i in range(rows):
        slot = settings["slot"][i]
        for token_id, bias_value in tables[slot].bias.items():
            expected[i, token_id] += bias_value
        if settings["num_output_tokens"][i] < settings["min_tokens"][i]:
            for token_id in tables[slot].suppressed:
                expected[i, token_id] = -math.inf
        repetition = float(settings["repetition_penalty"][i])
        for token_id in set(prompts[slot]) | set(outputs[slot]):
            count = outputs[slot].count(token_id)
            value = expected[i, token_id]
            value = value / repetition if value > 0 else value * repetition
            value -= float(settings["frequency_penalty"][i]) * count
            value -= float(settings["presence_penalty"][i]) * (count > 0)
            expected[i, token_id] = value

    tensor = from_numpy(logits, CPU)
    ops.adjust_logits(tensor, state, make_rows(CPU, rows, **settings))
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_suppressed_tokens_come_back_after_min_tokens(ops: CpuOps) -> None:
    state = make_state(CPU, [SlotTables({}, [1])], 3)
    for num_output_tokens, expected in ((0, 2), (1, 2), (2, 1)):
        logits = from_numpy(np.array([[0, 9, 5]], np.float32), CPU)
        parameters = make_rows(CPU, 1, temperature=0.0, min_tokens=2, num_output_tokens=num_output_tokens)
        ops.adjust_logits(logits, state, parameters)
        assert ops.sample(logits, parameters, filtered=False).numpy().tolist() == [expected]


def test_bias_cannot_free_a_suppressed_token(ops: CpuOps) -> None:
    state = make_state(CPU, [SlotTables({1: 100.0}, [1])], 3)
    logits = from_numpy(np.array([[0, 9, 5]], np.float32), CPU)
    ops.adjust_logits(logits, state, make_rows(CPU, 1, min_tokens=1))
    assert logits.numpy().tolist() == [[0, -math.inf, 5]]


# ---- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 3000])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_logprobs_against_float64(ops: CpuOps, rng: np.random.Generator, vocab_size: int, offset: float) -> None:
    rows, k = 5, min(20, vocab_size)
    logits = (rng.normal(0, 3, (rows, vocab_size)) + offset).astype(np.float32)
    token_ids = rng.integers(0, vocab_size, rows)
    chosen, rank, top_ids, top_logprobs = ops.top_logprobs(from_numpy(logits, CPU), int32s(CPU, token_ids), k)
    for i in range(rows):
        expected = np.log(softmax(logits[i]))
        order = np.argsort(-logits[i], kind="stable")[:k]
        np.testing.assert_allclose(chosen.numpy()[i], expected[token_ids[i]], rtol=1e-5, atol=1e-5)
        assert rank.numpy()[i] == 1 + np.count_nonzero(logits[i] > logits[i, token_ids[i]])
        assert top_ids.numpy()[i].tolist() == order.tolist()
        np.testing.assert_allclose(top_logprobs.numpy()[i], expected[order], rtol=1e-5, atol=1e-5)


def test_logprobs_of_ties_and_impossible_tokens(ops: CpuOps) -> None:
    logits = from_numpy(np.array([[1, 2, 1, 2, -np.inf, 2, -np.inf]], np.float32), CPU)
    chosen, rank, top_ids, top_logprobs = ops.top_logprobs(logits, int32s(CPU, [2]), 7)
    assert top_ids.numpy().tolist() == [[1, 3, 5, 0, 2, 4, 6]]
    assert rank.numpy().tolist() == [4]
    assert chosen.numpy()[0] == top_logprobs.numpy()[0, 4]
    assert np.isneginf(top_logprobs.numpy()[0, 5:]).all()
    _, _, first_four, _ = ops.top_logprobs(logits, int32s(CPU, [2]), 4)
    assert first_four.numpy().tolist() == [[1, 3, 5, 0]]
    _, _, none, _ = ops.top_logprobs(logits, int32s(CPU, [2]), 0)
    assert none.shape == (1, 0)


def test_logprobs_of_many_ties_are_in_order_of_id(ops: CpuOps, rng: np.random.Generator) -> None:
    logits = np.round(rng.normal(0, 3, (1, 500))).astype(np.float32)
    _, _, top_ids, _ = ops.top_logprobs(from_numpy(logits, CPU), int32s(CPU, [0]), 200)
    assert top_ids.numpy()[0].tolist() == np.argsort(-logits[0], kind="stable")[:200].tolist()


def test_logprobs_survive_rows_that_failed(ops: CpuOps) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    chosen, rank, _, top_logprobs = ops.top_logprobs(from_numpy(logits, CPU), int32s(CPU, [-1, -1, 5]), 4)
    assert np.isnan(chosen.numpy()[:2]).all()
    assert rank.numpy().tolist() == [0, 0, 1]
    np.testing.assert_allclose(top_logprobs.numpy()[2], -math.log(8), rtol=1e-6)


# ---- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 64, 1024, 5000])
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 4097, 32000, 151936, 262145])
def test_chunks_cover_the_vocabulary_once(rows: int, vocab_size: int) -> None:
    split = split_vocab(rows, vocab_size)
    assert split.chunk_size % RANDOM_GROUP == 0
    assert (split.num_splits - 1) * split.chunk_size < vocab_size <= split.num_splits * split.chunk_size
    assert split_config(rows, split).grid == (split.num_splits, rows, 1)


def test_tokens_of_slices_are_those_of_the_whole(ops: CpuOps, rng: np.random.Generator) -> None:
    """By chance and without; ties go to the lowest id, and NaN and padding give none."""
    logits = rng.normal(0, 3, (12, 101)).astype(np.float32)
    logits[1, [5, 70]] = 50.0
    logits[2] = -np.inf
    logits[3, 99] = np.nan
    logits[4, :60] = -np.inf
    logits[5] = 0.0
    logits[5, ::2] = -0.0
    rows = make_rows(CPU, 12, temperature=[0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 2, seed=7, slot=[*range(11), -1])
    found = tokens_of_slices(ops, logits, [0, 44, 48, 101], rows)
    assert found.tolist() == draw(ops, logits, rows, filtered=False).tolist()
    assert found[1] == 5
    assert {found[2], found[3], found[11]} == {-1}
