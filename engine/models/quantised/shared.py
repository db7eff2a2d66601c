"""Rows and columns that a rank has of a quantised matrix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tessera.engine.formats.format import Array
from tessera.engine.models.quantised.stored import StoredMatrix

Rows = np.ndarray[Any, np.dtype[np.int64]]


class SharedMatrix(StoredMatrix):
    """As they are stored, so that they stand for the same numbers.

    Raises: ValueError where rows or columns that share numbers would be taken apart.
    """

    def __init__(self, whole: StoredMatrix, rows: Rows | None, columns: slice | None) -> None:
        self._whole = whole
        self._runs = [slice(0, whole.shape[0])] if rows is None else _runs(rows)
        step = whole.format.row_step
        for run in self._runs:
            if run.start % step or (run.stop % step and run != self._runs[-1]):
                raise ValueError(f"rows {run.start} to {run.stop - 1} are not whole blocks of {step}")
        height = sum(run.stop - run.start for run in self._runs)
        self.format, self.order = whole.format, whole.order
        self._columns: dict[str, slice] = {}
        self.shape = (height, whole.shape[1])
        if columns is not None:
            if whole.order is not None:
                raise ValueError("its columns are sorted by their groups, which are anywhere in a row")
            self.format, self._columns = whole.format.cut(columns, whole.shape[1])
            self.shape = (height, columns.stop - columns.start)

    def array(self, name: str, rows: slice) -> Array:
        pieces, first = [], 0
        for run in self._runs:
            start, stop = max(rows.start, first), min(rows.stop, first + run.stop - run.start)
            if start < stop:
                pieces.append(self._whole.array(name, slice(run.start + start - first, run.start + stop - first)))
            first += run.stop - run.start
        found = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        columns = self._columns.get(name)
        return found if columns is None else found[:, columns]


def _runs(rows: Rows) -> list[slice]:
    """Neighbours among numbers of rows."""
    bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [slice(int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in pairwise(bounds)]
