"""Choosing tokens on the CPU: penalties, masks, filters, Gumbel noise, log-probabilities.

Tokens are compared by their distance from the most probable one, (max - logit) / temperature, so that
p = exp(-distance) / sum. Filters see distances in whole
steps of 2^-27 (a key of 32 bits, finer than float32 tells probabilities apart), and probability mass
in whole steps of 2^-40 of the most probable token's, so that sums do not depend on their order.
`cuda_src/include/sampling/distance.cuh` is the same in CUDA.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.sampling_params import RowFlag
from tessera.engine.contract.sampling_row import SamplingRows
from tessera.engine.ops.cpu.philox import keys_of_seeds, philox4x32_10
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.sampling_interface import IN_PROMPT_BIT, SamplingState
from tessera.engine.tensor import Tensor

Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
IndexArray: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
UInt32Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
UInt64Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

KEY_STEPS = 2.0**27
MASS_STEPS = 2.0**40
# Keys end at this distance, beyond which a token weighs less than a mass step.
MAX_DISTANCE = np.float32(32.0)
# Gumbel noise from 23 bits lies between -2.82 and 16.64: no token this far behind can win.
REACH = np.float32(20.0)
# Half a unit in the last place of a float32 probability: a p that rounds to the limit is within it.
MIN_P_SLACK = 2.0**-25
# Likewise for sums of them: a set whose probability rounds to top_p reaches it.
TOP_P_SLACK = 2.0**-22
# And for logits: one that is just at the limit is within it, however sigma was rounded.
TOP_N_SIGMA_SLACK = 2.0**-20
SIGMA_BITS = 20

NO_CHOICE = np.uint64(0)
SIGN_BIT = np.uint32(1 << 31)
ORDERED_NAN = np.uint32(0xFF800001)  # the next after infinity

NOISE_BATCH = 2**18  # logits whose noise is made at once: enough to hide NumPy's cost per call


class SamplingOps(Ops):
    def _reset_slot(self, state: SamplingState, slot: int, prompt: Tensor, output: Tensor) -> None:
        row = state.token_state.numpy()[slot]
        row[:] = 0
        output_ids = _ids_in_range(output.numpy(), len(row))
        np.add.at(row, output_ids, np.uint32(1))
        row[_ids_in_range(prompt.numpy(), len(row))] |= IN_PROMPT_BIT

    def _adjust_logits(self, logits: Tensor, state: SamplingState, rows: Tensor) -> None:
        for row_logits, row in zip(logits.numpy(), rows.numpy(), strict=True):
            slot = row["slot"]
            if slot < 0:
                continue
            _add_bias(row_logits, state, slot)
            if row["position"] - row["num_prompt_tokens"] < row["min_tokens"]:
                _suppress(row_logits, state, slot)
            if row["flags"] & RowFlag.PENALIZED:
                _penalize(row_logits, state.token_state.numpy()[slot], row)

    def _apply_token_mask(self, logits: Tensor, words: Tensor, rows: Tensor) -> None:
        all_logits = logits.numpy()
        allowed = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        for row, may_be_chosen in zip(rows.numpy().tolist(), allowed.view(np.bool_), strict=True):
            if row >= 0:
                all_logits[row, ~may_be_chosen] = -np.inf

    def _sample(self, logits: Tensor, rows: Tensor, filtered: bool, out: Tensor) -> None:
        all_logits, parameters, token_ids = logits.numpy(), rows.numpy(), out.numpy()

        # Of a row with NaN, this is the first NaN.
        token_ids[:] = all_logits.argmax(axis=1)
        maxima = all_logits[np.arange(len(all_logits)), token_ids]
        valid = np.isfinite(maxima) & (parameters["slot"] >= 0)
        token_ids[~valid] = -1
        random_rows = np.flatnonzero(valid & (parameters["temperature"] > 0.0))
        rows_at_once = max(NOISE_BATCH // all_logits.shape[1], 1)
        for start in range(0, len(random_rows), rows_at_once):
            batch = random_rows[start : start + rows_at_once]
            token_ids[batch] = _gumbel_choices(all_logits, maxima, batch, parameters, filtered)

    def _best_of_slice(self, logits: Tensor, rows: Tensor, first: int, out: Tensor) -> None:
        values = logits.numpy()
        ids = values.argmax(axis=1)  # of a row with NaN, this is the first NaN
        choices = choices_of(values[np.arange(len(values)), ids], ids + first)
        out.numpy()[...] = np.where(rows.numpy()["slot"] >= 0, choices, NO_CHOICE)

    def _choose_in_slice(self, logits: Tensor, rows: Tensor, maxima: Tensor, first: int, out: Tensor) -> None:
        best, parameters = maxima.numpy(), rows.numpy()
        out.numpy()[...] = best
        highest = scores_of(best)
        for i in np.flatnonzero(np.isfinite(highest) & (parameters["temperature"] > 0.0)):
            distances = _distances(logits.numpy()[i], highest[i], parameters["temperature"][i])
            ids = np.flatnonzero(distances < REACH)
            out.numpy()[i] = NO_CHOICE
            if len(ids):
                row = np.full(len(ids), i)
                scores = _gumbel_noise(parameters["seed"], parameters["position"], row, ids + first) - distances[ids]
                out.numpy()[i] = choices_of(scores, ids + first).max()

    def _slice_tokens(self, maxima: Tensor, choices: Tensor, out: Tensor) -> None:
        tokens = (~choices.numpy() & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        out.numpy()[...] = np.where(np.isfinite(scores_of(maxima.numpy())), tokens, -1)

    def _record_tokens(self, state: SamplingState, slots: Tensor, token_ids: Tensor) -> None:
        token_state = state.token_state.numpy()
        slot, token_id = slots.numpy(), token_ids.numpy()
        wanted = (slot >= 0) & (slot < token_state.shape[0]) & (token_id >= 0) & (token_id < token_state.shape[1])
        np.add.at(token_state, (slot[wanted], token_id[wanted]), np.uint32(1))

    @np.errstate(invalid="ignore", over="ignore")
    def _top_logprobs(
        self, logits: Tensor, token_ids: Tensor, chosen: Tensor, rank: Tensor, top_ids: Tensor, top_values: Tensor
    ) -> None:
        for i, (row, token_id) in enumerate(zip(logits.numpy(), token_ids.numpy(), strict=True)):
            maximum, log_sum = _log_sum_exp(row)
            known = 0 <= token_id < len(row)
            chosen.numpy()[i] = row[token_id] - maximum - log_sum if known else np.nan
            rank.numpy()[i] = 1 + np.count_nonzero(row > row[token_id]) if known else 0
            ids = _largest(row, top_ids.shape[1])
            top_ids.numpy()[i] = ids
            top_values.numpy()[i] = row[ids] - maximum - log_sum


def choices_of(scores: Float32Array, ids: IndexArray) -> UInt64Array:
    """Numbers in the order of the scores, then against that of the ids; see `cuda_src/include/sampling/choice.cuh`."""
    bits = np.where(scores == 0.0, np.float32(0.0), scores).view(np.uint32)
    ordered = np.where(bits & SIGN_BIT, ~bits, bits | SIGN_BIT)
    ordered = np.where(np.isnan(scores), ORDERED_NAN, ordered).astype(np.uint64)
    return (ordered << np.uint64(32)) | ~ids.astype(np.uint32)


def scores_of(choices: UInt64Array) -> Float32Array:
    ordered = (choices >> np.uint64(32)).astype(np.uint32)
    found: Float32Array = np.where(ordered & SIGN_BIT, ordered ^ SIGN_BIT, ~ordered).view(np.float32)
    return found


def _ids_in_range(ids: Int32Array, vocab_size: int) -> Int32Array:
    return ids[(ids >= 0) & (ids < vocab_size)]


# ---- adjustment ---------------------------------------------------------------------------------


def _add_bias(row: Float32Array, state: SamplingState, slot: int) -> None:
    count = state.bias_counts.numpy()[slot]
    ids = state.bias_token_ids.numpy()[slot, :count]
    inside = (ids >= 0) & (ids < len(row))
    row[ids[inside]] += state.bias_values.numpy()[slot, :count][inside]


def _suppress(row: Float32Array, state: SamplingState, slot: int) -> None:
    count = state.suppressed_counts.numpy()[slot]
    row[_ids_in_range(state.suppressed_token_ids.numpy()[slot, :count], len(row))] = -np.inf


def _penalize(logits: Float32Array, token_state: UInt32Array, row: np.void) -> None:
    seen = np.flatnonzero(token_state)
    found = logits[seen]
    repetition = row["repetition_penalty"]
    found = np.where(found > 0.0, found / repetition, found * repetition)
    counts = (token_state[seen] & ~IN_PROMPT_BIT).astype(np.float32)
    logits[seen] = found - (row["frequency_penalty"] * counts + row["presence_penalty"] * (counts > 0.0))


# ---- choice -------------------------------------------------------------------------------------


def _gumbel_choices(
    logits: Float32Array, maxima: Float32Array, batch: IndexArray, rows: SamplingRows, filtered: bool
) -> list[int]:
    """The tokens chosen in the rows that `batch` names, their noise made together."""
    candidates, distances = [], []
    for i in batch:
        from_best = _distances(logits[i], maxima[i], rows["temperature"][i])
        if filtered and rows["flags"][i] & RowFlag.FILTERED:
            ids = _filter(from_best, rows[i], logits[i], maxima[i])
        else:
            ids = np.flatnonzero(from_best < REACH)
        candidates.append(ids)
        distances.append(from_best[ids])

    counts = [len(ids) for ids in candidates]
    row_of_candidate = np.repeat(batch, counts)
    noise = _gumbel_noise(rows["seed"], rows["position"], row_of_candidate, np.concatenate(candidates))
    scores = np.split(noise - np.concatenate(distances), np.cumsum(counts)[:-1])
    return [int(ids[np.argmax(score)]) for ids, score in zip(candidates, scores, strict=True)]


@np.errstate(over="ignore")
def _distances(row: Float32Array, maximum: np.float32, temperature: np.float32) -> Float32Array:
    """Each token's distance from the most probable one, in nats."""
    distances = maximum - row
    distances /= temperature
    return distances


