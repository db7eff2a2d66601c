"""Eight-bit floats: codes, scales for rows and blocks, and rounded activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.formats import Fp8Format, LinearWeight, WeightPart
from tessera.engine.formats.fp8 import E4M3_VALUES, codes_of
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.support.cases.op_cases import Array, random_array


def e4m3(code: int) -> float:
    """As the OCP 8-bit floating point specification 1.0 (section 5) has it."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_codes_are_those_of_the_specification() -> None:
    np.testing.assert_array_equal(E4M3_VALUES, [e4m3(code) for code in range(256)])
    finite = E4M3_VALUES[np.isfinite(E4M3_VALUES)]
    values = np.random.default_rng(1).uniform(-500, 500, 2000).astype(np.float32)
    nearest = finite[np.abs(finite[None] - values[:, None]).argmin(axis=1)]
    np.testing.assert_allclose(np.abs(E4M3_VALUES[codes_of(values)] - values), np.abs(nearest - values))


@pytest.mark.parametrize(("block", "rows", "columns"), [(None, 7, 33), ((128, 128), 200, 300), ((2, 16), 5, 40)])
def test_elements_are_code_times_scale(block: tuple[int, int] | None, rows: int, columns: int) -> None:
    format, rng = Fp8Format(block), np.random.default_rng(rows)
    values_layout, scales_layout = format.layout(rows, columns)
    arrays: dict[str, Array] = {
        "values": rng.integers(0, 0x7F, values_layout.shape).astype(np.uint8),
        "scales": rng.uniform(0.5, 2, scales_layout.shape).astype(np.float32),
    }
    high, wide = block or (1, columns)
    expected = [
        [e4m3(int(arrays["values"][r, k])) * float(arrays["scales"][r // high, k // wide]) for k in range(columns)]
        for r in range(rows)
    ]
    choices: tuple[Any, ...] = (slice(None), slice(3, 5), np.array([4, 0, 4]))
    for chosen in choices:
        found = format.dequantize(arrays, chosen)
        np.testing.assert_allclose(found, np.array(expected)[chosen], rtol=1e-7)


@pytest.mark.parametrize(
    "format", [Fp8Format(), Fp8Format((128, 128)), Fp8Format(None, True, 0.01), Fp8Format(None, False)]
)
def test_products_take_activations_as_the_scheme_says(format: Fp8Format) -> None:
    """In float64: each token, or 128 of its columns, is scaled so that its largest magnitude is 448, and rounded."""
    x, (rows, columns) = random_array(1, (5, 300), float32), (9, 300)
    x[2] = 0
    made = Fp8Format.quantize(random_array(2, (rows, columns)))
    if format.block:
        made["scales"] = np.array([[0.5, 0.25, 0.125]], np.float32)
    taken = x.astype(np.float64)
    if format.rounds_input:
        for token in taken:
            for start in range(0, columns, 128 if format.block else columns):
                piece = token[start : start + 128] if format.block else token
                scale = format.input_scale or max(np.abs(piece).max() / 448, 1e-30)
                codes = codes_of((piece / scale).astype(np.float32))
                piece[:] = [e4m3(int(code)) * scale for code in codes]
    weight = LinearWeight(
        (WeightPart(format, (rows, columns), {name: from_numpy(a, CPU) for name, a in made.items()}),)
    )
    expected = taken @ format.dequantize(made, slice(None)).astype(np.float64).T
    found = make_ops(CPU).linear(from_numpy(x, CPU), weight).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_quantised_rows_are_nearest() -> None:
    values = random_array(3, (6, 50))
    values[4] = 0
    made = Fp8Format.quantize(values)
    found = Fp8Format().dequantize(made, slice(None))
    assert (
        np.abs(found - values) <= np.abs(values) * 2.0**-4 + np.abs(values).max(axis=1, keepdims=True) / 448 * 2.0**-9
    ).all()
    np.testing.assert_allclose(np.abs(found).max(axis=1), np.abs(values).max(axis=1), rtol=1e-6)
