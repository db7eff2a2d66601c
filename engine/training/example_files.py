"""Examples and preferences in a file, so that a training that is resumed need not make them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.tensor import CPU, from_numpy
from tessera.engine.training.examples import Example, Item
from tessera.engine.training.preferences import Preference
from tessera.engine.training.tensor_files import load_tensors, save_tensors

NAMES = ("token_ids", "weights", "lengths")


def save_items(path: Path, items: Sequence[Item]) -> None:
    """Complete or absent. Raises: OSError."""
    sequences = [sequence for item in items for sequence in item.sequences]
    arrays = (
        np.concatenate([np.zeros(0, np.int32), *(each.token_ids for each in sequences)]),
        np.concatenate([np.zeros(0, np.float32), *(each.weights for each in sequences)]),
        np.array([each.num_tokens for each in sequences], np.int32),
    )
    save_tensors(path, {name: from_numpy(array, CPU) for name, array in zip(NAMES, arrays, strict=True)})


def load_examples(path: Path) -> list[Example]:
    """Raises: ModelError where the file is malformed."""
    tensors = load_tensors(path, CPU)
    if set(tensors) != set(NAMES):
        raise ModelError(f"{path} has the tensors {', '.join(tensors)}; examples are {', '.join(NAMES)}")
    ids, weights, lengths = (tensors[name].numpy() for name in NAMES)
    ends: np.ndarray[Any, Any] = np.cumsum(lengths)
    return [
        Example(ids[end - length : end], weights[end - length : end]) for end, length in zip(ends, lengths, strict=True)
    ]


def load_preferences(path: Path) -> list[Preference]:
    """Raises: ModelError where the file is malformed."""
    sequences = load_examples(path)
    return [Preference(*pair) for pair in zip(sequences[::2], sequences[1::2], strict=True)]