def _filter(distances: Float32Array, row: np.void, logits: Float32Array, maximum: np.float32) -> IndexArray:
    """The ids, ascending, that the row's filters keep and that can win."""
    top_k, top_p, min_p = int(row["top_k"]), float(row["top_p"]), float(row["min_p"])
    ids = np.flatnonzero(distances < MAX_DISTANCE)
    keys = (distances[ids] * np.float32(KEY_STEPS)).astype(np.uint32)
    if row["top_n_sigma"] > 0.0:
        within = keys <= _top_n_sigma_key(logits, maximum, row)
        ids, keys = ids[within], keys[within]
    if min_p > 0.0:
        within = keys <= (MIN_P_SLACK - math.log(min_p)) * KEY_STEPS
        ids, keys = ids[within], keys[within]
    if 0 < top_k < len(ids):
        within = keys <= np.partition(keys, top_k - 1)[top_k - 1]
        ids, keys = ids[within], keys[within]
    if top_p < 1.0:
        ids = ids[keys <= _top_p_key(keys, top_p)]
    return ids[distances[ids] < REACH]


@np.errstate(over="ignore")
def _top_n_sigma_key(logits: Float32Array, maximum: np.float32, row: np.void) -> float:
    """The largest key within top_n_sigma standard deviations of the most probable token, in fractions of a step.

    The deviation is that of whole numbers below 2^20, in proportion to the logits' distances from the maximum: their
    sums do not depend on their order.
    """
    distances = maximum - logits
    distances = distances[distances < np.inf]
    _, exponent = np.frexp(distances.max())
    numbers = np.ldexp(distances, SIGMA_BITS - exponent).astype(np.int64)
    count, total = len(numbers), int(numbers.sum())
    mean = total // count
    squares = int(np.square(numbers).sum()) - mean * (2 * total - mean * count)  # of differences from the mean
    sigma = math.sqrt(float(squares) / float(count))
    limit = float(row["top_n_sigma"]) * sigma * (1.0 + TOP_N_SIGMA_SLACK) * KEY_STEPS
    return math.ldexp(limit, int(exponent) - SIGMA_BITS) / float(row["temperature"])


