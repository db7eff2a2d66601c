"""Inputs for the sampling operations, and their definitions in plain Python and float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.sampling_row import SAMPLING_ROW, row_values
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.sampling_interface import SamplingState
from tessera.engine.tensor import Device, Tensor, from_numpy

Array = np.ndarray[Any, Any]


def make_rows(device: Device, count: int, **values: Any) -> Tensor:
    """[count] SAMPLING_ROW with every parameter off unless named; a value is one for all rows or one a row.

    Slots are 0, 1, 2, ...; `num_output_tokens` takes the place of `num_prompt_tokens`.
    """
    values = {"slot": np.arange(count), "position": 0, "num_output_tokens": 0, **values}
    columns = {name: np.broadcast_to(np.asarray(value), count).tolist() for name, value in values.items()}
    slots, positions, outputs = (columns.pop(name) for name in ("slot", "position", "num_output_tokens"))
    rows = np.empty(count, SAMPLING_ROW)
    for i in range(count):
        params = SamplingParams(max_tokens=1, **{name: column[i] for name, column in columns.items()})
        prompt = positions[i] - outputs[i]
        rows[i] = row_values(params, slot=slots[i], num_prompt_tokens=prompt, position=positions[i])
    return from_numpy(rows, device)


def tokens_of_slices(ops: Ops, logits: Array, bounds: list[int], rows: Tensor) -> Array:
    """Of logits [S, V] in slices that begin and end with `bounds`, as ranks choose that have one each."""
    parts = [from_numpy(np.ascontiguousarray(logits[:, begin:end]), ops.device) for begin, end in pairwise(bounds)]
    count = len(logits)

    def best(choose: Callable[[Tensor, int, Tensor], None]) -> Tensor:
        found = np.zeros(count, np.uint64)
        for part, first in zip(parts, bounds, strict=False):
            out = from_numpy(np.zeros(count, np.uint64), ops.device)
            choose(part, first, out)
            found = np.maximum(found, out.numpy())
        return from_numpy(found, ops.device)

    maxima = best(lambda part, first, out: ops.best_of_slice(part, rows, first, out=out))
    choices = best(lambda part, first, out: ops.choose_in_slice(part, rows, maxima, first, out=out))
    tokens = from_numpy(np.zeros(count, np.int32), ops.device)
    ops.slice_tokens(maxima, choices, out=tokens)
    return np.array(tokens.numpy())


def rows_of(rows: Tensor, indices: list[int]) -> Tensor:
    """The rows with these indices in this order."""
    return from_numpy(rows.numpy()[indices], rows.device)


def slots_of(rows: Tensor) -> Tensor:
    """[count] int32, as `record_tokens` takes them."""
    return from_numpy(np.ascontiguousarray(rows.numpy()["slot"]), rows.device)


@dataclass
class SlotTables:
    """Bias entries and suppressed ids of one slot."""

    bias: dict[int, float]
    suppressed: list[int]


def make_state(
    device: Device, slots: list[SlotTables], vocab_size: int, max_bias: int = 16, max_suppressed: int = 8
) -> SamplingState:
    """Tables as given; what lies behind their ends, and the token states, are deliberately not zero."""
    token_state = np.full((len(slots), vocab_size), 0x80000007, np.uint32)
    bias_token_ids = np.zeros((len(slots), max_bias), np.int32)
    bias_values = np.full((len(slots), max_bias), 1e6, np.float32)
    suppressed_token_ids = np.zeros((len(slots), max_suppressed), np.int32)
    for i, tables in enumerate(slots):
        bias_token_ids[i, : len(tables.bias)] = list(tables.bias)
        bias_values[i, : len(tables.bias)] = list(tables.bias.values())
        suppressed_token_ids[i, : len(tables.suppressed)] = tables.suppressed
    return SamplingState(
        token_state=from_numpy(token_state, device),
        bias_token_ids=from_numpy(bias_token_ids, device),
        bias_values=from_numpy(bias_values, device),
        bias_counts=from_numpy(np.array([len(s.bias) for s in slots], np.int32), device),
        suppressed_token_ids=from_numpy(suppressed_token_ids, device),
        suppressed_counts=from_numpy(np.array([len(s.suppressed) for s in slots], np.int32), device),
    )


def int32s(device: Device, values: Any) -> Tensor:
    return from_numpy(np.array(values, np.int32), device)


# ---- definitions --------------------------------------------------------------------------------


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper writes it, one counter, Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def gumbel_noise(seed: int, position: int, vocab_size: int) -> list[float]:
    noise = []
    for token_id in range(vocab_size):
        words = plain_philox([token_id // 4, position, 0, 0], [seed % 2**32, seed // 2**32])
        uniform = ((words[token_id % 4] >> 9) + 0.5) * 2.0**-23
        noise.append(-math.log(-math.log(uniform)))
    return noise


def kept_tokens(probabilities: list[float], top_k: int, top_p: float, min_p: float, slack: float = 0.0) -> set[int]:
    """The filters' definition. A positive slack loosens every limit by that share, a negative one tightens."""
    kept = {i for i, p in enumerate(probabilities) if p >= min_p * max(probabilities) * (1 - slack)}
    if 0 < top_k < len(kept):
        kth = sorted((probabilities[i] for i in kept), reverse=True)[top_k - 1]
        kept = {i for i in kept if probabilities[i] >= kth * (1 - max(slack, 0.0))}
    if top_p < 1.0:
        whole = sum(probabilities[i] for i in kept)
        reached, last = 0.0, math.inf
        for p in sorted((probabilities[i] for i in kept), reverse=True):
            reached, last = reached + p, p
            if reached >= top_p * whole * (1 + slack):
                break
        kept = {i for i in kept if probabilities[i] >= last * (1 - max(slack, 0.0))}
    return kept


