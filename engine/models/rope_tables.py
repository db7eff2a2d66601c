"""The RoPE tables of a model on its device, and which of their rows a sequence takes.

The frequencies of `longrope` and `dynamic` depend on a sequence's length. A cached key keeps the rotation that it was
stored with, so a sequence keeps its frequencies to its end, and what it may become decides: with prompt and max_tokens
within the trained length it takes the short form, else the long one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tessera.engine.models.rope import RopeConfig, cos_sin_table
from tessera.engine.tensor import Device, Tensor, from_numpy

logger = logging.getLogger("tessera.engine.models")


class RopeTables(NamedTuple):
    """Cosines and sines for every position.

    Attributes:
        tables: of each of a model's RoPEs [short_len + max_model_len, rotary_dim] float32, see `cos_sin_table`: the
            first `short_len` rows are the short form's, the others the long form's.
        short_len: longest sequence of the short form; 0 if there is but one form.
    """

    tables: tuple[Tensor, ...]
    short_len: int


def short_len(ropes: Sequence[RopeConfig], max_model_len: int) -> int:
    """The trained length if longer sequences are rotated otherwise than shorter ones; 0 if all are alike."""
    lengths = [rope.original_max_len for rope in ropes if rope.depends_on_length]
    shortest = min(lengths, default=0)
    return shortest if shortest < max_model_len else 0


def make_tables(ropes: Sequence[RopeConfig], max_model_len: int, device: Device) -> RopeTables:
    """Raises: OutOfMemoryError."""
    short = short_len(ropes, max_model_len)
    if short:
        kinds = ", ".join(sorted({rope.kind for rope in ropes if rope.depends_on_length}))
        logger.info(
            "%s RoPE: a request whose prompt and max_tokens stay within %d tokens is computed as at the trained "
            "length, any other with the factors for long sequences from its first token; --max-model-len %d gives "
            "all requests the former",
            kinds,
            short,
            short,
        )
    forms = [length for length in (short, max_model_len) if length]
    return RopeTables(
        tuple(from_numpy(np.concatenate([cos_sin_table(rope, length) for length in forms]), device) for rope in ropes),
        short,
    )
