"""Weights of safetensors checkpoints in the order of the kernels: the same numbers, packed by whole words."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import (
    AffineFormat,
    Fp8Format,
    GroupFormat,
    Int8RowsFormat,
    Nf4Format,
    WeightFormat,
    packed_format,
)
from tests.support.cases.op_cases import Array, random_array

FORMATS: list[tuple[WeightFormat, str]] = [
    *((GroupFormat(4, 32), "Int4Group32"), (GroupFormat(4, 64), "Int4Group64"), (GroupFormat(4, 256), "Int4Group128")),
    *((GroupFormat(8, 32), "Int8Group32"), (GroupFormat(8, 64), "Int8Group64"), (GroupFormat(8, 2048), "Int8Group128")),
    *((Fp8Format(), "Fp8Group128"), (Fp8Format((3, 128)), "Fp8Group128"), (Int8RowsFormat(), "Int8Group128")),
    *((Nf4Format(64), "Nf4Group64"), (Nf4Format(256), "Nf4Group128")),
]


def stored_arrays(format: WeightFormat, values: Array) -> dict[str, Array]:
    if isinstance(format, Fp8Format) and format.block:
        made = Fp8Format.quantize(values)
        scales = random_array(9, format.layout(*values.shape)[1].shape, np.dtype(np.float32))
        return {**made, "scales": np.abs(scales)}
    made = format.quantize(values)  # type: ignore[attr-defined]
    return {name: np.asarray(array) for name, array in made.items()}


@pytest.mark.parametrize(("format", "name"), FORMATS, ids=str)
@pytest.mark.parametrize("columns", [32, 224, 1056])
def test_packed_numbers_are_those_stored(format: WeightFormat, name: str, columns: int) -> None:
    """To the 16 bits of a scale's fraction that a header has; in pieces that begin anywhere."""
    values = random_array(columns, (11, columns))
    arrays = stored_arrays(format, values)
    packed = packed_format(format, columns)
    assert packed is not None
    assert packed.kernel_type == name or columns == 32
    found: dict[str, list[Array]] = {tensor: [] for tensor in packed.tensor_names}
    for rows in (slice(0, 4), slice(4, 11)):
        step = format.row_step

        def array_of(stored: str, rows: slice = rows, step: int = step) -> Array:
            share = step if len(arrays[stored]) < 11 else 1
            return arrays[stored][rows.start // share : -(-rows.stop // share)]

        for tensor, pieces in found.items():
            pieces.append(packed.packed(tensor, format, array_of, rows, columns))
    whole = {tensor: np.concatenate(pieces) for tensor, pieces in found.items()}
    assert [(array.shape, array.dtype) for array in whole.values()] == [tuple(t) for t in packed.layout(11, columns)]
    numbers = packed.dequantize(whole, slice(None))
    np.testing.assert_allclose(numbers[:, :columns], format.dequantize(arrays, slice(None)), rtol=2.0**-16, atol=0)
    codes = packed.numbers_of(whole["codes"].reshape(-1, 4 * packed.lane_words))
    np.testing.assert_array_equal(packed.codes_of(codes).reshape(whole["codes"].shape), whole["codes"])


def test_scales_in_16_bits_are_exact() -> None:
    format = GroupFormat(4, 32)
    arrays = format.quantize(random_array(1, (5, 64)))
    arrays["scales"] = arrays["scales"].astype(np.float16).astype(np.float32)
    packed = packed_format(format, 64)
    assert packed is not None
    whole = {name: packed.packed(name, format, arrays.__getitem__, slice(0, 5), 64) for name in packed.tensor_names}
    np.testing.assert_array_equal(packed.dequantize(whole, slice(None))[:, :64], format.dequantize(arrays, slice(None)))


@pytest.mark.parametrize(
    ("format", "columns"),
    [(GroupFormat(4, 48), 192), (GroupFormat(4, 32), 48), (AffineFormat(), 128), (Nf4Format(32), 64)],
)
def test_what_no_kernel_takes(format: WeightFormat, columns: int) -> None:
    assert packed_format(format, columns) is None


def test_a_scale_beyond_the_kernels_is_refused() -> None:
    format = Fp8Format()
    arrays: dict[str, Array] = {"values": np.zeros((1, 32), np.uint8), "scales": np.array([[200]], np.float32)}
    packed = packed_format(format, 32)
    assert packed is not None
    with pytest.raises(ModelError, match="the scale 200 of an FP8 weight is above 128"):
        packed.packed("headers", format, arrays.__getitem__, slice(0, 1), 32)
