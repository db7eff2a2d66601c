"""Weights on the device, fused as the decoder wants them: read from a checkpoint, or made up.

Layout of a fused weight: the rows of its parts one below the other, so qkv is
[(Hq + 2 Hkv) * D, H] and up is [2 I, H] with the gate first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.registry import ARCHITECTURES, Architecture
from tessera.engine.models.weights.safetensors import Array, Checkpoint
from tessera.engine.models.weights.stream import CHUNK_BYTES, WeightStream
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, float16

Progress = Callable[[int, int], None]  # bytes done, bytes in total

DUMMY_STD = 0.02
OUTER_NAME = "model."
SOURCE_DTYPES = {"float64", "float32", "float16", "bfloat16"}


@dataclass(frozen=True)
class LayerWeights:
    """One layer; I is the MLP's inner size, `up` has 2 I rows where the MLP is gated."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) * D, H]
    out: Tensor  # [H, Hq * D]
    mlp_norm: Tensor  # [H]
    up: Tensor  # [2 I or I, H]
    down: Tensor  # [H, I]
    input_norm_bias: Tensor | None = None  # [H]
    qkv_bias: Tensor | None = None  # [(Hq + 2 Hkv) * D]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    out_bias: Tensor | None = None  # [H]
    mlp_norm_bias: Tensor | None = None  # [H]
    up_bias: Tensor | None = None  # [2 I or I]
    down_bias: Tensor | None = None  # [H]


class WeightSet:
    """The fields of a model's weights: tensors, and one LayerWeights a layer."""

    layers: tuple[LayerWeights, ...]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        found = [value for value in vars(self).values() if isinstance(value, Tensor)]
        for layer in self.layers:
            found += [value for value in vars(layer).values() if isinstance(value, Tensor)]
        yield from {id(tensor): tensor for tensor in found}.values()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors())


@dataclass(frozen=True)
class Weights(WeightSet):
    """All weights of a decoder; with a tied head `lm_head` is `embedding`."""

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    position_embedding: Tensor | None = None  # [P, H]
    final_norm_bias: Tensor | None = None  # [H]


@dataclass(frozen=True)
class EncoderWeights(WeightSet):
    """All weights of a text encoder; a layer's `input_norm` follows its attention, `mlp_norm` its MLP."""

    embedding: Tensor  # [V, H]
    position_embedding: Tensor  # [P, H]
    token_type_embedding: Tensor  # [K, H]
    embedding_norm: Tensor  # [H]
    embedding_norm_bias: Tensor  # [H]
    layers: tuple[LayerWeights, ...]


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: np.dtype[Any],
    ops: Ops,
    progress: Progress | None = None,
) -> Weights:
    """The folder's weights in `dtype` on the device of `ops`, part by part: host memory holds one chunk.

    Raises: ModelError naming the tensors that are missing, unexpected, mis-shaped or not
    representable in `dtype`; OutOfMemoryError.
    """
    with _CheckpointReader(Checkpoint(folder), config, dtype, ops, progress) as reader:
        return _build(config, reader.read)


def load_encoder_weights(
    folder: Path, config: ModelConfig, dtype: np.dtype[Any], ops: Ops, progress: Progress | None = None
) -> EncoderWeights:
    """See `load_weights`."""
    with _CheckpointReader(Checkpoint(folder), config, dtype, ops, progress) as reader:
        return _build_encoder(config, reader.read)


def dummy_weights(
    config: ModelConfig, dtype: np.dtype[Any], ops: Ops, *, seed: int = 0, progress: Progress | None = None
) -> Weights:
    """Random weights made on the device, equal for equal seeds: projections and embeddings are
    normal with deviation DUMMY_STD, norms are ones, biases zeros.

    Raises: OutOfMemoryError.
    """
    weights = _build(config, _dummy_maker(config, dtype, ops, seed, progress))
    ops.device.synchronize()
    return weights


def dummy_encoder_weights(
    config: ModelConfig, dtype: np.dtype[Any], ops: Ops, *, seed: int = 0, progress: Progress | None = None
) -> EncoderWeights:
    """See `dummy_weights`."""
    weights = _build_encoder(config, _dummy_maker(config, dtype, ops, seed, progress))
    ops.device.synchronize()
    return weights