def within_n_sigma(logits: np.ndarray[Any, Any], n: float, slack: float = 0.0) -> set[int]:
    """top_n_sigma's definition in float64; a positive slack loosens the limit by that share, a negative tightens it."""
    if n == 0.0:
        return set(range(len(logits)))
    wide = logits.astype(np.float64)
    reach = n * float(np.std(wide[np.isfinite(wide)]))
    return set(np.flatnonzero(wide >= wide.max() - reach * (1 + slack)).tolist())


# Name, logits, settings, ids kept.
IMPOSSIBLE = -math.inf
N_SIGMA: list[tuple[str, list[float], dict[str, Any], set[int]]] = [
    ("off", [3, 1, 1, -1], {"top_n_sigma": 0.0}, {0, 1, 2, 3}),
    ("1 sigma of 1.41", [3, 1, 1, -1], {"top_n_sigma": 1.0}, {0}),
    ("2 sigma of 1.41", [3, 1, 1, -1], {"top_n_sigma": 2.0}, {0, 1, 2}),
    ("3 sigma of 1.41", [3, 1, 1, -1], {"top_n_sigma": 3.0}, {0, 1, 2, 3}),
    ("impossible tokens do not count", [3, 1, IMPOSSIBLE, 1, -1], {"top_n_sigma": 2.0}, {0, 1, 3}),
    ("just at the limit", [2, -2, -2, 2], {"top_n_sigma": 2.0}, {0, 1, 2, 3}),
    ("just below the limit", [2, -2, -2, 2], {"top_n_sigma": 1.9999}, {0, 3}),
    ("all alike", [5, 5, 5], {"top_n_sigma": 0.5}, {0, 1, 2}),
    ("one possible token", [IMPOSSIBLE, 5, IMPOSSIBLE], {"top_n_sigma": 1.0}, {1}),
    ("no matter how hot", [3, 1, 1, -1], {"top_n_sigma": 2.0, "temperature": 2.0}, {0, 1, 2}),
    ("no matter how cold", [3, 1, 1, -1], {"top_n_sigma": 2.0, "temperature": 0.7}, {0, 1, 2}),
    ("no matter how small", [3e-6, 1e-6, 1e-6, -1e-6], {"top_n_sigma": 2.0}, {0, 1, 2}),
    ("with an outlier", [3, 1, 1, -1, -3e38], {"top_n_sigma": 0.01}, {0, 1, 2, 3}),
    ("then top_k", [3, 1, 2, -1], {"top_n_sigma": 2.0, "top_k": 2}, {0, 2}),
    ("then top_p", [1, 1, 1, -9, -9, -9, -9, -9, -9], {"top_n_sigma": 1.0, "top_p": 0.99}, {0, 1, 2}),
]


def softmax(logits: np.ndarray[Any, Any], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """In float64; -inf gives 0."""
    scaled = (logits.astype(np.float64) - float(np.max(logits))) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum()


def log_of(probabilities: list[float]) -> np.ndarray[Any, Any]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float64)).astype(np.float32)


