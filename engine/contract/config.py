"""Settings of an engine that a user decides on. Everything else is derived from the model and the device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.logs import LogFormat, LogLevel
from tessera.engine.contract.speculation.settings import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_MODEL_DRAFT_TOKENS,
    DEFAULT_MTP_DRAFT_TOKENS,
    DRAFT_STEP_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_LOOKUP,
    MAX_STEP_DRAFTS,
    Speculation,
    SpeculationMethod,
    SpeculationMode,
    make_speculation,
)
from tessera.engine.contract.speculation.vllm_config import read_speculative_config, unused_hints
from tessera.options.declaration import Option, check_fields
from tessera.options.errors import OptionError

DeviceName = Literal["auto", "cuda", "cpu"]
DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDTypeName = Literal["auto", "fp8"]
PromptActivationsName = Literal["16bit", "int8"]
LoadFormat = Literal["auto", "dummy"]
QuantizationName = Literal["none", "fp8", "int4"]
PoolingName = Literal["auto", "mean", "last", "cls"]
ScoringName = Literal["auto", "yes-no", "none"]
BlockSize = Literal[8, 16, 32, 64, 128]

MAX_LORA_RANK = 256
FINE_TUNED_RANK = 16  # of the adapters that fine-tuning jobs make
PRIVATE_PREFIX = "ft:"  # of the names of fine-tuned models, each of which is for one API key
MAX_LORA_NAME = 256  # characters

DEVICE_DEFAULTS = {"cuda": (256, 8192), "cpu": (64, 1024)}  # max_num_seqs, max_num_batched_tokens
(_CUDA_SEQS, _CUDA_TOKENS), (_CPU_SEQS, _CPU_TOKENS) = DEVICE_DEFAULTS["cuda"], DEVICE_DEFAULTS["cpu"]


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine process and of the app processes alike."""

    seed: Annotated[
        int | None,
        Option(
            "seed of requests that bring none, which then always give the same completion; with --load-format dummy "
            "also that of the weights",
            group="model",
            metavar="SEED",
            low=0,
            high=2**63 - 1,
            default="another for each completion",
        ),
    ] = None
    device: Annotated[
        DeviceName,
        Option("auto: CUDA where a usable device is found, else the CPU", group="device and memory"),
    ] = "auto"
    log_format: Annotated[LogFormat, Option("text for people, json for one object a line", group="log")] = "text"
    log_level: Annotated[
        LogLevel, Option("leave out what matters less; info has one line for each request", group="log")
    ] = "info"
    log_stalls: Annotated[
        float,
        Option(
            "longest time for which the work on one request may hold up all others without a line in the log, which "
            "names the request and the code",
            group="log",
            metavar="SECONDS",
            low=0.001,
            high=3600,
        ),
    ] = 1.0


def parse_lora(text: str) -> str:
    """NAME=FOLDER as it is. Raises OptionError."""
    name, equals, folder = text.partition("=")
    if not equals or not name.strip() or len(name) > MAX_LORA_NAME or not folder:
        raise OptionError(f"must be a name, = and a folder, such as spelling=out/adapter, not {text!r}")
    return text


