"""Rows that are sampled, with all kinds of settings."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Device, from_numpy
from tests.support.cases.sampling_cases import make_rows

Array = np.ndarray[Any, Any]


def varied_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> Array:
    """Every shape of row that the filters tell apart: spread, peaked, flat, clustered, tied, partly impossible."""
    logits = np.empty((rows, vocab_size), np.float32)
    shapes = ["spread", "peaked", "flat", "clustered", "close", "tied", "holes"]
    for i in range(rows):
        shape = shapes[i % len(shapes)]
        row = rng.normal(0, 3, vocab_size)
        if shape == "peaked":
            row[rng.integers(vocab_size)] += 25
        elif shape == "flat":
            row[:] = rng.normal()
        elif shape == "clustered":  # all in a few bins of the first round
            row *= 1e-3
        elif shape == "close":  # all in one bin of the second round
            row *= 1e-6
        elif shape == "tied":
            row = np.round(row)
        elif shape == "holes":
            row[rng.random(vocab_size) < 0.5] = -np.inf
            row[rng.integers(vocab_size)] = 1.0
        logits[i] = row
    return logits


def varied_settings(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    return {
        "seed": rng.integers(0, 2**64, rows, dtype=np.uint64),
        "position": rng.integers(0, 2**20, rows),
        "temperature": rng.choice([0.0, 1e-4, 0.7, 1.0, 2.0], rows, p=[0.1, 0.1, 0.3, 0.3, 0.2]),
        "top_k": rng.choice([0, 1, 2, 20, 5000, 2**31 - 1], rows),
        "top_p": rng.choice([1.0, 0.95, 0.5, 1e-6], rows),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows),
        "top_n_sigma": rng.choice([0.0, 0.0, 0.3, 1.0, 2.5], rows),
    }


def sample(ops: Ops, logits: Array, device: Device, filtered: bool, **settings: Any) -> Array:
    parameters = make_rows(device, len(logits), **settings)
    return ops.sample(from_numpy(logits, device), parameters, filtered=filtered).numpy()
