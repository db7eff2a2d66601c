"""The parameters of one row of logits as one record: the batch's row, the upload's, and the kernels' struct.

Each `RowParameter` of SamplingParams is a field; the others are facts of the sequence. Fields are aligned as in C,
and a row is a whole number of 16 bytes, so that kernels load it with vector loads.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from tessera.engine.contract.sampling_params import ROW_PARAMETERS, RowFlag, SamplingParams

SamplingRows: TypeAlias = np.ndarray[Any, np.dtype[np.void]]  # of dtype SAMPLING_ROW

ROW_ALIGNMENT = 16

# The widest first, so that no field needs padding before it.
_PARAMETERS = sorted(ROW_PARAMETERS, key=lambda name: -np.dtype(ROW_PARAMETERS[name].type).itemsize)
_FACTS: dict[str, DTypeLike] = {
    "slot": np.int32,  # where the sequence's sampling state lives; below 0: padding, for which nothing is sampled
    "num_prompt_tokens": np.int32,
    "position": np.int32,  # index in its sequence of the token to be chosen
    "num_logprobs": np.int32,  # alternatives to report; -1: nothing is reported
    "flags": np.uint32,  # of RowFlag
}


def _row_dtype() -> np.dtype[np.void]:
    types: dict[str, DTypeLike] = {**{name: ROW_PARAMETERS[name].type for name in _PARAMETERS}, **_FACTS}
    formats = [np.dtype(type) for type in types.values()]
    ends = np.cumsum([format.itemsize for format in formats]).tolist()
    offsets = [0, *ends[:-1]]
    assert all(offset % format.itemsize == 0 for offset, format in zip(offsets, formats, strict=True))
    itemsize = -(-ends[-1] // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return np.dtype({"names": list(types), "formats": formats, "offsets": offsets, "itemsize": itemsize})


SAMPLING_ROW = _row_dtype()
ROW_BYTES = np.dtype((np.void, SAMPLING_ROW.itemsize))  # a whole row: NumPy takes ten times as long to copy its fields
_parameters_of = attrgetter(*_PARAMETERS)


def row_values(
    params: SamplingParams, *, slot: int, num_prompt_tokens: int, position: int = 0, constrained: bool = False
) -> tuple[int | float, ...]:
    """The fields of a row in their order, to be assigned to a row of an array or made into one."""
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    flags = params.flags | RowFlag.CONSTRAINED if constrained else params.flags
    return *_parameters_of(params), slot, num_prompt_tokens, position, num_logprobs, flags


PADDING_ROW = np.array(
    row_values(SamplingParams(max_tokens=1, temperature=0.0), slot=-1, num_prompt_tokens=0), SAMPLING_ROW
)