class EngineConfig(ProcessSettings, frozen=True, kw_only=True):
    """Settings of one engine process; crosses the process boundary as JSON.

    A 0 in `max_num_seqs` or `max_num_batched_tokens` takes the device's default. The fields without an Option:

    Attributes:
        model: path of a local model folder (hub ids are resolved before this is made).
        served_name: the model's name in metrics; empty takes the folder's.
        embedding_model: path of the folder of an encoder that makes embeddings beside the model; empty: none.
        reranker_model: path of the folder of a cross-encoder that scores pairs beside the model; empty: none.
        embedding_name, reranker_name: names of these in metrics; empty takes the folder's.
        can_sleep: its memory can be given back while its process lives, with the weights in host memory.
        beside_others: other engines share the device: memory that was in use before does not count against this one's
            share.
        fine_tuned: it serves what fine-tuning jobs make of the model.
        reports_prefixes: its heartbeats say what the prefix cache has, for the choice among several engines.
    """

    model: str
    served_name: str = ""
    embedding_model: str = ""
    embedding_name: str = ""
    reranker_model: str = ""
    reranker_name: str = ""
    beside_others: bool = False
    can_sleep: bool = False
    fine_tuned: bool = False
    reports_prefixes: bool = False
    max_model_len: Annotated[
        int | None,
        Option(
            "longest prompt plus completion",
            group="model",
            metavar="TOKENS",
            low=1,
            high=2**31 - 1,
            default="the model's own",
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        Option("auto: read the weights; dummy: make random ones from config.json, for benchmarks", group="model"),
    ] = "auto"
    quantization: Annotated[
        QuantizationName,
        Option(
            "quantise a checkpoint in 16 or 32 bits while it loads: fp8, a scale for each row; int4, groups of 128; "
            "embeddings and head stay as they are",
            group="model",
        ),
    ] = "none"
    pooling: Annotated[
        PoolingName,
        Option(
            "how token vectors become an embedding; auto: as the model's folder says, else mean for an encoder and "
            "last for a decoder",
            group="embeddings",
        ),
    ] = "auto"
    scoring: Annotated[
        ScoringName,
        Option(
            "how a model that generates text scores pairs; yes-no: by its logits of yes and no after Qwen3-Reranker's "
            "prompt; auto: so for a folder or hub id called Qwen3-Reranker",
            group="embeddings",
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Option(
            "GPUs that share the model's weights and KV cache, a divisor of its attention heads; on the CPU threads",
            group="device and memory",
            metavar="RANKS",
            low=1,
            high=64,
        ),
    ] = 1
    dtype: Annotated[
        DTypeName,
        Option(
            "of weights and KV cache; auto: the checkpoint's on CUDA (bfloat16 for float32), float32 on the CPU",
            group="device and memory",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDTypeName,
        Option(
            "of the KV cache; auto: that of --dtype; fp8: e4m3, twice the tokens in the same memory, with the "
            "checkpoint's scales of keys and values if it has some (on CUDA from sm_89 on)",
            group="device and memory",
        ),
    ] = "auto"
    prompt_activations: Annotated[
        PromptActivationsName,
        Option(
            "int8: in steps of more than 256 tokens, products by weights of 2 to 8 bits whose activations have 16 bits "
            "(GGUF, AWQ, GPTQ, int4 and their like) round both to 8 bits, which makes prompts faster (on sm_90)",
            group="device and memory",
        ),
    ] = "16bit"
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "share of the GPU's memory for weights, buffers and KV cache",
            group="device and memory",
            metavar="SHARE",
            low=0.05,
            high=0.98,
        ),
    ] = 0.9
    cpu_kv_cache_gib: Annotated[
        float,
        Option(
            "size of the KV cache on the CPU, in GiB", group="device and memory", metavar="GIB", low=0.001, high=4096
        ),
    ] = 1.0
    num_kv_blocks: Annotated[
        int | None,
        Option(
            "size of the KV cache in blocks, whatever the device",
            group="device and memory",
            metavar="BLOCKS",
            low=1,
            high=2**31 - 1,
            default="what memory allows",
        ),
    ] = None
    cpu_offload_gib: Annotated[
        str | None,
        Option(
            "keep so many GiB of the weights in page-locked host memory, in whole layers that are copied to the device "
            "in each step; auto: the fewest layers without which the model fits, with a KV cache of 16384 tokens or of "
            "--max-model-len; 0: none",
            group="device and memory",
            metavar="GIB",
            pattern=r"auto|\d{1,5}(\.\d+)?",
            form="a size in GiB or auto",
            default="none",
        ),
    ] = None
    kv_offload_gib: Annotated[
        float | None,
        Option(
            "page-locked host memory for KV blocks that the cache evicts, in GiB; they are copied back when a prompt "
            "begins with them, and preempted requests wait there",
            group="device and memory",
            metavar="GIB",
            low=0.001,
            high=65536,
            default="none",
        ),
    ] = None
    kv_offload_dir: Annotated[
        str | None,
        Option(
            "folder for KV blocks that host memory evicts in turn; each model has a folder of its own in it",
            group="device and memory",
            metavar="FOLDER",
            default="none",
        ),
    ] = None
    kv_offload_disk_gib: Annotated[
        float | None,
        Option(
            "most that --kv-offload-dir holds for a model, in GiB",
            group="device and memory",
            metavar="GIB",
            low=0.001,
            high=2**20,
            default="100",
        ),
    ] = None
    block_size: Annotated[BlockSize, Option("tokens in a KV block", group="device and memory")] = 16
    max_num_seqs: Annotated[
        int,
        Option(
            "most sequences in one step",
            group="scheduling",
            metavar="SEQS",
            low=1,
            high=2**16,
            default=f"{_CUDA_SEQS} on CUDA, {_CPU_SEQS} on the CPU",
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "most tokens in one step",
            group="scheduling",
            metavar="TOKENS",
            low=1,
            high=2**20,
            default=f"{_CUDA_TOKENS} on CUDA, {_CPU_TOKENS} on the CPU",
        ),
    ] = 0
    max_queue_len: Annotated[
        int,
        Option(
            "most requests waiting; further ones get status 429",
            group="scheduling",
            metavar="REQUESTS",
            low=1,
            high=2**20,
        ),
    ] = 1024
    enforce_eager: Annotated[
        bool,
        Option("launch decode steps kernel by kernel, without CUDA graphs (slower; for debugging)", group="scheduling"),
    ] = False
    batch_invariant: Annotated[
        bool,
        Option(
            "a request's tokens and log-probabilities do not depend, to the last bit, on what else is computed, on the "
            "chunks of its prompt, on the prefix cache or on preemption (CUDA)",
            group="scheduling",
        ),
    ] = False
    prefix_caching: Annotated[
        bool, Option("reuse the KV blocks of equal beginnings of prompts", group="scheduling")
    ] = True
    lora: Annotated[
        tuple[str, ...],
        Option(
            "serve the LoRA adapter in a folder of PEFT's format as a model of this name; may be given several times",
            group="adapters",
            metavar="NAME=FOLDER",
            parse=parse_lora,
            form="a name, = and a folder",
            default="none",
        ),
    ] = ()
    allow_lora_loading: Annotated[
        bool,
        Option(
            "take POST /v1/load_lora_adapter and /v1/unload_lora_adapter, by which clients have any folder of this "
            "machine read as an adapter",
            group="adapters",
        ),
    ] = False
    max_loras: Annotated[
        int,
        Option(
            "adapters that have room on the device at a time, and so in one batch; each takes as much as one of "
            "--max-lora-rank on all projections",
            group="adapters",
            metavar="N",
            low=1,
            high=1024,
        ),
    ] = 8
    max_lora_rank: Annotated[
        int | None,
        Option(
            "largest rank of an adapter that can be served",
            group="adapters",
            metavar="RANK",
            low=1,
            high=MAX_LORA_RANK,
            default="the largest of --lora, but at least 16",
        ),
    ] = None
    max_cpu_loras: Annotated[
        int,
        Option(
            "adapters that are kept in host memory; others are read from their folders again when they are needed",
            group="adapters",
            metavar="N",
            low=1,
            high=4096,
        ),
    ] = 64

    @property
    def serves_adapters(self) -> bool:
        return bool(self.lora) or self.allow_lora_loading or self.fine_tuned

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Names and folders of `lora`."""
        pairs = (text.partition("=") for text in self.lora)
        return tuple((name, folder) for name, _, folder in pairs)

    speculation: Annotated[
        SpeculationMode,
        Option(
            "draft tokens and verify several in a step, which changes no token; auto: where it pays, as measured; on: "
            "wherever something is found",
            group="speculation",
        ),
    ] = "off"
    speculative_method: Annotated[
        SpeculationMethod,
        Option(
            "ngram: what followed the same last tokens before in prompt and completion; suffix: the longest end of the "
            "text that occurred before, also in earlier completions of the same key; draft_model: what the smaller "
            "--speculative-model says; eagle3: what the EAGLE-3 head there says; mtp: what the model's own layer of "
            "multi-token prediction says",
            group="speculation",
        ),
    ] = "suffix"
    speculative_model: Annotated[
        str | None,
        Option(
            "folder, GGUF file or hub id of the model of draft_model, which has the vocabulary of the served one, or "
            "folder or hub id of the head of eagle3",
            group="speculation",
            metavar="MODEL",
            default="none",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            "most draft tokens of a sequence in a step",
            group="speculation",
            metavar="TOKENS",
            low=1,
            high=MAX_DRAFT_TOKENS,
            default=f"{DEFAULT_DRAFT_TOKENS}; of a model {DEFAULT_MODEL_DRAFT_TOKENS}, mtp {DEFAULT_MTP_DRAFT_TOKENS}",
        ),
    ] = None
    prompt_lookup_min: Annotated[
        int | None,
        Option(
            "fewest last tokens that ngram looks for",
            group="speculation",
            metavar="TOKENS",
            low=1,
            high=MAX_LOOKUP,
            default="2",
        ),
    ] = None
    prompt_lookup_max: Annotated[
        int | None,
        Option("most of them", group="speculation", metavar="TOKENS", low=1, high=MAX_LOOKUP, default="4"),
    ] = None
    speculative_config: Annotated[
        dict[str, Any],
        Option(
            "the same in vLLM's form, method, model, num_speculative_tokens and others; means --speculation auto unless"
            " that is on",
            group="speculation",
            metavar="JSON",
        ),
    ] = {}

    @property
    def speculation_settings(self) -> Speculation | None:
        """How tokens are drafted; None for not at all. Raises: ConfigError."""
        try:
            return self._read_speculation()
        except OptionError as error:
            raise ConfigError(str(error)) from None

    def _read_speculation(self) -> Speculation | None:
        options = (self.num_speculative_tokens, self.prompt_lookup_min, self.prompt_lookup_max)
        if self.speculative_config:
            if any(option is not None for option in options):
                raise OptionError(
                    "--speculative-config is given, so its numbers cannot be options of their own as well"
                )
            if self.speculative_model is not None:
                raise OptionError("--speculative-config is given, so --speculative-model must be its `model`")
            found = read_speculative_config(self.speculative_config)
            return msgspec.structs.replace(found, always=self.speculation == "on")
        if self.speculation == "off":
            if self.speculative_model is not None:
                raise OptionError("--speculative-model is given, but --speculation is off")
            return None
        model = self.speculative_model or ""
        return make_speculation(self.speculative_method, *options, model=model, always=self.speculation == "on")

    @property
    def unused_speculative_hints(self) -> list[str]:
        """A sentence for each field of --speculative-config that has no effect."""
        return unused_hints(self.speculative_config) if self.speculative_config else []

    @property
    def max_step_drafts(self) -> int:
        """Most draft tokens of a step."""
        settings = self.speculation_settings
        return 0 if settings is None else min(self.max_num_seqs * settings.num_tokens, MAX_STEP_DRAFTS)

    @property
    def draft_step_tokens(self) -> int:
        """Most tokens of a step of the draft model: of each sequence a token and those accepted before it fit."""
        settings = self.speculation_settings
        most = 1 + settings.num_tokens if settings is not None and settings.reads_states else 2
        return max(most * self.max_num_seqs, min(self.max_num_batched_tokens, DRAFT_STEP_TOKENS))

    def with_draft_model(self, path: str) -> EngineConfig:
        """A copy whose draft model is the folder or file `path`."""
        settings = self.speculation_settings
        if self.speculative_config and settings is not None:
            given = {name: value for name, value in self.speculative_config.items() if name != "revision"}
            found = {**given, "method": settings.method, "model": path}
            return msgspec.structs.replace(self, speculative_config=found)
        return msgspec.structs.replace(self, speculative_model=path)

    def verify(self) -> None:
        """Raise ConfigError naming the first option whose value cannot work."""
        try:
            check_fields(self)
        except OptionError as error:
            raise ConfigError(str(error)) from None
        if self.kv_offload_dir is not None and self.kv_offload_gib is None:
            raise ConfigError("--kv-offload-dir needs --kv-offload-gib: blocks reach the disk through host memory")
        if self.kv_offload_disk_gib is not None and self.kv_offload_dir is None:
            raise ConfigError("--kv-offload-disk-gib needs --kv-offload-dir, whose size it bounds")
        if self.serves_adapters:
            self._verify_adapters()
        speculation = self.speculation_settings
        if speculation is not None and speculation.uses_model and self.tensor_parallel_size > 1:
            raise ConfigError(f"the speculative method {speculation.method} cannot be used with --tensor-parallel-size")
        if self.prompt_activations == "int8" and self.batch_invariant:
            raise ConfigError(
                "--prompt-activations int8 cannot be used with --batch-invariant: whether a row is rounded depends on "
                "how many there are"
            )
        if self.tensor_parallel_size > 1 and self.cpu_offload_gib not in (None, "0"):
            raise ConfigError("--cpu-offload-gib cannot be used with --tensor-parallel-size")
        if self.tensor_parallel_size > 1 and self.scoring == "yes-no":
            raise ConfigError("--scoring yes-no cannot be used with --tensor-parallel-size: ranks share the head")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}), so that every running sequence can take a step"
            )

    def _verify_adapters(self) -> None:
        others = {
            "--batch-invariant": self.batch_invariant,
            "--tensor-parallel-size": self.tensor_parallel_size > 1,
            "--cpu-offload-gib": self.cpu_offload_gib not in (None, "0"),
        }
        asked = "--lora and --allow-lora-loading"
        if not self.lora and not self.allow_lora_loading:
            asked = "--enable-fine-tuning"
        for option, given in others.items():
            if given:
                raise ConfigError(f"{asked} cannot be used with {option}")
        if self.fine_tuned and self.max_lora_rank is not None and self.max_lora_rank < FINE_TUNED_RANK:
            raise ConfigError(f"--enable-fine-tuning needs a --max-lora-rank of at least {FINE_TUNED_RANK}")

    def with_device_defaults(self, device: str) -> EngineConfig:
        """A copy in which every 0 has become the default of `device`, "cuda" or "cpu"."""
        num_seqs, num_tokens = DEVICE_DEFAULTS[device]
        max_num_seqs = self.max_num_seqs or min(num_seqs, self.max_num_batched_tokens or num_seqs)
        max_num_batched_tokens = self.max_num_batched_tokens or max(num_tokens, max_num_seqs)
        return msgspec.structs.replace(self, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
