"""A parameter's declaration and what follows from it: its range, its place in the row, its flag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import ROW_PARAMETERS, RowFlag, SamplingParams
from tessera.engine.contract.sampling_row import PADDING_ROW, SAMPLING_ROW, row_values
from tessera.engine.core.step_batch import SamplingBatch


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, **values})


def batch(*rows: SamplingParams, position: int = 10, num_prompt_tokens: int = 8) -> SamplingBatch:
    values = [
        row_values(each, slot=slot, num_prompt_tokens=num_prompt_tokens, position=position)
        for slot, each in enumerate(rows)
    ]
    return SamplingBatch.of(np.array(values, SAMPLING_ROW))


def test_a_default_is_off_and_in_range() -> None:
    assert params().flags == 0
    params().verify(vocab_size=1)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"temperature": 0.3, "seed": 5}, 0),
        ({"top_k": 5}, RowFlag.FILTERED),
        ({"top_p": 0.9}, RowFlag.FILTERED),
        ({"min_p": 0.1}, RowFlag.FILTERED),
        ({"top_n_sigma": 1.0}, RowFlag.FILTERED),
        ({"min_p": 0.1, "temperature": 0.0}, 0),
        ({"repetition_penalty": 0.9}, RowFlag.PENALIZED),
        ({"presence_penalty": -0.1}, RowFlag.PENALIZED),
        ({"frequency_penalty": 0.1, "temperature": 0.0}, RowFlag.PENALIZED),
        ({"min_tokens": 3}, RowFlag.SUPPRESSED),
        ({"logit_bias": {3: 1.0}}, RowFlag.BIASED),
        ({"logprobs": 0}, RowFlag.LOGPROBS),
    ],
)
def test_flags_are_those_of_the_values(values: dict[str, Any], flags: int) -> None:
    assert params(**values).flags == flags
    every = params(**{"temperature": 1.0, **values, "top_k": 3, "presence_penalty": 1.0})
    expected = flags | RowFlag.PENALIZED | (RowFlag.FILTERED if every.temperature else 0)
    assert every.flags == expected


@pytest.mark.parametrize("name", ROW_PARAMETERS)
def test_range_is_that_of_the_declaration(name: str) -> None:
    parameter = ROW_PARAMETERS[name]
    low, high = parameter.low, parameter.high
    most = {"max_tokens": 2**31 - 1}
    params(**most, **{name: high}).verify(vocab_size=1)
    wrong = [high * 2 + 1, low - 1] + ([] if np.issubdtype(parameter.type, np.integer) else [float("nan")])
    if parameter.open_low:
        wrong.append(low)
    else:
        params(**{name: low}).verify(vocab_size=1)
    for value in wrong:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be") as refused:
            params(**most, **{name: value}).verify(vocab_size=1)
        assert refused.value.param == name


def test_a_row_has_the_values_of_its_parameters() -> None:
    values = {"temperature": 0.75, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1, "min_tokens": 2}
    values |= {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 2.0}
    row = np.array(row_values(params(**values, logprobs=4), slot=3, num_prompt_tokens=6, position=9), SAMPLING_ROW)
    assert {name: row[name].item() for name in values} == values
    facts = ("slot", "num_prompt_tokens", "position", "num_logprobs")
    assert [row[name].item() for name in facts] == [3, 6, 9, 4]


def test_padding_samples_nothing() -> None:
    assert PADDING_ROW["slot"] == -1
    assert PADDING_ROW["flags"] == 0
    assert PADDING_ROW["num_logprobs"] == -1


def test_flags_of_a_batch_are_those_of_any_row() -> None:
    found = batch(params(), params(top_k=3), params(logprobs=2), params(temperature=0.0, top_k=3))
    assert (found.needs_adjustment, found.needs_filter) == (False, True)
    assert found.rows_with(RowFlag.FILTERED).tolist() == [1]
    assert found.rows_with(RowFlag.LOGPROBS).tolist() == [2]
    assert found.rows_with(RowFlag.CONSTRAINED).tolist() == []
    assert batch().flags == 0


@pytest.mark.parametrize(("num_output_tokens", "expected"), [(0, True), (2, True), (3, False)])
def test_suppression_ends_with_min_tokens(num_output_tokens: int, expected: bool) -> None:
    found = batch(params(), params(min_tokens=3), position=8 + num_output_tokens)
    assert found.needs_adjustment is expected
