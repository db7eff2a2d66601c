"""Weights from a checkpoint to the device: each fused weight from the tensors that hold its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import DenseFormat, LinearWeight, WeightPart
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.registry import ARCHITECTURES, Architecture
from tessera.engine.models.weights.build import (
    Field,
    MatrixField,
    NormField,
    Progress,
    WeightSource,
    layer_fields,
    model_fields,
    num_weight_bytes,
)
from tessera.engine.models.weights.gguf_checkpoint import GGUFCheckpoint, GGUFTensor
from tessera.engine.models.weights.safetensors import Array, Checkpoint
from tessera.engine.models.weights.stream import CHUNK_BYTES, WeightStream
from tessera.engine.models.weights.weights import NormWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float16

Kind = Literal["weight", "bias"]

OUTER_NAME = "model."
SOURCE_DTYPES = {"float64", "float32", "float16", "bfloat16"}
PROJECTIONS = ("qkv", "out", "up", "down")


class CheckpointSource(WeightSource):
    """Fills each fused weight from the tensors it is stored as, and reports the bytes done.

    Attributes:
        described_by: where the shapes come from, for errors.
    """

    described_by = "config.json"

    def __init__(
        self,
        checkpoint: Checkpoint | GGUFCheckpoint,
        config: ModelConfig,
        dtype: np.dtype[Any],
        ops: Ops,
        progress: Progress | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.ops = ops
        self.progress = progress
        self.architecture: Architecture = ARCHITECTURES[config.architecture]
        first = self.architecture.weights["embedding"][0] + ".weight"
        prefixes = self.architecture.prefixes
        self.prefix = next((prefix for prefix in prefixes if prefix + first in checkpoint.names), prefixes[0])
        # Embedding models are saved without their head, and with it goes the outermost name.
        bare = first not in checkpoint.names and first.removeprefix(OUTER_NAME) in checkpoint.names
        self.dropped = OUTER_NAME if bare else ""
        self.done = 0
        self._verify_names()
        self.total = self._count_bytes()
        self._stream = WeightStream(ops.device, self._report)

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """All weights are on the device, unless there was an error, which may come only now."""
        try:
            if kind is None:
                self._stream.finish()
        finally:
            self._stream.close()

    def _count_bytes(self) -> int:
        """Of all weights on the device."""
        return num_weight_bytes(self.config, self.dtype)

    def _report(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        part = WeightPart.empty(DenseFormat(self.dtype), field.rows, field.columns, self.ops.device)
        transposed = self.architecture.transposed and field.name in PROJECTIONS
        names = self._names(field, "weight", layer)
        self._fill(part.tensors["values"], names, field.part_rows, stored_transposed=transposed)
        bias = None
        if field.bias:
            bias = self._vector(self._names(field, "bias", layer), field.part_rows)
        return LinearWeight((part,), bias)

    def norm(self, field: NormField, layer: int | None) -> NormWeights:
        kinds: tuple[Kind, ...] = ("weight", "bias") if field.bias else ("weight",)
        return NormWeights(*(self._vector(self._names(field, kind, layer), (field.size,)) for kind in kinds))

    def _vector(self, names: tuple[str, ...], part_sizes: tuple[int, ...]) -> Tensor:
        vector = empty((sum(part_sizes),), self.dtype, self.ops.device)
        self._fill(vector, names, part_sizes)
        return vector

    def _fill(
        self, target: Tensor, names: tuple[str, ...], part_rows: tuple[int, ...], *, stored_transposed: bool = False
    ) -> None:
        """`part_rows` of each name, unless a single name holds them all."""
        start = 0
        for name, count in zip(names, (target.shape[0],) if len(names) == 1 else part_rows, strict=True):
            self._read_part(name, target[start : start + count], stored_transposed=stored_transposed)
            start += count

    def _read_part(self, name: str, target: Tensor, *, stored_transposed: bool) -> None:
        stored = self._tensor(name, target.shape[::-1] if stored_transposed else target.shape)
        if stored.dtype.name not in SOURCE_DTYPES:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} is {stored.dtype.name}; weights must be "
                f"{', '.join(sorted(SOURCE_DTYPES))}"
            )
        source = np.asarray(stored).T if stored_transposed else stored
        row_bytes = max(target.nbytes // target.shape[0], 1)
        step = max(CHUNK_BYTES // row_bytes, 1)
        for start in range(0, target.shape[0], step):
            rows = slice(start, min(start + step, target.shape[0]))
            self._stream.send(target[rows], partial(self._converted, source, rows, name))

    def _tensor(self, name: str, expected: tuple[int, ...]) -> Array | GGUFTensor:
        stored = self.checkpoint.tensor(name)
        if stored.shape != expected:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has shape {list(stored.shape)}, "
                f"but {self.described_by} makes it {list(expected)}"
            )
        return stored

    def _converted(self, source: Array | GGUFTensor, wanted: slice, name: str) -> Array:
        rows = source[wanted]
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(rows.astype(self.dtype, copy=False))
        if self.dtype == float16 and rows.dtype != float16 and not np.isfinite(result).all():
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has values beyond float16; bfloat16 and float32 hold them"
            )
        return result

    def _names(self, field: Field, kind: Kind, layer: int | None) -> tuple[str, ...]:
        prefix = "" if field.name == "lm_head" else self.prefix
        modules = (name.format(i=layer).removeprefix(self.dropped) for name in self.architecture.weights[field.name])
        return tuple(f"{prefix}{module}.{kind}" for module in modules)

    def _all_names(self) -> Iterator[str]:
        fields: list[tuple[Field, int | None]] = [(field, None) for field in model_fields(self.config)]
        for layer, spec in enumerate(self.config.layers):
            fields += [(field, layer) for field in layer_fields(spec, self.config.hidden_size)]
        for field, place in fields:
            yield from self._names(field, "weight", place)
            if field.bias:
                yield from self._names(field, "bias", place)

    def _verify_names(self) -> None:
        expected = set(self._all_names())
        missing = expected - self.checkpoint.names
        if missing:
            raise ModelError(f"{self.checkpoint.folder} lacks {_some(missing)}, which {self.described_by} calls for")
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self.architecture.ignored))
        head = self.architecture.weights.get("lm_head", ()) if self.config.tie_word_embeddings else ()
        tied = {f"{name}.weight" for name in head}
        unexpected = {name for name in self.checkpoint.names - expected - tied if not ignored.fullmatch(name)}
        if unexpected:
            raise ModelError(
                f"{self.checkpoint.folder} has {_some(unexpected)}, which {self.described_by} has no place for"
            )


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"the tensor{'s' if len(listed) > 1 else ''} {', '.join(listed[:4])}{more}"
