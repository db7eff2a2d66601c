"""Weights from a checkpoint to the device: each fused weight from the tensors that hold its parts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import DenseFormat, LinearWeight, WeightPart
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.quantised.stored import StoredMatrix
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
from tessera.engine.models.weights.kv_scales import find_kv_scales, read_kv_scales
from tessera.engine.models.weights.quantised_checkpoint import QuantisedCheckpoint
from tessera.engine.models.weights.safetensors import Array, Checkpoint
from tessera.engine.models.weights.stream import CHUNK_BYTES, WeightStream
from tessera.engine.models.weights.text_part import TextPart
from tessera.engine.models.weights.weights import NormWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float16, from_numpy

Kind = Literal["weight", "bias"]

OUTER_NAME = "model."
SOURCE_DTYPES = {"float64", "float32", "float16", "bfloat16"}
HEADS = ("lm_head", "classifier", "classifier_dense", "classifier_norm")  # modules beside the one with the prefix
PROJECTIONS = ("qkv", "out", "up", "down")
OLD_NORM_NAMES = {"weight": "gamma", "bias": "beta"}  # of checkpoints first made with TensorFlow
QUANTISED = re.compile(
    r".*\.(qweight|qzeros|g_idx|scales|weight_scale|weight_scale_inv|weight_packed|weight_blocks|absmax|SCB)"
)

logger = logging.getLogger("tessera.engine.models")


class CheckpointSource(WeightSource):
    """Fills each fused weight from the tensors it is stored as, and reports the bytes done.

    Attributes:
        described_by: where the shapes come from, for errors.
        config: as given, but for a head that is tied or not as the checkpoint has it.
        has_head: False for a decoder that was saved without one, and is not tied.
    """

    described_by = "config.json"
    refuses_others = False  # tensors without a place

    def __init__(
        self,
        checkpoint: Checkpoint | TextPart | GGUFCheckpoint | QuantisedCheckpoint,
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
        self.prefix, self.dropped = self._spelling()
        self.has_head = self._settle_head()
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

    def _spelling(self) -> tuple[str, str]:
        """The prefix of names in this checkpoint, and what of them is dropped.

        Embedding models are saved without their head, and with it goes the outermost name.
        """
        weights, names = self.architecture.weights, self.checkpoint.names
        tensors = [weights[name][0] + ".weight" for name in ("embedding", "final_norm") if name in weights]
        for tensor in tensors:
            for prefix in self.architecture.prefixes:
                if prefix + tensor in names:
                    return prefix, ""
            if tensor.startswith(OUTER_NAME) and tensor.removeprefix(OUTER_NAME) in names:
                return self.architecture.prefixes[0], OUTER_NAME
        return self.architecture.prefixes[0], ""

    def _settle_head(self) -> bool:
        """Tie or untie the head as the checkpoint has it, as transformers does; -> whether there is a head.

        The flag of config.json decides only between equal tensors.
        """
        if self.config.is_encoder or self.config.classifier is not None:
            self.config = replace(self.config, tie_word_embeddings=True)
            return False
        head = self.architecture.weights["lm_head"][0] + ".weight"
        (embedding,) = self._names(MatrixField("embedding", (), 0), "weight", None)
        names, folder = self.checkpoint.names, self.checkpoint.folder
        if not self.config.tie_word_embeddings:
            if head in names or not names:
                return True
            self.config = replace(self.config, tie_word_embeddings=True)
            logger.warning("%s has no %s and its head is not tied, so it makes embeddings, not text", folder, head)
            return False
        if head in names and embedding in names and not self._equal(head, embedding):
            self.config = replace(self.config, tie_word_embeddings=False)
            logger.warning(
                "%s: tie_word_embeddings is true, but %s differs from %s: the stored head is used",
                *(folder, head, embedding),
            )
        return True

    def _equal(self, one: str, other: str) -> bool:
        first, second = self.checkpoint.tensor(one), self.checkpoint.tensor(other)
        if first.shape != second.shape:
            return False
        step = max(CHUNK_BYTES // max(first.shape[-1] * 4, 1), 1)
        rows = (slice(start, start + step) for start in range(0, first.shape[0], step))
        return all(np.array_equal(first[chunk], second[chunk]) for chunk in rows)

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

    def kv_scales(self, layer: int, num_kv_heads: int) -> Tensor | None:
        pair = self._kv_scale_names(layer)
        if pair is None:
            return None
        scales = read_kv_scales(pair, num_kv_heads, self.checkpoint.tensor, self.checkpoint.path)
        return from_numpy(scales, self.ops.device)

    def _kv_scale_names(self, layer: int) -> tuple[str, str] | None:
        projection = self._names(MatrixField("qkv", (), 0), "weight", layer)[0]
        return find_kv_scales(self.checkpoint.names, projection.rsplit(".", 2)[0])

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

    def _tensor(self, name: str, expected: tuple[int, ...]) -> Array | GGUFTensor | StoredMatrix:
        stored = self.checkpoint.tensor(name)
        if stored.shape != expected:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has shape {list(stored.shape)}, "
                f"but {self.described_by} makes it {list(expected)}"
            )
        return stored

    def _converted(self, source: Array | GGUFTensor | StoredMatrix, wanted: slice, name: str) -> Array:
        rows = source[wanted]
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(rows.astype(self.dtype, copy=False))
        if self.dtype == float16 and rows.dtype != float16 and not np.isfinite(result).all():
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has values beyond float16; bfloat16 and float32 hold them"
            )
        return result

    def _names(self, field: Field, kind: Kind, layer: int | None) -> tuple[str, ...]:
        prefix = "" if field.name in HEADS else self.prefix
        modules = (name.format(i=layer).removeprefix(self.dropped) for name in self.architecture.weights[field.name])
        names = tuple(f"{prefix}{module}.{kind}" for module in modules)
        if isinstance(field, NormField):
            return tuple(self._old_name(name, kind) for name in names)
        if field.name == "embedding" and not self.config.is_encoder and names[0] not in self.checkpoint.names:
            head = f"{self.architecture.weights['lm_head'][0]}.{kind}"
            if self.config.tie_word_embeddings and head in self.checkpoint.names:
                return (head,)
        return names

    def _old_name(self, name: str, kind: Kind) -> str:
        """gamma or beta, where the checkpoint has it instead."""
        old = f"{name.removesuffix(kind)}{OLD_NORM_NAMES[kind]}"
        return old if name not in self.checkpoint.names and old in self.checkpoint.names else name

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
        quantised = sorted(filter(QUANTISED.fullmatch, self.checkpoint.names - expected))
        if quantised and self.config.quantisation is None:
            raise ModelError(
                f"{self.checkpoint.folder} is quantised (it has the tensor {quantised[0]}), but neither config.json "
                "nor a file beside it says how"
            )
        if quantised and missing:
            raise ModelError(
                f"{self.checkpoint.folder} has the quantised tensor {quantised[0]} in a module that its configuration "
                f"leaves in 16 bits or gives another scheme, and lacks {_some(missing)}"
            )
        if missing:
            raise ModelError(f"{self.checkpoint.folder} lacks {_some(missing)}, which {self.described_by} calls for")
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self.architecture.ignored))
        head = self.architecture.weights.get("lm_head", ()) if self.config.tie_word_embeddings else ()
        tied = {f"{name}.weight" for name in head}
        pairs = (self._kv_scale_names(layer) for layer in range(len(self.config.layers)))
        known = {name for pair in pairs if pair is not None for name in pair}
        unexpected = {name for name in self.checkpoint.names - expected - tied - known if not ignored.fullmatch(name)}
        if unexpected and self.refuses_others:
            raise ModelError(
                f"{self.checkpoint.folder} has {_some(unexpected)}, which {self.described_by} has no place for"
            )
        if unexpected:
            logger.warning(
                "%s has %s, which %s has no place for: left out",
                *(self.checkpoint.folder, _some(unexpected), self.described_by),
            )


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"the tensor{'s' if len(listed) > 1 else ''} {', '.join(listed[:4])}{more}"
