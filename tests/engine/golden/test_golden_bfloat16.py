"""Logits in bfloat16 are no further from those in float32 than those of Hugging Face transformers (tests/golden)."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, bfloat16
from tests.support.decoder_harness import DecoderHarness
from tests.support.models import tiny_families, tiny_models
from tests.support.models.tiny_families import FAMILIES, MAX_LEN, POSITIONS, VOCAB, build_family
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.paths import GOLDEN

Array = np.ndarray[Any, Any]

THEIRS: dict[str, float] = json.loads((GOLDEN / "golden_bfloat16.json").read_text())
OPS = make_ops(CPU)
MOST = 1.5  # times their error, of one tiny model: in how few numbers roundings happen to fall together


def logits(name: str, folder: Path) -> tuple[Array, Array]:
    """In bfloat16, and those of transformers in float32."""
    if name in FAMILIES:
        made = DecoderHarness.of(build_family(name, folder), OPS, bfloat16, max_model_len=MAX_LEN)
        with np.load(GOLDEN / "golden_families.npz") as golden:
            return made.logits(tiny_families.prompt())[list(POSITIONS), :VOCAB], golden[name]
    model = TINY_MODELS[name]
    made = DecoderHarness.of(build(model, folder), OPS, bfloat16, max_model_len=model.max_model_len)
    with np.load(GOLDEN / "golden_logits.npz") as golden:
        return made.logits(tiny_models.prompt())[golden["positions"]], golden[name]


@cache
def share_of_theirs(name: str) -> float:
    with TemporaryDirectory() as folder:
        found, expected = logits(name, Path(folder))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)) / THEIRS[name]


@pytest.mark.parametrize("name", [*TINY_MODELS, *FAMILIES])
def test_no_model_is_much_further(name: str) -> None:
    assert share_of_theirs(name) <= MOST


def test_most_models_are_nearer() -> None:
    assert set(THEIRS) == {*TINY_MODELS, *FAMILIES}, "run tests/golden/make_golden_bfloat16.py again"
    assert statistics.median(map(share_of_theirs, THEIRS)) <= 1
