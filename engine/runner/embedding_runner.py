"""Runs a model over texts for a vector of each: texts packed one after the other, pooled on the device.

Each text is computed in one pass, so no state is kept: a decoder uses a KV cache of a single layer, shared by its
layers in turn, and none of the blocks of generation.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.block_digests import first_row
from tessera.engine.contract.config import EngineConfig, PoolingName
from tessera.engine.contract.errors import ConfigError, OutOfMemoryError
from tessera.engine.contract.messages import TokenIds
from tessera.engine.formats import KVFormat
from tessera.engine.models.buffers import StepBuffers
from tessera.engine.models.config import DTYPES, ModelConfig
from tessera.engine.models.decoder import Decoder
from tessera.engine.models.encoder import Encoder, EncoderBuffers
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.models.pooling import PoolingConfig, load_pooling
from tessera.engine.models.rope import device_tables
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import CpuDevice, Device, Tensor, empty, float16, float32, int32

Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total

MAX_NUM_INPUTS = 1024  # texts in one pass


class EmbeddingRunner(ABC):
    """One model, pooled in one way.

    Attributes:
        pooling: how token vectors become one.
        dimension, vocab_size, matryoshka_dimensions: of the model.
        max_input_tokens: longest text.
        max_num_tokens, max_num_inputs: most of one pass; at least one text of any length fits.
    """

    def __init__(
        self, model: ModelConfig, ops: Ops, pooling: PoolingConfig, max_input_tokens: int, max_num_tokens: int
    ) -> None:
        self.pooling: PoolingName = pooling.kind
        self.dimension = model.hidden_size
        self.vocab_size = model.vocab_size
        self.matryoshka_dimensions = model.matryoshka_dimensions
        self.max_num_tokens = max_num_tokens
        self.max_input_tokens = min(max_input_tokens, max_num_tokens, pooling.max_input_tokens or max_input_tokens)
        self.max_num_inputs = min(MAX_NUM_INPUTS, max_num_tokens)
        self._ops = ops

    def _prepare(self, table_columns: int) -> None:
        """Memory for what a pass uploads and downloads; `table_columns` int32 beside the rest for each text."""
        tokens = 3 * aligned(self.max_num_tokens * int32.itemsize)
        rows = 6 * aligned((self.max_num_inputs + 1) * int32.itemsize)
        tables = aligned(self.max_num_inputs * table_columns * int32.itemsize)
        self._upload = StepUpload(self._ops.device, tokens + rows + tables)
        self._pooled = empty((self.max_num_inputs, self.dimension), float32, self._ops.device)

    def compute(self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None) -> Float32Array:
        """Embeddings [R, H] of unit length; a row that is not finite is left as it is. The rest as in `pooled`."""
        return unit_length(self.pooled(inputs, first_lengths, self.pooling))

    def pooled(
        self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None, pooling: PoolingName
    ) -> Float32Array:
        """Token vectors of each text made one, [R, H].

        `inputs`: at most max_num_inputs lists, none empty, together at most max_num_tokens token ids.
        `first_lengths`: tokens of each one's first part, None for all; those after them have token type 1.
        """
        lengths = np.array([len(token_ids) for token_ids in inputs], np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        starts = ends - lengths
        begins = ends - 1 if pooling == "last" else starts
        stops = starts + 1 if pooling == "cls" else ends
        input_ids = np.concatenate([np.array(token_ids, np.int32) for token_ids in inputs])
        positions = np.arange(len(input_ids), dtype=np.int32) - np.repeat(starts, lengths)
        first = lengths if first_lengths is None else np.array(first_lengths, np.int32)
        token_types = (positions >= np.repeat(first, lengths)).astype(np.int32)
        pooled_begins, pooled_ends = self._upload.stage_array(begins), self._upload.stage_array(stops)
        hidden = self._hidden_states(input_ids, positions, token_types, lengths)
        pooled = self._ops.segment_mean(hidden, pooled_begins, pooled_ends, out=self._pooled[: len(inputs)])
        return np.array(pooled.numpy())

    @abstractmethod
    def _hidden_states(
        self, input_ids: Int32Array, positions: Int32Array, token_types: Int32Array, lengths: Int32Array
    ) -> Tensor:
        """Vectors [T, H] of all tokens; submits the upload first."""


class EncoderRunner(EmbeddingRunner):
    """An encoder with its weights and buffers.

    Raises: ConfigError where a setting does not fit the model or the memory; ModelError; DeviceError.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        folder: Path,
        device: Device,
        ops: Ops,
        progress: Progress | None = None,
        *,
        pooling: PoolingName = "auto",
    ) -> None:
        longest = config.max_model_len or model.max_position_embeddings
        if longest > model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {longest} is beyond the {model.max_position_embeddings} positions "
                f"that {folder} supports"
            )
        found = load_pooling(folder, pooling if model.classifier is None else model.classifier.pooling, "mean")
        if config.max_model_len is not None:
            found = dataclasses.replace(found, max_input_tokens=None)
        super().__init__(model, ops, found, longest, config.max_num_batched_tokens)
        dtype = _encoder_dtype(config, model, device)
        self.dtype: str = dtype.name

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress("weights", done, total)

        if not isinstance(device, CpuDevice):
            _compile_kernels(ops, model, dtype, progress)
        try:
            if config.load_format == "dummy":
                weights = dummy_weights(model, dtype, ops, seed=config.seed or 0, progress=report)
            else:
                weights = load_weights(folder, model, dtype, ops, report)
            self._encoder = Encoder(model, weights, ops, device_tables(model.ropes, self.max_input_tokens, device))
            self._buffers = EncoderBuffers(model, dtype, device, self.max_num_tokens)
            self._prepare(0)
        except OutOfMemoryError as error:
            raise ConfigError(f"{device} has too little memory for the encoder in {folder}: {error}") from error
        self.weight_bytes, self.num_parameters = weights.nbytes, weights.num_parameters
        self.stored_bytes = weights.bytes_by_format if model.quantisation is not None else {}
        self.classifier = weights.classifier
        self._model = model
        if not isinstance(device, CpuDevice):
            self._warm_up()

    def _hidden_states(
        self, input_ids: Int32Array, positions: Int32Array, token_types: Int32Array, lengths: Int32Array
    ) -> Tensor:
        stage, model = self._upload.stage_array, self._model
        types = np.minimum(token_types, max(model.num_token_types - 1, 0))
        arrays = (input_ids, positions + np.int32(model.first_position), types)
        ids, places, staged_types = (stage(array) for array in arrays)
        cu_seqlens = stage(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        self._upload.submit()
        return self._encoder.forward(ids, places, staged_types, cu_seqlens, int(lengths.max()), self._buffers)

    def _warm_up(self) -> None:
        """Passes of all sizes: a kernel that cannot run fails now, and none is loaded later."""
        num_tokens = 1
        while num_tokens <= self.max_num_tokens:
            whole, rest = divmod(num_tokens, self.max_input_tokens)
            texts = [[0] * self.max_input_tokens] * whole + [[0] * rest] * bool(rest)
            self.compute(texts[: self.max_num_inputs])
            num_tokens *= 2


class DecoderEmbeddingRunner(EmbeddingRunner):
    """A decoder that also generates: shares weights and step buffers, which are free between two steps.

    Raises: OutOfMemoryError.
    """

    def __init__(
        self,
        decoder: Decoder,
        buffers: StepBuffers,
        pooling: PoolingConfig,
        *,
        max_model_len: int,
        max_num_tokens: int,
        max_num_seqs: int,
        block_size: int,
    ) -> None:
        model, ops = decoder.config, decoder.ops
        super().__init__(model, ops, pooling, max_model_len, max_num_tokens)
        self.max_num_inputs = min(self.max_num_inputs, max_num_seqs)
        self._buffers = buffers
        self._block_size = block_size
        num_blocks = -(-max_num_tokens // block_size) + self.max_num_inputs
        kv_format = KVFormat(decoder.caches[0][0].dtype)
        one_layer = dataclasses.replace(model, layers=model.layers[:1])
        cache = KVCache(one_layer, num_blocks, block_size, kv_format, ops.device)
        caches = cache.layers * model.num_layers
        self._decoder = Decoder(model, decoder.weights, ops, caches, decoder.rope_tables)
        self._prepare(-(-self.max_input_tokens // block_size))

    def _hidden_states(
        self, input_ids: Int32Array, positions: Int32Array, token_types: Int32Array, lengths: Int32Array
    ) -> Tensor:
        stage, block_size = self._upload.stage_array, self._block_size
        num_blocks = -(-lengths // block_size)
        first_blocks = np.cumsum(num_blocks, dtype=np.int32) - num_blocks
        slots = np.repeat(first_blocks * block_size, lengths) + positions
        short_len = self._decoder.rope_tables.short_len
        if short_len:
            first_rows = [first_row(short_len, length) for length in lengths.tolist()]
            positions = positions + np.repeat(np.array(first_rows, np.int32), lengths)
        tables = first_blocks[:, None] + np.arange(num_blocks.max(), dtype=np.int32)
        tables = np.where(np.arange(num_blocks.max()) < num_blocks[:, None], tables, 0)
        longest = int(lengths.max())
        ids = stage(input_ids)
        metadata = AttentionMetadata(
            positions=stage(positions),
            slot_mapping=stage(slots.astype(np.int32)),
            block_tables=stage(tables.astype(np.int32)),
            table_rows=stage(np.arange(len(lengths), dtype=np.int32)),
            cu_seqlens_q=stage(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            context_lens=stage(lengths),
            max_seqlen_q=longest,
            max_context_len=longest,
        )
        self._upload.submit()
        return self._decoder.hidden_states(ids, metadata, self._buffers)


@np.errstate(invalid="ignore")
def unit_length(rows: Float32Array) -> Float32Array:
    """Each row divided by its Euclidean norm; rows of zeros, and rows that are not finite, stay."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    norms[~(norms > 0)] = 1.0
    scaled: Float32Array = (rows / norms).astype(np.float32)
    return scaled


def _compile_kernels(ops: Ops, model: ModelConfig, dtype: np.dtype[Any], progress: Progress | None) -> None:
    from tessera.engine.ops.cuda import CudaOps

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("kernels", done, total)

    assert isinstance(ops, CudaOps), f"no kernels for {ops.device}"
    ops.compile(dtype, report, encoder_only=True, rare_ops=model.rare_ops)


def _encoder_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> np.dtype[Any]:
    """The dtype asked for. `auto` is float32 on the CPU; on CUDA float32 checkpoints become float16, whose range
    holds an encoder's normalised activations and whose eleven bits of precision keep the angles."""
    chosen = DTYPES.get(config.dtype)
    if chosen is None:
        own = model.torch_dtype
        chosen = float32 if isinstance(device, CpuDevice) else float16 if own in (None, float32) else own
    assert chosen is not None
    return chosen