def _top_p_key(keys: UInt32Array, top_p: float) -> np.uint32:
    """The largest key in the smallest set of least keys whose mass reaches top_p of the whole mass."""
    keys = np.sort(keys)
    distances = keys.astype(np.float32) * np.float32(1.0 / KEY_STEPS)
    masses = (np.exp(-distances) * np.float32(MASS_STEPS)).astype(np.uint64)
    reached = np.cumsum(masses)
    target = max(math.ceil(top_p * (1.0 - TOP_P_SLACK) * float(reached[-1])), 1)
    last: np.uint32 = keys[np.searchsorted(reached, np.uint64(target))]
    return last


def _gumbel_noise(seeds: UInt64Array, positions: Int32Array, rows: IndexArray, ids: IndexArray) -> Float32Array:
    """-log(-log(u)) for each (row, id) in ascending order, u in (0, 1) from the generator's word for it."""
    groups = ids >> 2
    first_of_group = np.ones(len(ids), np.bool_)
    first_of_group[1:] = (groups[1:] != groups[:-1]) | (rows[1:] != rows[:-1])
    group_rows = rows[first_of_group]
    counter = np.zeros((len(group_rows), 4), np.uint32)
    counter[:, 0] = groups[first_of_group]
    counter[:, 1] = positions[group_rows]
    one_row = rows[0] == rows[-1]  # a large one, whose single key is cheaper
    words = philox4x32_10(counter, keys_of_seeds(seeds[rows[0] if one_row else group_rows]))
    word = words.reshape(-1)[4 * (np.cumsum(first_of_group) - 1) + (ids & 3)]
    uniform = ((word >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: Float32Array = -np.log(-np.log(uniform))
    return noise


# ---- log-probabilities --------------------------------------------------------------------------


def _log_sum_exp(row: Float32Array) -> tuple[np.float32, np.float32]:
    """(maximum, log(sum(exp(row - maximum)))); apart, because their sum would lose small digits."""
    maximum: np.float32 = row.max()
    log_sum: np.float32 = np.log(np.exp(row - maximum).sum())
    return maximum, log_sum


def _largest(row: Float32Array, count: int) -> IndexArray:
    """Ids of the `count` largest elements in falling order, the lowest id first on ties."""
    if count == 0 or np.isnan(row).any():
        return np.arange(count)
    smallest = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > smallest)
    ties = np.flatnonzero(row == smallest)[: count - len(above)]
    ids = np.concatenate((above, ties))
    order: IndexArray = ids[np.argsort(-row[ids], kind="stable")]
    return order