def _dummy_maker(config: ModelConfig, dtype: np.dtype[Any], ops: Ops, seed: int, progress: Progress | None) -> Make:
    total = num_weight_bytes(config, dtype)
    done = made = 0

    def make(field: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        nonlocal done, made
        tensor = empty(shape, dtype, ops.device)
        if len(shape) > 1:
            ops.fill_normal(tensor, std=DUMMY_STD, seed=((seed << 20) + made) % 2**64)
        else:
            tensor.upload(np.full(shape, 0 if field.endswith("bias") else 1, dtype))
        made += 1
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
        return tensor

    return make


def num_weight_bytes(config: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Bytes that the weights take in `dtype`."""
    elements = sum(int(np.prod(shape)) for shape in _model_shapes(config).values())
    elements += config.num_layers * sum(int(np.prod(shape)) for shape in _layer_shapes(config).values())
    return elements * dtype.itemsize


# -- what a model consists of ---------------------------------------------------------------------

Make = Callable[[str, tuple[int, ...], int | None], Tensor]  # field, shape, layer


def _build(config: ModelConfig, make: Make) -> Weights:
    tensors, layers = _make_all(config, make)
    tensors.setdefault("lm_head", tensors["embedding"])
    return Weights(layers=layers, **tensors)


def _build_encoder(config: ModelConfig, make: Make) -> EncoderWeights:
    tensors, layers = _make_all(config, make)
    return EncoderWeights(layers=layers, **tensors)


def _make_all(config: ModelConfig, make: Make) -> tuple[dict[str, Tensor], tuple[LayerWeights, ...]]:
    tensors = {field: make(field, shape, None) for field, shape in _model_shapes(config).items()}
    shapes = _layer_shapes(config)
    layers = tuple(
        LayerWeights(**{field: make(field, shape, layer) for field, shape in shapes.items()})
        for layer in range(config.num_layers)
    )
    return tensors, layers


def _model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    if config.learned_positions:
        shapes["position_embedding"] = (config.max_position_embeddings, hidden)
    if config.is_encoder:
        shapes["token_type_embedding"] = (config.num_token_types, hidden)
        return shapes | {"embedding_norm": (hidden,), "embedding_norm_bias": (hidden,)}
    shapes["final_norm"] = (hidden,)
    if config.norm == "layernorm":
        shapes["final_norm_bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (config.qkv_size, hidden),
        "out": (hidden, config.q_size),
        "mlp_norm": (hidden,),
        "up": (config.up_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.norm == "layernorm":
        shapes |= {"input_norm_bias": (hidden,), "mlp_norm_bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.qkv_bias:
        shapes["qkv_bias"] = (config.qkv_size,)
    if config.out_bias:
        shapes["out_bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"up_bias": (config.up_size,), "down_bias": (hidden,)}
    return shapes


def _part_rows(config: ModelConfig, field: str, num_parts: int) -> tuple[int, ...] | None:
    """Rows of each stored part of a fused weight; None where it is stored whole."""
    if num_parts == 1:
        return None
    if field.startswith("qkv"):
        return (config.q_size, config.kv_size, config.kv_size)
    return (config.intermediate_size,) * num_parts


# -- from a checkpoint ----------------------------------------------------------------------------


class _CheckpointReader:
    """Makes each fused weight from the tensors it is stored as, and reports the bytes done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
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
        first = self.architecture.weights["embedding"][0]
        prefixes = self.architecture.prefixes
        self.prefix = next((prefix for prefix in prefixes if prefix + first in checkpoint.names), prefixes[0])
        # Embedding models are saved without their head, and with it goes the outermost name.
        bare = first not in checkpoint.names and first.removeprefix(OUTER_NAME) in checkpoint.names
        self.dropped = OUTER_NAME if bare else ""
        self.total = num_weight_bytes(config, dtype)
        self.done = 0
        self._verify_names()
        self._stream = WeightStream(ops.device, self._report)

    def __enter__(self) -> _CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """All weights are on the device, unless there was an error, which may come only now."""
        try:
            if kind is None:
                self._stream.finish()
        finally:
            self._stream.close()

    def _report(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def read(self, field: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        tensor = empty(shape, self.dtype, self.ops.device)
        names = self._names(field, layer)
        rows = _part_rows(self.config, field, len(names)) or (shape[0],)
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._read_part(name, tensor[start : start + count], stored_transposed=self._is_transposed(shape, field))
            start += count
        return tensor

    def _is_transposed(self, shape: tuple[int, ...], field: str) -> bool:
        return self.architecture.transposed and len(shape) == 2 and field in ("qkv", "out", "up", "down")

    def _read_part(self, name: str, target: Tensor, *, stored_transposed: bool) -> None:
        stored = self.checkpoint.tensor(name)
        expected = target.shape[::-1] if stored_transposed else target.shape
        if stored.shape != expected:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has shape {list(stored.shape)}, "
                f"but config.json makes it {list(expected)}"
            )
        if stored.dtype.name not in SOURCE_DTYPES:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} is {stored.dtype.name}; weights must be "
                f"{', '.join(sorted(SOURCE_DTYPES))}"
            )
        source = stored.T if stored_transposed else stored
        row_bytes = max(target.nbytes // target.shape[0], 1)
        step = max(CHUNK_BYTES // row_bytes, 1)
        for start in range(0, target.shape[0], step):
            rows = slice(start, min(start + step, target.shape[0]))
            self._stream.send(target[rows], partial(self._converted, source[rows], name))

    def _converted(self, rows: Array, name: str) -> Array:
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(rows.astype(self.dtype, copy=False))
        if self.dtype == float16 and rows.dtype != float16 and not np.isfinite(result).all():
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} has values beyond float16; bfloat16 and float32 hold them"
            )
        return result

    def _names(self, field: str, layer: int | None) -> tuple[str, ...]:
        prefix = "" if field == "lm_head" else self.prefix
        names = (name.format(i=layer).removeprefix(self.dropped) for name in self.architecture.weights[field])
        return tuple(prefix + name for name in names)

    def _verify_names(self) -> None:
        expected = {name for field in _model_shapes(self.config) for name in self._names(field, None)}
        for layer in range(self.config.num_layers):
            expected.update(name for field in _layer_shapes(self.config) for name in self._names(field, layer))
        missing = expected - self.checkpoint.names
        if missing:
            raise ModelError(f"{self.checkpoint.folder} lacks {_some(missing)}, which config.json calls for")
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self.architecture.ignored))
        tied = set(self.architecture.weights.get("lm_head", ())) if self.config.tie_word_embeddings else set()
        unexpected = {name for name in self.checkpoint.names - expected - tied if not ignored.fullmatch(name)}
        if unexpected:
            raise ModelError(f"{self.checkpoint.folder} has {_some(unexpected)}, which config.json has no place for")


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"the tensor{'s' if len(listed) > 1 else ''} {', '.join(listed[:4])}{more}"
