"""Weights from a checkpoint to the device: each fused weight from the tensors that hold its parts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import DenseFormat, LinearWeight, WeightFormat, WeightPart
from tessera.engine.gguf.block_parts import BlockRows
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.mixture.stored import ExpertReader, expert_names
from tessera.engine.models.partition import Partition, Rank
from tessera.engine.models.quantised.kv_scales import find_kv_scales, read_kv_scales
from tessera.engine.models.quantised.stored import StoredMatrix
from tessera.engine.models.registry import ARCHITECTURES, Architecture
from tessera.engine.models.registry.experts import ExpertForm
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.build import (
    ExpertsField,
    Field,
    MatrixField,
    NormField,
    Progress,
    VectorField,
    WeightSource,
    layer_fields,
    model_fields,
    num_weight_bytes,
    predictor_fields,
)
from tessera.engine.models.weights.gguf_checkpoint import GGUFCheckpoint, GGUFTensor
from tessera.engine.models.weights.quantised_checkpoint import QuantisedCheckpoint
from tessera.engine.models.weights.row_order import Chosen, Piece, Rows, pieces_of, row_order
from tessera.engine.models.weights.safetensors import Array, Checkpoint
from tessera.engine.models.weights.stream import CHUNK_BYTES, BlockUpload, WeightStream
from tessera.engine.models.weights.text_part import TextPart
from tessera.engine.models.weights.weights import NormWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float16, float32, from_numpy, uint8

Kind = Literal["weight", "bias"]

OUTER_NAME = "model."
NORM_EPS = 1e-7  # least length of a head's row that is normalised, as Baichuan 2 has it
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
    as_published = True  # fused weights and norms are as the architecture's own checkpoints have them

    def __init__(
        self,
        checkpoint: Checkpoint | TextPart | GGUFCheckpoint | QuantisedCheckpoint,
        config: ModelConfig,
        dtype: np.dtype[Any],
        ops: Ops,
        progress: Progress | None,
        rank: Rank | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        """`architecture`: names the weights; None: the configuration's."""
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.ops = ops
        self.progress = progress
        self.architecture: Architecture = architecture or ARCHITECTURES[config.architecture]
        self.prefix, self.dropped = self._spelling()
        self.has_head = self._settle_head()
        self.partition = Partition(self.config, rank or Rank())
        self.done = 0
        self._verify_names()
        self._verify_shares()
        self.total = self._count_bytes()
        self._stream = WeightStream(ops.device, self._report)
        self.block_upload = BlockUpload(ops, self._stream)

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
        head = self._head
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

    @property
    def _head(self) -> str:
        return self.architecture.weights["lm_head"][0] + ".weight"

    def _equal(self, one: str, other: str) -> bool:
        first, second = self.checkpoint.tensor(one), self.checkpoint.tensor(other)
        if first.shape != second.shape:
            return False
        step = max(CHUNK_BYTES // max(first.shape[-1] * 4, 1), 1)
        rows = (slice(start, start + step) for start in range(0, first.shape[0], step))
        return all(np.array_equal(first[chunk], second[chunk]) for chunk in rows)

    def _count_bytes(self) -> int:
        """Of all weights on the device."""
        return num_weight_bytes(self.partition.config, self.dtype)

    def _report(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def linear(self, field: MatrixField, layer: int | None) -> LinearWeight:
        if isinstance(field, ExpertsField):
            assert layer is not None, "experts are in layers"
            return self._experts(field, layer)
        share = self.partition.share(field.name, layer)
        own = field.shared(share)
        part = WeightPart.empty(DenseFormat(self.dtype), own.rows, own.columns, self.ops.device)
        transposed = self.architecture.transposed and field.name in PROJECTIONS
        self._fill(
            part.tensors["values"],
            self._pieces(field, "weight", layer),
            width=field.columns,
            columns=share.columns,
            stored_transposed=transposed,
        )
        return LinearWeight((part,), self._bias(field, layer))

    def norm(self, field: NormField, layer: int | None) -> NormWeights:
        if not self.architecture.norm_weights:
            ones = empty((field.size,), self.dtype, self.ops.device)
            self._stream.send(ones, partial(np.ones, field.size, self.dtype))
            return NormWeights(ones)
        offset = int(self.architecture.norm_offset and self.as_published)
        found = [self._norm_vector(field, "weight", layer, offset)]
        if field.bias:
            found.append(self._norm_vector(field, "bias", layer))
        return NormWeights(*found)

    def columns(self, field: MatrixField, columns: slice) -> LinearWeight:
        """These columns of a matrix outside of layers, dense and without a bias."""
        width = columns.stop - columns.start
        part = WeightPart.empty(DenseFormat(self.dtype), field.rows, width, self.ops.device)
        self._fill(part.tensors["values"], self._pieces(field, "weight", None), width=field.columns, columns=columns)
        return LinearWeight((part,))

    def settle(self) -> None:
        self._stream.settle()

    def vector(self, field: VectorField, layer: int | None) -> Tensor:
        return self._filled(self._pieces(field, "weight", layer), float32 if field.float32 else self.dtype)

    def _experts(self, field: ExpertsField, layer: int) -> LinearWeight:
        share = self.partition.share(field.name, layer)
        reader, own = ExpertReader(self, field, layer, share), field.shared(share)
        if reader.form.mxfp4:
            part = reader.mxfp4_part()
        else:
            part = WeightPart.empty(DenseFormat(self.dtype), own.rows, own.columns, self.ops.device)
            reader.read_rows(part.tensors["values"])
        bias = None
        if own.bias:
            bias = empty((own.rows,), self.dtype, self.ops.device)
            reader.read_bias(bias)
        return LinearWeight((part,), bias)

    def _norm_vector(self, field: NormField, kind: Kind, layer: int | None, offset: int = 0) -> Tensor:
        return self._filled(self._pieces(field, kind, layer), self.dtype, offset=offset)

    def kv_scales(self, layer: int, num_kv_heads: int) -> Tensor | None:
        pair = self._kv_scale_names(layer)
        if pair is None:
            return None
        scales = read_kv_scales(pair, num_kv_heads, self.checkpoint.tensor, self.checkpoint.path)
        return from_numpy(np.ascontiguousarray(scales[:, self.partition.kv_heads(layer)]), self.ops.device)

    def _kv_scale_names(self, layer: int) -> tuple[str, str] | None:
        projection = self._names(MatrixField("qkv", (), 0), "weight", layer)[0]
        return find_kv_scales(self.checkpoint.names, projection.rsplit(".", 2)[0])

    def _bias(self, field: MatrixField, layer: int | None) -> Tensor | None:
        if not field.shared(self.partition.share(field.name, layer)).bias:
            return None
        return self._filled(self._pieces(field, "bias", layer), self.dtype)

    def _pieces(self, field: Field, kind: Kind, layer: int | None) -> list[Piece]:
        """The tensors that the rank's rows of a weight are in."""
        names = self._names(field, kind, layer)
        heights = field.part_rows if isinstance(field, MatrixField) else (field.size // len(names),) * len(names)
        return pieces_of(names, heights, self._order(field, layer, names), self.partition.share(field.name, layer).rows)

    def _order(self, field: Field, layer: int | None, names: tuple[str, ...]) -> Rows | None:
        fused_order = len(names) == 1 and self.as_published
        return row_order(self.config, self.architecture, field, layer, fused_order=fused_order)

    def _filled(self, pieces: list[Piece], dtype: np.dtype[Any], *, offset: int = 0) -> Tensor:
        """A vector of these pieces; `offset` is added."""
        vector = empty((sum(piece.size for piece in pieces),), dtype, self.ops.device)
        self._fill(vector, pieces, offset=offset)
        return vector

    def _fill(
        self,
        target: Tensor,
        pieces: list[Piece],
        *,
        width: int | None = None,
        columns: slice | None = None,
        offset: int = 0,
        stored_transposed: bool = False,
    ) -> None:
        """`width` is that of stored rows; None: a vector."""
        start = 0
        for piece in pieces:
            part = target[start : start + piece.size]
            expected = (piece.height,) if width is None else (piece.height, width)
            stored = self.stored_values(piece.name, expected[::-1] if stored_transposed else expected)
            if stored_transposed:
                stored = np.asarray(stored).T
            self.send_rows(self._chosen(stored, piece, columns), part, piece.name, offset=offset)
            start += piece.size

    def _chosen(
        self, stored: Array | GGUFTensor | StoredMatrix, piece: Piece, columns: slice | None
    ) -> Array | GGUFTensor | StoredMatrix | Chosen:
        """Raises: ModelError where the rank's part of a tensor would take apart what belongs together."""
        if piece.rows is None and columns is None:
            return stored
        if isinstance(stored, GGUFTensor):
            try:
                return stored.chosen(piece.rows, columns)
            except ValueError as error:
                raise self._not_shared(piece.name, error) from None
        return Chosen(stored, piece.rows, columns)

    def _not_shared(self, name: str, error: ValueError) -> ModelError:
        return ModelError(
            f"--tensor-parallel-size {self.partition.rank.size}: {self.checkpoint.path(name)}: tensor {name} cannot be "
            f"shared among so many: {error}"
        )

    def stored_values(self, name: str, expected: tuple[int, ...]) -> Array | GGUFTensor | StoredMatrix:
        """A tensor of numbers. Raises: ModelError for another shape than expected, and for other dtypes."""
        stored = self._tensor(name, expected)
        if stored.dtype.name not in SOURCE_DTYPES:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} is {stored.dtype.name}; weights must be "
                f"{', '.join(sorted(SOURCE_DTYPES))}"
            )
        return stored

    def stored_bytes(self, name: str, expected: tuple[int, ...]) -> Array:
        """A tensor of bytes. Raises: ModelError for another shape or dtype."""
        stored = self._tensor(name, expected)
        if stored.dtype != uint8 or not isinstance(stored, np.ndarray):
            raise ModelError(f"{self.checkpoint.path(name)}: tensor {name} is {stored.dtype.name}; it must be uint8")
        return stored

    @property
    def on_cpu(self) -> bool:
        return self.ops.device.name == "cpu"

    def send_blocks(self, rows: BlockRows, format: WeightFormat) -> WeightPart:
        """All rows in their blocks."""
        part = WeightPart.empty(format, rows.shape[0], rows.shape[1], self.ops.device)
        self.block_upload.send(rows, slice(0, rows.shape[0]), part, 0)
        return part

    def send_rows(
        self, source: Array | GGUFTensor | StoredMatrix | Chosen, target: Tensor, name: str, *, offset: int = 0
    ) -> None:
        """Rows of the tensor called `name`, converted, to as many of `target`."""
        row_bytes = max(target.nbytes // target.shape[0], 1)
        step = max(CHUNK_BYTES // row_bytes, 1)
        for start in range(0, target.shape[0], step):
            rows = slice(start, min(start + step, target.shape[0]))
            self._stream.send(target[rows], partial(self._converted, source, rows, name, target.dtype, offset))

    def _tensor(self, name: str, expected: tuple[int, ...]) -> Array | GGUFTensor | StoredMatrix:
        stored = self.checkpoint.tensor(name)
        in_rows = self.architecture.qk_norm_form == "each_head" and len(expected) == 1 and len(stored.shape) == 2
        if in_rows or stored.shape == (1, *expected):  # a norm's weights of each head, or ERNIE's vector in a row
            stored = stored.flattened() if isinstance(stored, GGUFTensor) else np.asarray(stored).reshape(-1)
        if isinstance(stored, GGUFTensor) and (1, *stored.shape) == expected:
            stored = stored.as_row()
        if stored.shape != expected:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has shape {list(stored.shape)}, "
                f"but {self.described_by} makes it {list(expected)}"
            )
        return stored

    def _converted(
        self,
        source: Array | GGUFTensor | StoredMatrix | Chosen,
        wanted: slice,
        name: str,
        dtype: np.dtype[Any],
        offset: int,
    ) -> Array:
        rows = source[wanted]
        if offset:
            rows = rows.astype(np.float32) + np.float32(offset)
        if self.config.head_normalised and self.as_published and name == self._head:
            rows = rows.astype(np.float32)
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(NORM_EPS))
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(rows.astype(dtype, copy=False))
        if dtype == float16 and rows.dtype != float16 and not np.isfinite(result).all():
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has values beyond float16; bfloat16 and float32 hold them"
            )
        return result

    def spelt(self, name: str) -> str:
        """As this checkpoint has the names of its weights, but those of heads."""
        return self.prefix + name.removeprefix(self.dropped)

    @cached_property
    def expert_form(self) -> ExpertForm:
        """That of the first mixture."""
        rule = self.architecture.experts
        assert rule is not None, "mixtures have a rule"
        layer, spec = next((i, spec.mlp) for i, spec in enumerate(self.config.layers) if isinstance(spec.mlp, MoESpec))

        def names_of(form: ExpertForm) -> list[str]:
            return [expert_names(form, of, self.spelt, layer, 1)[0] for of in (form.up, form.down)]

        names = self.checkpoint.names
        found = [form for form in rule.forms if names_of(form)[0] in names]
        if len(found) == 2 and names_of(found[0]) == names_of(found[1]) and names.issuperset(names_of(found[0])):
            stored = [self.checkpoint.tensor(name).shape[1:] for name in names_of(found[0])]
            hidden = self.config.hidden_size
            is_transposed = stored == [(hidden, spec.up_size), (spec.inner_size, hidden)]  # one of both may be square
            return next(form for form in found if form.transposed == is_transposed)
        return found[0] if found else rule.forms[0]

    def _names(self, field: Field, kind: Kind, layer: int | None) -> tuple[str, ...]:
        if isinstance(field, ExpertsField):
            assert layer is not None, "experts are in layers"
            return ExpertReader(self, field, layer).names(kind)
        if isinstance(field, VectorField):
            return tuple(self.spelt(name.format(i=layer)) for name in self.architecture.weights[field.name])
        names = self._spelled(field, self.architecture.weights[field.name], kind, layer)
        other = self.architecture.other_weights.get(field.name)
        if other is not None and names[0] not in self.checkpoint.names:
            others = self._spelled(field, other, kind, layer)
            names = others if others[0] in self.checkpoint.names else names
        if isinstance(field, NormField):
            return tuple(self._old_name(name, kind) for name in names)
        if field.name == "embedding" and not self.config.is_encoder and names[0] not in self.checkpoint.names:
            head = f"{self.architecture.weights['lm_head'][0]}.{kind}"
            if self.config.tie_word_embeddings and head in self.checkpoint.names:
                return (head,)
        return names

    def _spelled(self, field: Field, modules: tuple[str, ...], kind: Kind, layer: int | None) -> tuple[str, ...]:
        prefix = "" if field.name in HEADS else self.prefix
        heads = 1
        if isinstance(field, NormField) and layer is not None and field.name in ("q_norm", "k_norm"):
            heads = field.size // self.config.layers[layer].attention.head_dim
        found = (
            module.format(i=layer, h=head).removeprefix(self.dropped)
            for module in modules
            for head in range(heads if "{h}" in module else 1)
        )
        return tuple(f"{prefix}{module}.{kind}" for module in found)

    def _old_name(self, name: str, kind: Kind) -> str:
        """gamma or beta, where the checkpoint has it instead."""
        old = f"{name.removesuffix(kind)}{OLD_NORM_NAMES[kind]}"
        return old if name not in self.checkpoint.names and old in self.checkpoint.names else name

    def _fields(self) -> Iterator[tuple[Field, int | None]]:
        """Of what is stored, with their layers."""
        fields: list[tuple[Field, int | None]] = [(field, None) for field in model_fields(self.config)]
        if "join" in self.architecture.weights:
            fields += [(field, None) for field in predictor_fields(self.config.hidden_size)]
        for layer, spec in enumerate(self.config.layers):
            fields += [(field, layer) for field in layer_fields(spec, self.config.hidden_size)]
        for field, place in fields:
            if self.architecture.norm_weights or not isinstance(field, NormField):
                yield field, place

    def _verify_shares(self) -> None:
        """Raises: ModelError naming a tensor that cannot be shared among so many ranks."""
        if self.partition.rank.size == 1:
            return
        for field, layer in self._fields():
            if isinstance(field, MatrixField):
                self._open(field, layer)

    def _open(self, field: MatrixField, layer: int | None) -> Sequence[object]:
        """The rank's parts of the tensors of a matrix. Raises: ModelError where there is no such part."""
        if not isinstance(field, ExpertsField):
            return self._pieces(field, "weight", layer)
        assert layer is not None, "experts are in layers"
        reader = ExpertReader(self, field, layer, self.partition.share(field.name, layer))
        try:
            reader.verify_share()
        except ValueError as error:
            raise self._not_shared(reader.names("weight")[0], error) from None
        return ()

    def _all_names(self) -> Iterator[str]:
        for field, place in self._fields():
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
        if self.architecture.predictor is not None:
            prefixes = tuple(map(self.spelt, self.architecture.predictor.prefixes(self.config.num_layers)))
            unexpected = {name for name in unexpected if not name.startswith(prefixes)}
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
