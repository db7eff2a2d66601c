"""Runs a model: takes a step's batch to the device, through the decoder and the sampler, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from engine.batch import SamplingBatch, StepBatch, StepResult, TokenMask
from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemoryError
from engine.messages import TokenLogprobs
from engine.models.config import DTYPES, ModelConfig
from engine.models.decoder import Decoder, StepBuffers
from engine.models.kv_cache import KVCache, block_bytes
from engine.models.prompt_logprobs import launch_prompt_logprobs, read_prompt_logprobs
from engine.models.rope import cos_sin_table
from engine.models.sampling_slots import SamplingSlots
from engine.models.step_upload import StepUpload, aligned
from engine.models.weights import Weights, dummy_weights, load_weights, num_weight_bytes
from engine.ops.interface import AttentionMetadata, Ops
from engine.ops.sampling_interface import SamplingMetadata
from engine.tensor import CpuDevice, Device, Tensor, bfloat16, empty, float32, from_numpy, int32

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total

GIB = 2**30
# On a GPU whatever is free caches prefixes, but the host keeps a record of every block: no more than
# this many sequences of full length, unless more of them may run.
MOST_CACHED_SEQS = 32
MIN_DERIVED_LEN = 256  # a context that is shortened to what memory holds is of no use below this


class ModelRunner:
    """One model on one device, with its KV cache and everything that a step needs, made at the start.

    Attributes:
        dtype: name of the dtype of weights, activations and KV cache.
        max_model_len: most tokens of a sequence, prompt and answer.
        max_num_tokens: most tokens of a step.
        num_kv_blocks, block_size, kv_cache_bytes: of the KV cache.
        weight_bytes, num_parameters: of the weights.

    Raises: ConfigError where a setting does not fit the model or the memory; ModelError (see
    `load_weights`); DeviceError.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: Device,
        ops: Ops,
        progress: Progress | None = None,
    ) -> None:
        self.config = config = config.with_device_defaults("cpu" if isinstance(device, CpuDevice) else "cuda")
        self.model = model
        self.device = device
        self.ops = ops
        self._dtype = resolve_dtype(config, model, device)
        self.dtype: str = self._dtype.name
        self.max_model_len = resolve_max_model_len(config, model)
        self.max_num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * self.max_model_len)
        self.block_size = config.block_size
        try:
            self._make(progress)
        except OutOfMemoryError as error:
            raise ConfigError(
                f"{device} has too little memory for this model in {self.dtype} "
                f"({num_weight_bytes(model, self._dtype) / GIB:.2f} GiB of weights): {error}; "
                "a smaller --max-num-batched-tokens or --max-num-seqs needs less beside the weights"
            ) from error

    def _make(self, progress: Progress | None) -> None:
        config, model, device = self.config, self.model, self.device
        if not isinstance(device, CpuDevice):
            self._prepare_kernels(progress)
        weights = self._load_weights(progress)
        self.weight_bytes = weights.nbytes
        self.num_parameters = weights.num_parameters
        cos_sin = None if model.rope is None else from_numpy(cos_sin_table(model.rope, self.max_model_len), device)
        rows = config.max_num_seqs
        self._buffers = StepBuffers(model, self._dtype, device, max_tokens=self.max_num_tokens, max_logits=rows)
        self._slots = SamplingSlots(self.ops, rows, model.vocab_size, self.max_model_len)
        self._sampled = empty((rows,), int32, device)
        # Logits as the model gave them, of the rows whose log-probabilities are wanted.
        self._raw_logits = empty((rows, model.vocab_size), float32, device)
        self._upload = StepUpload(device, self._upload_bytes())
        self.num_kv_blocks = config.num_kv_blocks or self._num_blocks_that_fit()
        kv_cache = KVCache(model, self.num_kv_blocks, self.block_size, self._dtype, device)
        self.kv_cache_bytes = kv_cache.nbytes
        self.decoder = Decoder(model, weights, self.ops, kv_cache, cos_sin)
        if not isinstance(device, CpuDevice):
            self.warm_up()

    @property
    def buffers(self) -> StepBuffers:
        """Free between two steps."""
        return self._buffers

    # -- a step ---------------------------------------------------------------------------------

    def execute(self, batch: StepBatch) -> StepResult:
        """Store the batch's tokens in the KV cache and sample a token for each of its logits rows.

        A row whose logits are not finite gets the token id -1, and the others are not affected.
        """
        for init in batch.slot_inits:
            self._slots.enter(
                init.slot, init.params, init.prompt_token_ids, init.output_token_ids, init.suppressed_token_ids
            )
        sampling = batch.sampling
        wants_logprobs = np.flatnonzero(sampling.num_logprobs >= 0).astype(np.int32)
        put = self._upload.put
        input_ids, logits_indices = put(batch.input_ids), put(batch.logits_indices)
        attention = AttentionMetadata(
            positions=put(batch.positions),
            slot_mapping=put(batch.slot_mapping),
            block_tables=put(batch.block_tables),
            cu_seqlens_q=put(batch.cu_seqlens_q),
            context_lens=put(batch.context_lens),
            max_seqlen_q=int(np.diff(batch.cu_seqlens_q).max(initial=0)),
            max_context_len=int(batch.context_lens.max(initial=0)),
        )
        metadata = SamplingMetadata(**{f.name: put(getattr(sampling, f.name)) for f in fields(SamplingMetadata)})
        logprob_rows = put(wants_logprobs)
        mask = batch.token_mask
        masked = None if mask is None else (put(mask.words), put(mask.rows))
        prompt = batch.prompt_rows
        prompt_ids = None if prompt is None else (put(prompt.token_indices), put(prompt.next_token_ids))
        self._upload.submit()

        logits = self.decoder.forward(input_ids, attention, logits_indices, self._buffers)
        prompt_logprobs: list[TokenLogprobs] = []
        if prompt is not None and prompt_ids is not None:
            k = min(int(prompt.num_logprobs.max()), self.model.vocab_size)
            pieces = launch_prompt_logprobs(self.decoder, self._buffers, *prompt_ids, k)
            logits = self.decoder.project(logits_indices, self._buffers)
            prompt_logprobs = read_prompt_logprobs(pieces, prompt.next_token_ids, prompt.num_logprobs)
        if not batch.num_sampled:
            return StepResult(np.empty(0, np.int32), None, prompt_logprobs)
        raw_logits = logits
        changed = sampling.needs_adjustment or masked is not None
        if len(wants_logprobs) and (changed or len(wants_logprobs) < batch.num_sampled):
            raw_logits = self.ops.embedding(logprob_rows, logits, out=self._raw_logits[: len(wants_logprobs)])
        token_ids = self._choose(logits, metadata, sampling, masked)
        if not len(wants_logprobs):
            return StepResult(token_ids, None, prompt_logprobs)
        return StepResult(token_ids, self._logprobs(raw_logits, wants_logprobs, token_ids, sampling), prompt_logprobs)

    def _choose(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        sampling: SamplingBatch,
        masked: tuple[Tensor, Tensor] | None,
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token ids [S]; `masked` are the words of a `TokenMask` and its rows."""
        ops, state = self.ops, self._slots.state
        if sampling.needs_adjustment:
            ops.adjust_logits(logits, state, metadata)
        if masked is not None:
            ops.apply_token_mask(logits, *masked)
        sampled = self._sampled[: logits.shape[0]]
        ops.sample(logits, metadata, filtered=sampling.needs_filter, out=sampled)
        if _any_penalties(sampling):
            ops.record_tokens(state, metadata.slots, sampled)
        return np.array(sampled.numpy())

    def _logprobs(
        self,
        raw_logits: Tensor,
        rows: np.ndarray[Any, np.dtype[np.int32]],
        token_ids: np.ndarray[Any, np.dtype[np.int32]],
        sampling: SamplingBatch,
    ) -> list[TokenLogprobs | None]:
        """For each sampled row; raw_logits [len(rows), V] holds those that ask for it."""
        counts = sampling.num_logprobs[rows]
        chosen_ids = self._upload.put(token_ids[rows])
        self._upload.submit()
        k = min(int(counts.max()), self.model.vocab_size)
        results = self.ops.top_logprobs(raw_logits, chosen_ids, k)
        chosen, rank, top_ids, top_values = (tensor.numpy() for tensor in results)
        found: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            if token_ids[row] < 0:
                continue
            found[row] = TokenLogprobs(
                token_id=int(token_ids[row]),
                logprob=float(chosen[index]),
                rank=int(rank[index]),
                top_token_ids=top_ids[index, :count].tolist(),
                top_logprobs=top_values[index, :count].tolist(),
            )
        return found

    # -- the start ------------------------------------------------------------------------------

    def _load_weights(self, progress: Progress | None) -> Weights:
        def report(done: int, total: int) -> None:
            if progress is not None:
                progress("weights", done, total)

        if self.config.load_format == "dummy":
            seed = self.config.seed or 0
            return dummy_weights(self.model, self._dtype, self.ops, seed=seed, progress=report)
        return load_weights(Path(self.config.model), self.model, self._dtype, self.ops, report)

    def _prepare_kernels(self, progress: Progress | None) -> None:
        """Compile and reserve on a CUDA device what a step needs, so that no step waits or allocates for it."""
        from engine.ops.cuda import CudaOps

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress("kernels", done, total)

        assert isinstance(self.ops, CudaOps), f"no kernels for {self.device}"
        self.ops.compile(self._dtype, report)
        self.ops.reserve_attention(self.config.max_num_seqs, self.model.num_heads, self.model.head_dim)

    def warm_up(self) -> None:
        """Run a step of one padding token with every kind of sampling: it leaves no trace, but what a
        first step sets up is there afterwards, and a kernel that cannot run fails now."""
        one, half = np.ones(1, np.float32), np.full(1, 0.5, np.float32)
        zero = np.zeros(1, np.int32)
        nowhere = np.full(1, -1, np.int32)
        sampling = SamplingBatch(
            slots=nowhere,
            num_output_tokens=zero,
            positions=zero,
            seeds=np.zeros(1, np.uint64),
            temperature=one,
            top_k=zero,
            top_p=half,
            min_p=half,
            repetition_penalty=half,
            presence_penalty=one,
            frequency_penalty=one,
            min_tokens=zero,
            num_logprobs=zero,
            needs_adjustment=True,
            needs_filter=True,
        )
        padding = StepBatch(
            input_ids=zero,
            positions=zero,
            slot_mapping=nowhere,
            block_tables=zero[None],
            cu_seqlens_q=np.array([0, 1], np.int32),
            context_lens=zero,
            logits_indices=zero,
            sampling=sampling,
            token_mask=TokenMask(nowhere, np.zeros((1, self._mask_words), np.uint32)),
        )
        self.execute(padding)

    @property
    def _mask_words(self) -> int:
        """Words of a row of a `TokenMask`."""
        return -(-self.model.vocab_size // 32)

    def _blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def _upload_bytes(self) -> int:
        """Of the largest step; arrays are those of `execute`."""
        rows, tokens = self.config.max_num_seqs, self.max_num_tokens
        tables = aligned(rows * self._blocks_per_seq() * int32.itemsize)
        per_token = 5 * aligned(tokens * int32.itemsize)
        per_row = (len(fields(SamplingMetadata)) + 6) * aligned((rows + 1) * np.dtype(np.uint64).itemsize)
        masks = aligned(rows * self._mask_words * np.dtype(np.uint32).itemsize)
        return tables + per_token + per_row + masks

    def _num_blocks_that_fit(self) -> int:
        """Lowers max_model_len to what fits, where the user left it open.

        Raises: ConfigError if a sequence of the length asked for does not fit, saying what would.
        """
        per_block = block_bytes(self.model, self.block_size, self._dtype)
        if isinstance(self.device, CpuDevice):
            option = "--cpu-kv-cache-gib"
            budget = int(self.config.cpu_kv_cache_gib * GIB)
            useful = self.config.max_num_seqs
        else:
            option = "--gpu-memory-utilization"
            budget = _free_of_share(self.device, self.config.gpu_memory_utilization)
            useful = max(self.config.max_num_seqs, MOST_CACHED_SEQS)
        num_blocks = min(budget // per_block, useful * self._blocks_per_seq())
        if num_blocks >= self._blocks_per_seq():
            return num_blocks
        room = max(num_blocks, 0) * self.block_size
        if self.config.max_model_len is None and room >= MIN_DERIVED_LEN:
            logger.warning(
                "the KV cache has memory for %d tokens, so that is the longest context, not the model's %d; "
                "a larger %s makes room for more",
                room,
                self.max_model_len,
                option,
            )
            self.max_model_len = room
            return num_blocks
        remedy = f"pass --max-model-len {room} or less, or a larger {option}" if room else f"pass a larger {option}"
        raise ConfigError(
            f"the KV cache has memory for {room} tokens ({max(budget, 0) / GIB:.2f} GiB), "
            f"but one sequence may have {self.max_model_len}: {remedy}"
        )


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> np.dtype[Any]:
    """The dtype asked for; `auto` as `EngineConfig` says."""
    chosen: np.dtype[Any] | None = model.torch_dtype
    if config.dtype != "auto":
        chosen = DTYPES[config.dtype]
    elif isinstance(device, CpuDevice):
        chosen = float32
    elif chosen == float32:
        chosen = bfloat16
    return bfloat16 if chosen is None else chosen


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The length asked for, or the model's own.

    Raises: ConfigError if it is beyond what the model's positions reach.
    """
    asked = config.max_model_len or model.max_position_embeddings
    if asked > model.longest_context:
        raise ConfigError(
            f"--max-model-len {asked} is beyond the {model.longest_context} positions that {config.model} supports"
        )
    return asked


def _free_of_share(device: Device, share: float) -> int:
    """Bytes that may still be taken of `share` of a CUDA device's memory."""
    from engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no memory figures for {device}"
    device.synchronize()
    device.empty_cache()
    used = device.total_memory - device.free_memory()
    return int(device.total_memory * share) - used


def _any_penalties(sampling: SamplingBatch) -> bool:
    off = (sampling.repetition_penalty == 1) & (sampling.presence_penalty == 0) & (sampling.frequency_penalty == 0)
    return not bool(off.all())
