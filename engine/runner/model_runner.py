"""Runs a model: uploads a step's batch, runs decoder and sampler, downloads the tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.engine.adapters.slots import AdapterSlots
from tessera.engine.collectives.interface import Collectives
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, OutOfMemoryError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.sampling_row import SAMPLING_ROW, row_values
from tessera.engine.core.prefill_budget import DecodeReads
from tessera.engine.core.step_batch import (
    BATCH_INVARIANT_ROWS,
    Int32Array,
    PromptRows,
    SamplingBatch,
    StepBatch,
    StepResult,
    TableUpdates,
    TokenMask,
)
from tessera.engine.formats import KVFormat
from tessera.engine.models.buffers import StepBuffers, buffer_bytes
from tessera.engine.models.config import DTYPES, ModelConfig
from tessera.engine.models.decoder import Decoder, StepAdapters
from tessera.engine.models.kv_cache import KVCache, block_bytes
from tessera.engine.models.mixture.buffers import experts_per_chosen
from tessera.engine.models.partition import Partition, Rank, slices_are_groups
from tessera.engine.models.rope_tables import make_tables
from tessera.engine.models.weights.build import num_weight_bytes
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.cuda_graphs import FULL_TOKENS, FULL_TOKENS_DEQUANTISED, StepGraphs
from tessera.engine.runner.draft_runner import DraftDownload, DraftRunner
from tessera.engine.runner.memory.weight_offload import AUTO_TOKENS, make_host_layers, offload_info
from tessera.engine.runner.prompt_logprobs import LogprobTensors, launch_prompt_logprobs, read_prompt_logprobs
from tessera.engine.runner.sampler import ResultDownload, SliceSampler, StepSampler, mask_words
from tessera.engine.runner.step_inputs import NO_MORE, StepInputs, StepShape, inputs_bytes
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import (
    Buffer,
    CpuDevice,
    Device,
    Tensor,
    bfloat16,
    empty,
    float32,
    from_numpy,
    int32,
    uint8,
    zeros,
)

if TYPE_CHECKING:
    from tessera.engine.ops.cuda import CudaOps

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total

GIB = 2**30
AUTO_MARGIN = 3 * GIB // 2  # beside layers, KV cache and buffers: workspaces, CUDA graphs, layers larger than the first
MAX_CACHED_BLOCKS = 1 << 20  # the host tracks each; 16 million tokens in blocks of 16
MAX_TABLE_UPDATES = 1 << 14  # entries of the block tables in one copy
E4M3_CAPABILITY = (8, 9)  # from which on GPUs convert it
MIN_DERIVED_LEN = 256  # least context to shorten to if memory is short


class ModelRunner:
    """One model on one device, with its KV cache and buffers, all allocated at the start.

    Attributes:
        dtype: name of the dtype of weights, activations and KV cache.
        max_model_len: most tokens of a sequence, prompt and answer.
        max_num_tokens: most tokens of a step.
        kv_cache: keys and values.
        num_kv_blocks, block_size, kv_cache_bytes: of the KV cache.
        weight_bytes, num_parameters: of the weights.
        weight_offload: what of them is in host memory.
        stored_bytes: of a quantised checkpoint's weights, by the name of their format.
        generates: False for a decoder without a head, which makes embeddings only.

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
        ranks: Collectives | None = None,
        *,
        max_lora_rank: int = 0,
        drafter: DraftRunner | None = None,
    ) -> None:
        """`ranks`: that share the model; only rank 0 samples, and the others do what it does until then.

        `max_lora_rank`: of the `config.max_loras` slots for adapters; 0: there are none. `drafter`: computes drafts.
        """
        self.drafter = drafter
        self._max_lora_rank = max_lora_rank
        self._adapter_groups: list[Tensor] = []  # room for those of tokens, and of sampled ones
        self.config = config = config.with_device_defaults("cpu" if isinstance(device, CpuDevice) else "cuda")
        self.model = model
        self._ranks = ranks
        self._partition = Partition(model, Rank() if ranks is None else Rank(ranks.index, ranks.size))
        self._own = self._partition.config
        self._samples = ranks is None or ranks.index == 0
        self.device = device
        self.ops = ops
        self._used_before = _used_memory(device) if config.beside_others else 0
        self._dtype = resolve_dtype(config, model, device)
        self._kv_format = resolve_kv_format(config, self._dtype, device)
        self.dtype: str = self._dtype.name
        self.max_model_len = resolve_max_model_len(config, model)
        self.max_num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * self.max_model_len)
        rows = config.max_num_seqs * (BATCH_INVARIANT_ROWS if config.batch_invariant else 1)
        self._max_rows = rows + config.max_step_drafts  # each token of a draft may be a row
        # Each sequence may take along a token that has been computed before.
        self._buffer_tokens = self.max_num_tokens + (config.max_num_seqs if config.batch_invariant else 0)
        self.block_size = config.block_size
        try:
            self._make(progress)
        except OutOfMemoryError as error:
            raise ConfigError(
                f"{device} has too little memory for this model in {self.dtype} "
                f"({num_weight_bytes(self._own, self._dtype) / GIB:.2f} GiB of weights): {error}; "
                "a smaller --max-num-batched-tokens or --max-num-seqs needs less beside the weights, and "
                "--cpu-offload-gib keeps a part of them in host memory"
            ) from error

    def _make(self, progress: Progress | None) -> None:
        self._load(progress)
        if self.drafter is not None:
            self.drafter.load(self, progress)
        self._allocate(self.config.num_kv_blocks or self._num_blocks_that_fit())
        if self.drafter is not None:
            self.drafter.allocate(self)
        self.capture()
        if self.drafter is not None:
            self.drafter.capture()

    def _load(self, progress: Progress | None) -> None:
        """Weights, and all buffers but the KV cache."""
        config, model, device, ranks = self.config, self.model, self.device, self._ranks
        if not isinstance(device, CpuDevice):
            self._prepare_kernels(progress)
        weights = self._load_weights(progress)
        if config.prompt_activations == "int8":
            self._round_prompts(weights)
        if not isinstance(device, CpuDevice):
            rows = max(self._buffer_tokens, config.max_num_seqs)
            self._cuda_ops.reserve_linear(weights.linear_weights(), self._dtype, rows)
            self._cuda_ops.reserve_experts(weights.experts(), self._dtype)
        self.generates = weights.has_head
        self.weight_bytes = weights.nbytes
        self.weight_offload = None if weights.stream is None else offload_info(weights.stream, model)
        self.stored_bytes = weights.bytes_by_format if model.quantisation is not None else {}
        self.num_parameters = weights.num_parameters
        self._adapter_slots = self._make_adapter_slots() if self._max_lora_rank else None
        if self._adapter_slots is not None:
            weights = self._adapter_slots.attach(weights)
        rows, drafts = config.max_num_seqs, config.max_step_drafts
        most = rows + drafts  # rows of logits
        self._buffers = StepBuffers(
            self._own,
            self._dtype,
            device,
            max_tokens=self._buffer_tokens,
            max_logits=most,
            shared=ranks is not None,
            whole_vocab=model.vocab_size if ranks is not None and self._samples else None,
        )
        speculation = config.speculation_settings
        num_drafts = speculation.num_tokens if self.drafter is not None and speculation is not None else 0
        self._chosen_ids = zeros(((1 + num_drafts) * rows,), int32, device)  # what was sampled last, then drafts
        self._newest = self._chosen_ids[:rows]
        self._sampler = None
        if self._samples:
            self._sampler = StepSampler(
                self.ops, rows, model.vocab_size, self.max_model_len, drafts, newest=self._newest
            )
        largest = StepShape(self._buffer_tokens, self._max_rows + 1, most)
        first = self._partition.vocabulary.start
        self._slices = None
        if ranks is not None and slices_are_groups(model.vocab_size, ranks.size):
            self._slices = SliceSampler(self.ops, ranks, self._newest, most, first)
        more = self._more_inputs(largest)
        self._upload = StepUpload(device, inputs_bytes(largest, self._adapter_slots is not None, more))
        side_arrays = max(MAX_TABLE_UPDATES, self._buffer_tokens)
        self._side_upload = StepUpload(device, 3 * aligned(side_arrays * int32.itemsize))
        self._block_tables = zeros((rows, self._blocks_per_seq()), int32, device)
        self._numbers = from_numpy(np.arange(most + 1, dtype=np.int32), device)
        self._graphs, self._adapted_graphs = (self._make_graphs() for _ in range(2))
        self._weights, self._rope_tables = weights, make_tables(model.ropes, self.max_model_len, device)

    def _allocate(self, num_kv_blocks: int) -> None:
        """The KV cache, and the decoder over it."""
        self.num_kv_blocks = num_kv_blocks
        self.kv_cache = KVCache(self._own, num_kv_blocks, self.block_size, self._kv_format, self.device)
        self.kv_cache_bytes = self.kv_cache.nbytes
        self.decoder = Decoder(
            self._own,
            self._weights,
            self.ops,
            self.kv_cache.layers,
            self._rope_tables,
            ranks=self._ranks,
            first_token=self._partition.vocabulary.start,
            num_tokens=self.model.vocab_size,
            leaves_sums=not self.config.batch_invariant,
            selection=None if self._adapter_slots is None else self._adapter_slots.selection,
        )

    def capture(self) -> None:
        """Warm up, and capture CUDA graphs on a CUDA device."""
        device = self.device
        if self._ranks is not None:
            # What maps or frees memory may wait for other devices' kernels, and those wait for this rank's.
            self._ranks.wait_for_all()
        if isinstance(device, CpuDevice):
            return
        self.warm_up()
        if self.config.enforce_eager:
            return
        for step in self._graphs.capture(device, self._inputs, self._forward, leaves_prompts=self._leaves_prompts):
            if self._sampler is not None:
                whole = step.logits if self._ranks is None else self._buffers.logits[: step.logits.shape[0]]
                self._sampler.capture(device, whole, step.inputs)
            if self._slices is not None and not step.inputs.shape.verifies:
                self._slices.capture(device, step.logits, step.inputs)
        if self._adapter_slots is not None:  # what samples is the same
            forward = partial(self._forward, adapted=True)
            self._adapted_graphs.capture(device, self._inputs, forward, leaves_prompts=self._leaves_prompts)

    @property
    def _leaves_prompts(self) -> bool:
        """Whether graphs of steps with prompts may be captured between two steps.

        Ranks capture together, and layers that come from the host are on their way while steps run.
        """
        return self._ranks is None and self.drafter is None and self._weights.stream is None

    def capture_next(self) -> bool:
        """Capture a CUDA graph that was left for a moment without work; False once there is none."""
        return self._graphs.capture_next() or self._adapted_graphs.capture_next()

    @property
    def short_rope_len(self) -> int:
        """See `RopeTables.short_len`."""
        return self._rope_tables.short_len

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def block_tables(self) -> Tensor:
        """[num_slots, blocks] int32, as they are before a step."""
        return self._block_tables

    @property
    def drafts(self) -> Tensor:
        """[K, num_slots] int32, where the draft model leaves its tokens."""
        num_slots = self._newest.size
        drafts = self._chosen_ids[num_slots:]
        return drafts.view(drafts.size // num_slots, num_slots)

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of a step, those included that are computed again."""
        return self._buffer_tokens

    @property
    def block_bytes(self) -> int:
        """Of a KV block."""
        return block_bytes(self._own, self.block_size, self._kv_format)

    @property
    def decode_reads(self) -> DecodeReads:
        """Memory that decode steps read."""
        per_chosen = experts_per_chosen(self._own.layers)
        if self._weights.stream is not None:  # copying the host's layers dwarfs the rest
            return DecodeReads(experts_per_chosen=per_chosen)
        windows = [layer.attention.sliding_window or self.max_model_len for layer in self._own.layers]
        seen_whole = sum(window >= self.max_model_len for window in windows) / len(windows)
        of_experts = sum(tensor.nbytes for weight, _ in self._weights.experts() for tensor in weight.tensors())
        return DecodeReads(
            cached_token=seen_whole * self.block_bytes / self.block_size / self.weight_bytes,
            experts=of_experts / self.weight_bytes,
            experts_per_chosen=per_chosen,
        )

    @property
    def buffers(self) -> StepBuffers:
        """Free between two steps."""
        return self._buffers

    @property
    def scratch(self) -> list[Buffer]:
        """Memory whose contents nothing needs between two steps, once the KV cache is forgotten."""
        slots = self.decoder.weights.stream.slots if self.decoder.weights.stream is not None else ()
        tensors = (*self.kv_cache.planes[:1], *slots)
        of_drafter = self.drafter.scratch if self.drafter is not None else []
        return [self._buffers.buffer, *(tensor.buffer for tensor in tensors), *of_drafter]

    # -- a step ---------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:
        """Whether a step computes while the host prepares the next."""
        return self.device.asynchronous

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens to which a step with prompts is best filled."""
        return self._graphs.full_sizes

    @property
    def num_awaited_graphs(self) -> int:
        """CUDA graphs that were captured while a step waited."""
        return self._graphs.num_awaited + self._adapted_graphs.num_awaited

    def start(self, batch: StepBatch) -> RunningStep:
        """Submit a step: its tokens' keys and values go to the KV cache, and each logits row gets a token.

        A constrained batch stops before sampling and continues with `sample`. A row with logits that are not finite
        gets the token id -1; other rows are not affected.
        """
        if self._sampler is not None:
            for init in batch.slot_inits:
                self._sampler.init_slot(init)
        for slot, adapter in batch.adapter_loads:
            assert self._adapter_slots is not None, "only an engine with adapters has sequences with them"
            self._adapter_slots.load(slot, adapter)
        drafted = None
        if batch.drafting:
            assert self.drafter is not None, "only an engine with a draft model has such steps"
            drafted = self.drafter.draft(batch.drafting)
        graphs = self._graphs if batch.adapter_slots is None else self._adapted_graphs
        recorded = graphs.find(batch)
        if recorded is not None:
            inputs, logits, graph = recorded
            self._submit(inputs, batch)
            graph.launch()
        else:
            shape = StepShape.of(batch)
            most = int(np.diff(batch.cu_seqlens_q).max(initial=0))
            if self.config.batch_invariant and not shape.is_decode:
                most = max(most, 2)  # rows of a sequence see each other's keys, which must be stored before
            inputs = self._inputs(shape, most, int(batch.context_lens.max(initial=0)))
            self._submit(inputs, batch)
            every_token = batch.prompt_rows is not None
            logits = self._forward(inputs, every_token=every_token, adapted=batch.adapter_slots is not None)
        running = RunningStep(batch, inputs, logits, drafted)
        if batch.prompt_rows is not None:
            running.prompt_logprobs = self._score_prompts(batch.prompt_rows)
            running.logits = self.decoder.project(inputs.logits_indices, self._buffers)
        if not batch.is_constrained:
            self.sample(running)
        return running

    def sample(self, running: RunningStep, mask: TokenMask | None = None) -> None:
        """Submit the sampling of a constrained step; `mask` is None if all constrained rows have ended."""
        if not running.batch.num_sampled:
            return
        if self._slices is not None and self._slices.suffices(running.batch, mask):
            chosen = self._slices.sample(running.logits, running.inputs, running.batch)
            if self._sampler is not None:
                running.download = self._sampler.download(chosen)
            return
        logits = self.decoder.gather(running.logits, self._buffers)
        if self._sampler is not None:
            running.download = self._sampler.sample(logits, running.inputs, running.batch, mask)
        if self._ranks is not None:
            self._ranks.broadcast(self._newest)

    def execute(self, batch: StepBatch, mask: TokenMask | None = None) -> StepResult:
        """A whole step at once."""
        running = self.start(batch)
        if batch.is_constrained:
            self.sample(running, mask)
        if self._sampler is None:  # rank 0 has the result
            self.device.synchronize()
            return StepResult(np.empty(0, np.int32))
        return running.result()

    def _more_inputs(self, shape: StepShape) -> Mapping[str, int]:
        """Names and lengths of further arrays of a step, which `_more_of` makes."""
        return NO_MORE

    def _more_of(self, batch: StepBatch) -> object:
        """Has the further arrays of a batch as attributes."""
        return None

    def _inputs(
        self,
        shape: StepShape,
        max_seqlen_q: int,
        max_context_len: int,
        upload: StepUpload | None = None,
        first: int = 0,
    ) -> StepInputs:
        return StepInputs(
            upload or self._upload,
            shape,
            self._block_tables,
            self._numbers,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            adapter_groups=self._adapter_groups,
            more=self._more_inputs(shape),
            first=first,
        )

    def _forward(self, inputs: StepInputs, *, every_token: bool = False, adapted: bool = False) -> Tensor:
        """Logits [S, V] float32 in the step's buffers; `every_token` computes all tokens' hidden states to the end,
        `adapted` with their adapters."""
        self._update_tables(inputs)
        shape = inputs.shape
        samples_all = shape.is_decode or shape.verifies
        return self.decoder.forward(
            inputs.input_ids,
            inputs.attention,
            None if shape.is_decode else inputs.logits_indices,
            self._buffers,
            sampled=inputs.sampled or self._chosen_ids,
            last=None if samples_all or every_token else inputs.last_attention,
            adapters=self._step_adapters(inputs) if adapted else None,
        )

    def _update_tables(self, inputs: StepInputs) -> None:
        if inputs.updates is not None:
            self.ops.scatter(self._block_tables, *inputs.updates)

    def _step_adapters(self, inputs: StepInputs) -> StepAdapters:
        assert inputs.adapters is not None, "the step was made without adapters"
        assert self._adapter_slots is not None
        for rows in {id(rows): rows for rows in inputs.adapters}.values():
            self.ops.group_rows(rows, self._adapter_slots.num_slots)
        return inputs.adapters

    def _submit(self, inputs: StepInputs, batch: StepBatch) -> None:
        """Send the batch to the device; table updates that the step has no room for go ahead of it."""
        updates, room = batch.table_updates, inputs.shape.num_seqs
        if updates is not None and len(updates.rows) > room:
            for start in range(room, len(updates.rows), MAX_TABLE_UPDATES):
                tensors = [
                    self._side_upload.stage_array(each) for each in updates.part(start, start + MAX_TABLE_UPDATES)
                ]
                self._side_upload.submit()
                self.ops.scatter(self._block_tables, *tensors)
            updates = TableUpdates(*updates.part(0, room))
        inputs.submit(batch, updates, self._more_of(batch))

    def _score_prompts(self, rows: PromptRows) -> list[LogprobTensors]:
        """Launch log-probabilities of prompt tokens, right after the step's forward."""
        token_indices = self._side_upload.stage_array(rows.token_indices)
        next_token_ids = self._side_upload.stage_array(rows.next_token_ids)
        self._side_upload.submit()
        return launch_prompt_logprobs(
            self.decoder, self._buffers, token_indices, next_token_ids, rows.num_logprobs, score=self._samples
        )

    # -- the start ------------------------------------------------------------------------------

    def _load_weights(self, progress: Progress | None) -> Weights:
        def report(done: int, total: int) -> None:
            if progress is not None:
                progress("weights", done, total)

        host_layers = make_host_layers(self.config, self.model, self._dtype, self.device, self._room_for_layers)
        if self.config.load_format == "dummy":
            seed = self.config.seed or 0
            return dummy_weights(
                self.model,
                self._dtype,
                self.ops,
                seed=seed,
                progress=report,
                host_layers=host_layers,
                rank=self._partition.rank,
            )
        return load_weights(
            Path(self.config.model),
            self.model,
            self._dtype,
            self.ops,
            report,
            host_layers=host_layers,
            rank=self._partition.rank,
        )

    def _room_for_layers(self) -> int:
        """Bytes of the device that layers may still take, by what is known while they are loaded."""
        config, model = self.config, self.model
        tokens = config.max_model_len or min(self.max_model_len, AUTO_TOKENS)
        num_blocks = config.num_kv_blocks or -(-tokens // self.block_size)
        taken = num_blocks * block_bytes(model, self.block_size, self._kv_format) + buffer_bytes(
            model, self._dtype, max_tokens=self._buffer_tokens, max_logits=config.max_num_seqs + config.max_step_drafts
        )
        free = _free_of_share(self.device, config.gpu_memory_utilization) + self._used_before
        if self.drafter is not None:
            free -= self.drafter.planned_bytes + num_blocks * self.drafter.block_bytes
        return free - taken - AUTO_MARGIN

    def _make_graphs(self) -> StepGraphs:
        config, drafts = self.config, self.config.max_step_drafts
        speculation = config.speculation_settings
        return StepGraphs(
            config.max_num_seqs,
            self._buffer_tokens,
            self.max_model_len,
            SHORT_CONTEXT,
            self._max_rows - drafts,
            max_drafts=drafts,
            draft_tokens=speculation.num_tokens if speculation is not None else 0,
            full_tokens=FULL_TOKENS_DEQUANTISED if self.ops.dequantises else FULL_TOKENS,
        )

    def _round_prompts(self, weights: Weights) -> None:
        """Round products of many rows to int8, or say that nothing is."""
        from tessera.engine.ops.cuda import CudaOps

        ops = self.ops
        if isinstance(ops, CudaOps) and weights.stream is None:  # the scales of rows are kept by address
            ops.rounds_many_rows = True
            if any(ops.may_round(weight, self._dtype) for weight in weights.linear_weights()):
                return
        logger.warning(
            "--prompt-activations int8 changes nothing: %s has no kernel for it, or for this model's weights in %s%s",
            self.device,
            self.dtype,
            "" if weights.stream is None else ", or some of them are in host memory",
        )

    def _make_adapter_slots(self) -> AdapterSlots:
        num_slots = self.config.max_loras
        if not isinstance(self.device, CpuDevice):
            self._cuda_ops.reserve_adapters(self._dtype)
        for rows in (self._buffer_tokens, self.config.max_num_seqs + self.config.max_step_drafts):
            size = self.ops.row_groups_size(rows, num_slots)
            self._adapter_groups.append(empty((size,), int32, self.device))
        return AdapterSlots(
            self.model,
            self._dtype,
            self.device,
            num_slots=num_slots,
            max_rank=self._max_lora_rank,
            max_rows=self._buffer_tokens,
        )

    @property
    def _cuda_ops(self) -> CudaOps:
        from tessera.engine.ops.cuda import CudaOps

        assert isinstance(self.ops, CudaOps), f"no kernels for {self.device}"
        return self.ops

    def _prepare_kernels(self, progress: Progress | None) -> None:
        """Compile kernels and reserve memory on a CUDA device, so that no step waits or allocates."""

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress("kernels", done, total)

        self._cuda_ops.compile(
            self._dtype,
            report,
            head_dims=self.model.head_dims,
            rare_ops=self.model.rare_ops,
            e4m3_cache=self._kv_format.dtype == uint8,
            drafts=self.config.speculation_settings is not None,
        )
        self._reserve_attention()

    def _reserve_attention(self) -> None:
        rows = self._max_rows + 1  # a CUDA graph has one more row, for padded tokens
        e4m3_cache = self._kv_format.dtype == uint8
        self._cuda_ops.reserve_attention(rows, self._own.num_heads, max(self.model.head_dims), e4m3_cache=e4m3_cache)

    def warm_up(self) -> None:
        """Run a step of one padding token with every kind of sampling. It changes nothing, but does the set-up of a
        first step, and a kernel that cannot run fails now."""
        zero = np.zeros(1, np.int32)
        nowhere = np.full(1, -1, np.int32)
        params = SamplingParams(max_tokens=1, top_p=0.5, presence_penalty=1.0, logprobs=0)
        row = row_values(params, slot=-1, num_prompt_tokens=0)
        plain = row_values(SamplingParams(max_tokens=1), slot=-1, num_prompt_tokens=0)
        padding = StepBatch(
            input_ids=zero,
            positions=zero,
            slot_mapping=nowhere,
            table_rows=zero,
            cu_seqlens_q=np.array([0, 1], np.int32),
            context_lens=zero,
            logits_indices=zero,
            sampling=SamplingBatch.of(np.array([row], SAMPLING_ROW)),
            table_updates=TableUpdates(nowhere, zero, zero),
            is_constrained=True,
        )
        self.execute(padding, TokenMask(nowhere, np.zeros((1, mask_words(self.model.vocab_size)), np.uint32)))
        if self._slices is not None:
            sampling = SamplingBatch.of(np.array([plain], SAMPLING_ROW))
            self.execute(replace(padding, sampling=sampling, is_constrained=False))

    def _blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def _num_blocks_that_fit(self) -> int:
        """Lowers max_model_len to what fits, where the user left it open.

        Raises: ConfigError if a sequence of the length asked for does not fit, saying what would.
        """
        per_block = self.block_bytes + (self.drafter.block_bytes if self.drafter is not None else 0)
        if isinstance(self.device, CpuDevice):
            option = "--cpu-kv-cache-gib"
            budget = int(self.config.cpu_kv_cache_gib * GIB) // self._partition.rank.size
            useful = self.config.max_num_seqs * self._blocks_per_seq()
        else:
            option = "--gpu-memory-utilization"
            budget = _free_of_share(self.device, self.config.gpu_memory_utilization) + self._used_before
            useful = MAX_CACHED_BLOCKS  # whatever is left caches prefixes
        if not self.generates:
            useful = self._blocks_per_seq()  # embeddings are made without it
        num_blocks = min(budget // per_block, useful)
        if self._ranks is not None:
            num_blocks = self._ranks.least(num_blocks)
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


@dataclass
class RunningStep:
    """A submitted step; `download` is set once sampling is submitted."""

    batch: StepBatch
    inputs: StepInputs
    logits: Tensor
    drafted: DraftDownload | None = None
    download: ResultDownload | None = None
    prompt_logprobs: list[LogprobTensors] | None = None

    def result(self) -> StepResult:
        """Waits for the device. To be called once, in the order of the steps."""
        result = StepResult(np.empty(0, np.int32))
        if self.batch.num_sampled:
            assert self.download is not None, "a constrained step is sampled first"
            result = self.download.result()
        if self.prompt_logprobs is not None and (rows := self.batch.prompt_rows) is not None:
            result.prompt_logprobs = read_prompt_logprobs(self.prompt_logprobs, rows.next_token_ids, rows.num_logprobs)
        return result

    def drafts(self) -> Int32Array:
        """[K, num_slots] draft tokens that were computed before the step; waits for them."""
        assert self.drafted is not None, "the step has drafts of a model"
        return self.drafted.result()


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


def resolve_kv_format(config: EngineConfig, dtype: np.dtype[Any], device: Device) -> KVFormat:
    """The format asked for. Raises: ConfigError where the device has no kernels for it."""
    if config.kv_cache_dtype == "auto":
        return KVFormat(dtype)
    if not isinstance(device, CpuDevice):
        from tessera.engine.cuda.device import CudaDevice

        if isinstance(device, CudaDevice) and device.compute_capability < E4M3_CAPABILITY:
            raise ConfigError(f"--kv-cache-dtype fp8 needs a GPU from sm_89 on, and {device} is sm_{device.arch}")
    return KVFormat(uint8)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The length asked for, or the model's own.

    Raises: ConfigError if it is beyond what the model's positions reach.
    """
    asked = config.max_model_len or model.usual_context
    if asked > model.longest_context:
        raise ConfigError(
            f"--max-model-len {asked} is beyond the {model.longest_context} positions that {config.model} supports"
        )
    return asked


def _used_memory(device: Device) -> int:
    """Bytes of a CUDA device's memory that are in use, by whatever process."""
    if isinstance(device, CpuDevice):
        return 0
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no memory figures for {device}"
    return device.total_memory - device.free_memory()


def _free_of_share(device: Device, share: float) -> int:
    """Bytes that may still be taken of `share` of a CUDA device's memory."""
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no memory figures for {device}"
    device.synchronize()
    device.empty_cache()
    used = device.total_memory - device.free_memory()
    return int(device.total_memory * share) - used
