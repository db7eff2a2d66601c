"""A second, smaller model of the same vocabulary, which decodes drafts by an ordinary runner of its own.

A draft of k tokens is k of its steps, one after the other on the device: each reads the token that the one before has
sampled there, so those behind the first are submitted together (see `chain`). They are sampled with the parameters and
random numbers that the served model will use, so a draft token is the one that is chosen wherever both models would
choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import DraftInfo
from tessera.engine.core.step_batch import StepBatch, TokenMask
from tessera.engine.drafters.chain import MAX_STEPS, DraftChains
from tessera.engine.models.buffers import buffer_bytes
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.weights.build import num_weight_bytes
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.cuda_graphs import StepGraph
from tessera.engine.runner.draft_runner import IN_FLIGHT, DraftDownload
from tessera.engine.runner.model_runner import ModelRunner, Progress, RunningStep
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.runner.upload import StepUpload
from tessera.engine.speculation.draft_keys import DraftLimits
from tessera.engine.tensor import CpuDevice, Device, Tensor, empty, int32

MAX_CAPTURED_ROWS, MAX_CAPTURED_TOKENS = 16, 64  # of a step, up to which the choice of its tokens has a CUDA graph


class DraftModel(ModelRunner):
    """Nothing is loaded before `load`; see `DraftRunner`.

    Its KV blocks are numbered as those of the served model, whose block tables it reads.
    """

    filters: ClassVar[Sequence[bool]] = (False, True)  # whether tokens of its steps may be excluded: which of both

    def __init__(self, config: EngineConfig, model: ModelConfig, device: Device, ops: Ops) -> None:
        """`config`: the served model's, whose dtype is settled and which has a draft model."""
        settings = config.speculation_settings
        assert settings is not None, "the settings ask for a draft model"
        own = msgspec.structs.replace(
            config,
            model=settings.model,
            max_model_len=None,
            max_num_batched_tokens=config.draft_step_tokens,
            batch_invariant=False,  # nothing depends on its bits
            quantization="none",
            cpu_offload_gib=None,
            lora=(),
            allow_lora_loading=False,
            fine_tuned=False,
            speculation="off",
            speculative_model=None,
            speculative_config={},
        )
        self._longest_text = settings.max_model_len or model.longest_context
        super().__init__(own, model, device, ops)

    def _make(self, progress: Progress | None) -> None:
        """Later, by the runner of the served model."""

    @property
    def planned_bytes(self) -> int:
        weights = num_weight_bytes(self.model, self._dtype)
        rows = self.config.max_num_seqs
        return weights + buffer_bytes(self.model, self._dtype, max_tokens=self._buffer_tokens, max_logits=rows)

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        self.max_model_len = min(served.max_model_len, self.model.longest_context, self._longest_text)
        self._samples = False  # it has a sampler of its own
        self._load(progress)

    def allocate(self, served: ModelRunner) -> None:
        self._block_tables = served.block_tables
        self._drafts = served.drafts
        self._choices: dict[tuple[StepShape, int, bool], Any] = {}  # graphs, by shape, number and whether filtered
        self._chains = DraftChains(SHORT_CONTEXT, self.max_model_len)
        self._number = 0  # of the draft token that is computed next
        self._num_begun = 0  # of the steps before the next batch
        self._chosen = empty((self.config.max_num_seqs,), int32, self.device)
        self._downloads = [DraftDownload(self.device, self._drafts) for _ in range(IN_FLIGHT)]
        self._allocate(served.num_kv_blocks)

    @property
    def kept_planes(self) -> list[Tensor]:
        """Of its part of KV blocks, each [num_blocks, ...], what must be kept where the served model's part is: what
        the served model has left for it. The rest it computes again."""
        return []

    @property
    def limits(self) -> DraftLimits:
        """Of the texts that it reads, once it is loaded."""
        return DraftLimits(self.max_model_len, self.short_rope_len)

    @property
    def info(self) -> DraftInfo:
        """For the start report, once it has its KV cache."""
        return DraftInfo(
            architecture=self.model.architecture,
            num_parameters=self.num_parameters,
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=self.kv_cache_bytes,
            num_tokens=self._drafts.shape[0],
        )

    def begin(self, steps: Sequence[StepBatch]) -> None:
        if self._num_begun == 0:
            self._start_step(steps[0], 0)
            self._num_begun = 1
        if self._num_begun < len(steps):
            for number in range(1 + self._chains.launch(steps[1:], self._prepared), len(steps)):
                self._start_step(steps[number], number)
            self._num_begun = len(steps)

    def draft(self, steps: Sequence[StepBatch]) -> DraftDownload:
        self.begin(steps)
        self._num_begun = 0
        self._downloads.append(self._downloads.pop(0))
        download = self._downloads[-1]
        download.start()
        return download

    def _start_step(self, step: StepBatch, number: int) -> None:
        self._number = number
        self._prepare(step)
        self.start(step)

    def _prepared(self, step: StepBatch) -> object:
        """Its further arrays."""
        self._prepare(step)
        return self._more_of(step)

    def _prepare(self, step: StepBatch) -> None:
        """Before a step is submitted."""

    def capture(self) -> None:
        """Also of what chooses a few tokens: to launch that kernel by kernel takes longer than a small model's step."""
        super().capture()
        for step in self._graphs.recorded:
            self._capture_choices(self.device, step)
        shapes = [step.inputs.shape for step in self._graphs.recorded]
        self.capture_chains(self.device, [shape.num_seqs for shape in shapes if shape.is_decode])

    @property
    def _leaves_prompts(self) -> bool:
        """Each graph is followed by one of the choice."""
        return False

    def capture_chains(self, device: Any, sizes: Sequence[int]) -> None:
        """Graphs of the steps behind the first, for these numbers of sequences."""
        num_steps = self._drafts.shape[0] - 1
        self._chains.capture(device, sizes, num_steps, self._chain_inputs, self._compute, filters=self.filters)

    def _chain_inputs(self, shape: StepShape, upload: StepUpload | None = None, first: int = 0) -> StepInputs:
        return self._inputs(shape, 1, self.max_model_len, upload, first)

    def _compute(self, inputs: StepInputs, number: int, filtered: bool) -> None:
        """The draft's token of this number, which reads the one before where that is kept."""
        inputs.sampled = self._drafts[number - 1]
        chosen = self._choose_tokens(self._forward(inputs), inputs, filtered=filtered)
        if number < MAX_STEPS:
            self._scatter(chosen, inputs, self._drafts[number])
        else:  # what follows is no part of the chain
            self._keep(chosen, inputs, number)

    def _capture_choices(self, device: Any, step: StepGraph) -> None:
        shape = step.inputs.shape
        if shape.num_sampled > MAX_CAPTURED_ROWS or shape.num_tokens > MAX_CAPTURED_TOKENS:
            return
        for number in range(self._drafts.shape[0] if shape.is_decode else 1):  # a first step may read several tokens
            for filtered in self.filters:
                with device.capture() as finish:
                    chosen = self._choose_tokens(step.logits, step.inputs, filtered=filtered)
                    self._keep(chosen, step.inputs, number)
                self._choices[shape, number, filtered] = finish()

    def sample(self, running: RunningStep, mask: TokenMask | None = None) -> None:
        """Choose a token of each sampled row, for the next step of the draft and for the step that verifies it."""
        if not running.batch.num_sampled:
            return
        filtered = running.batch.sampling.needs_filter
        recorded = self._choices.get((running.inputs.shape, self._number, filtered))
        if recorded is not None:
            recorded.launch()
        else:
            self._keep(self._choose(running), running.inputs, self._number)

    def _keep(self, chosen: Tensor, inputs: StepInputs, number: int) -> None:
        """Tokens [S] are those of this number of the drafts of the sampled slots, and the newest there."""
        for tokens in (self._newest, self._drafts[number]):
            self._scatter(chosen, inputs, tokens)

    def _scatter(self, chosen: Tensor, inputs: StepInputs, tokens: Tensor) -> None:
        """Tokens [S] into those of all slots."""
        self.ops.scatter(tokens.view(tokens.size, 1), inputs.slots, None, chosen)

    def _choose(self, running: RunningStep) -> Tensor:
        """[S] int32, a token of each row of the step's logits."""
        return self._choose_tokens(running.logits, running.inputs, filtered=running.batch.sampling.needs_filter)

    def _choose_tokens(self, logits: Tensor, inputs: StepInputs, *, filtered: bool) -> Tensor:
        return self.ops.sample(logits, inputs.sampling_rows, filtered=filtered, out=self._chosen[: logits.shape[0]])

    def _reserve_attention(self) -> None:
        """Memory for it; how a long context is divided is for the served model to say."""
        if isinstance(self.device, CpuDevice):
            return
        memory = self._cuda_ops.attention_memory
        rows, heads, head_dim = self._max_rows + 1, self.model.num_heads, max(self.model.head_dims)
        memory.reserve_decodes(rows, heads, head_dim, memory.max_splits)
