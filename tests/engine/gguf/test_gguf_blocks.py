"""Quantised blocks in float32 against float64, element by element, and against the `gguf` package bit for bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.tensor_types import TENSOR_TYPES, UNSUPPORTED_TYPES
from tests.engine.gguf.block_reference import REFERENCES
from tests.support.cases.gguf_blocks import extreme_blocks, random_blocks

SEED = 20261122
QUANTIZED = {type.name: type for type in TENSOR_TYPES.values() if type.is_quantized}
# d * scale and dmin * minimum are rounded, then their products, then the difference.
ROUNDINGS = 3 * 2.0**-24
SMALLEST = 2.0**-149


def blocks_of(name: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(SEED)
    return np.concatenate((random_blocks(name, 64 * QUANTIZED[name].block_size, rng), extreme_blocks(name)))


def test_every_quantised_type_has_a_reference() -> None:
    assert set(REFERENCES) == set(QUANTIZED)


@pytest.mark.parametrize("name", REFERENCES)
def test_blocks_equal_the_float64_reference(name: str) -> None:
    blocks = blocks_of(name)
    found = dequantize(blocks, QUANTIZED[name])
    with np.errstate(all="ignore"):
        terms = np.array([list(REFERENCES[name](block.tobytes())) for block in blocks])
        expected = terms.sum(axis=-1)
        bound = np.abs(terms).sum(axis=-1) * ROUNDINGS + SMALLEST
        assert np.array_equal(np.isnan(found), np.isnan(expected)), f"seed {SEED}"
        finite = np.isfinite(expected.astype(np.float32))
        assert np.array_equal(found[~finite], expected[~finite].astype(np.float32), equal_nan=True)
        assert (np.abs(found - expected)[finite] <= bound[finite]).all(), f"seed {SEED}"
    assert finite.sum() > found.size / 2


@pytest.mark.parametrize(("number", "name"), [(number, type.name) for number, type in TENSOR_TYPES.items()])
def test_blocks_equal_the_gguf_package_bit_for_bit(number: int, name: str) -> None:
    kind = gguf.GGMLQuantizationType(number)
    type = TENSOR_TYPES[number]
    assert kind.name == name
    assert gguf.GGML_QUANT_SIZES[kind] == (type.block_size, type.block_bytes)
    rng = np.random.default_rng(SEED)
    blocks = rng.integers(0, 256, (256, 4 * type.block_bytes), dtype=np.uint8)
    if name in QUANTIZED:
        extreme = extreme_blocks(name)
        blocks = np.concatenate((blocks, extreme[: len(extreme) // 4 * 4].reshape(-1, 4 * type.block_bytes)))
    found = dequantize(blocks, type)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, kind).astype(np.float32)
    assert found.shape == expected.shape == (len(blocks), 4 * type.block_size)
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert (same | np.isnan(found) & np.isnan(expected)).all(), f"seed {SEED}"


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_numbers_quantised_by_the_gguf_package_come_back(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(SEED).standard_normal((8, 256)).astype(np.float32)
    found = dequantize(gguf.quantize(values, kind), QUANTIZED[name])
    step = {"Q8_0": 0.03, "Q5_0": 0.25, "Q5_1": 0.2, "Q4_0": 0.5, "Q4_1": 0.4, "MXFP4": 1.0}[name]
    assert np.abs(found - values).max() < step, f"seed {SEED}"


def test_names_of_unsupported_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: name for number, name in UNSUPPORTED_TYPES.items() if number in theirs}.items() <= theirs.items()
    assert set(theirs) <= set(TENSOR_TYPES) | set(UNSUPPORTED_TYPES)