# Name, probabilities, settings, ids kept.
FIVE = [0.4, 0.25, 0.15, 0.12, 0.08]
KEPT: list[tuple[str, list[float], dict[str, Any], set[int]]] = [
    ("top_k 1", FIVE, {"top_k": 1}, {0}),
    ("top_k 1, tied", [0.1, 0.3, 0.3, 0.3], {"top_k": 1}, {1, 2, 3}),
    ("top_k 3", FIVE, {"top_k": 3}, {0, 1, 2}),
    ("top_k 3, tied", [0.1, 0.3, 0.1, 0.4, 0.1], {"top_k": 3}, {0, 1, 2, 3, 4}),
    ("top_k 2, not tied", [0.1, 0.3, 0.1, 0.4, 0.1], {"top_k": 2}, {1, 3}),
    ("top_k of all", FIVE, {"top_k": 5}, {0, 1, 2, 3, 4}),
    ("top_k beyond all", FIVE, {"top_k": 2**31 - 1}, {0, 1, 2, 3, 4}),
    ("top_p tiny", FIVE, {"top_p": 1e-30}, {0}),
    ("top_p tiny, tied", [0.3, 0.1, 0.3, 0.3], {"top_p": 1e-6}, {0, 2, 3}),
    ("top_p below the first", FIVE, {"top_p": 0.39}, {0}),
    ("top_p above the first", FIVE, {"top_p": 0.41}, {0, 1}),
    ("top_p exactly two", FIVE, {"top_p": 0.65}, {0, 1}),
    ("top_p exactly three", FIVE, {"top_p": 0.8}, {0, 1, 2}),
    ("top_p exactly the first", [0.6, 0.3, 0.1], {"top_p": 0.6}, {0}),
    ("top_p exactly four", FIVE, {"top_p": 0.92}, {0, 1, 2, 3}),
    ("top_p, last tied", [0.4, 0.2, 0.2, 0.2], {"top_p": 0.5}, {0, 1, 2, 3}),
    ("top_p almost 1", FIVE, {"top_p": 0.99}, {0, 1, 2, 3, 4}),
    ("top_p 1", FIVE, {"top_p": 1.0}, {0, 1, 2, 3, 4}),
    ("min_p 1", FIVE, {"min_p": 1.0}, {0}),
    ("min_p 1, tied", [0.3, 0.1, 0.3, 0.3], {"min_p": 1.0}, {0, 2, 3}),
    ("min_p", [0.5, 0.25, 0.15, 0.1], {"min_p": 0.29}, {0, 1, 2}),
    ("min_p exactly", [0.5, 0.25, 0.15, 0.1], {"min_p": 0.5}, {0, 1}),
    ("min_p tiny", FIVE, {"min_p": 1e-30}, {0, 1, 2, 3, 4}),
    # top_p counts from what top_k and min_p left: 0.4 of 0.65 is 0.61, and 0.4 of 0.8 is 0.5
    ("top_k, then top_p", FIVE, {"top_k": 2, "top_p": 0.6}, {0}),
    ("min_p, then top_p", FIVE, {"min_p": 0.35, "top_p": 0.49}, {0}),
    ("min_p, then top_k", FIVE, {"min_p": 0.5, "top_k": 3}, {0, 1}),
    ("temperature first", [0.5, 0.3, 0.2], {"temperature": 0.5, "top_p": 0.65}, {0}),
    ("temperature before min_p", [0.5, 0.3, 0.2], {"temperature": 2.0, "min_p": 0.62}, {0, 1, 2}),
    ("impossible tokens", [0.6, 0.0, 0.4, 0.0], {"top_k": 3}, {0, 2}),
]


def falling(step: float) -> list[float]:
    """Eight probabilities, each `step` nats below the one before."""
    return [math.exp(-step * i) for i in range(8)]


# Steps that put every token into a bin of its own in the kernel's first, second or third round.
KEPT += [
    (f"top_k {k}, steps of {step}", falling(step), {"top_k": k}, set(range(k)))
    for step in (1 / 64, 1e-5, 1e-6)
    for k in (1, 2, 3, 6, 7)
]
KEPT += [
    (f"top_p {count}/8, steps of {step}", falling(step), {"top_p": (count - 0.5) / 8}, set(range(count)))
    for step in (1 / 64, 1e-5, 1e-6)
    for count in (1, 2, 5)
]
