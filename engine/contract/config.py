"""The user's settings of an engine; all else is derived from the model and the device."""

from __future__ import annotations

from typing import Literal

import msgspec

from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.logs import LogFormat, LogLevel

DeviceName = Literal["auto", "cuda", "cpu"]
DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]
PoolingName = Literal["auto", "mean", "last", "cls"]

BLOCK_SIZES = (8, 16, 32, 64, 128)
DEVICE_DEFAULTS = {"cuda": (256, 8192), "cpu": (64, 1024)}  # max_num_seqs, max_num_batched_tokens


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process; crosses the process boundary as JSON.

    Attributes:
        model: path of a local model folder (hub ids are resolved before this is made).
        served_name: the model's name in metrics; empty takes the folder's.
        device: `auto` takes CUDA where a usable device is found; `cuda` without one is an error.
        dtype: of weights, activations and KV cache; `auto` is the checkpoint's own on CUDA
            (float32 checkpoints are served in bfloat16), float32 on the CPU.
        max_model_len: longest prompt plus answer in tokens; None takes the model's own.
        max_num_seqs: most sequences in one step; 0 takes the device's default.
        max_num_batched_tokens: most tokens in one step (the step's token budget); 0 takes the device's
            default.
        max_queue_len: most requests waiting; beyond it a request is refused with 429.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of the device's memory for weights, step buffers and KV cache.
        cpu_kv_cache_gib: size of the KV cache on the CPU device, in GiB.
        num_kv_blocks: overrides the derived number of KV blocks (tests, tuning).
        load_format: `dummy` makes random weights on the device from config.json alone.
        cuda_graphs: capture steps of common shapes as CUDA graphs at the start and replay them.
        prefix_caching: reuse the KV blocks of equal prompt prefixes.
        seed: of the random weights that `dummy` makes; None takes 0. Requests have seeds of their own.
        embedding_model: path of the folder of an encoder that makes embeddings beside the model; empty: none.
        pooling: how token vectors become an embedding, of `embedding_model` where there is one; `auto` is what
            the folder says, else the mean for an encoder and the last token for a decoder.
        log_format: form of the engine process's log lines.
        log_level: lines below it are left out.
    """

    model: str
    served_name: str = ""
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_queue_len: int = 1024
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    num_kv_blocks: int | None = None
    load_format: LoadFormat = "auto"
    cuda_graphs: bool = True
    prefix_caching: bool = True
    seed: int | None = None
    embedding_model: str = ""
    pooling: PoolingName = "auto"
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    def verify(self) -> None:
        """Raise ConfigError naming the first option whose value cannot work."""
        or_default = {
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
        }
        for option, number in or_default.items():
            if number < 0:
                raise ConfigError(f"{option} must be at least 1, or 0 for the device's default, not {number}")
        positive = {
            "--max-queue-len": self.max_queue_len,
            "--max-model-len": self.max_model_len,
            "--num-kv-blocks": self.num_kv_blocks,
        }
        for option, value in positive.items():
            if value is not None and value < 1:
                raise ConfigError(f"{option} must be at least 1, not {value}")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}), so that every running sequence can take a step"
            )
        if self.block_size not in BLOCK_SIZES:
            accepted = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"--block-size must be one of {accepted}, not {self.block_size}")
        if not 0.05 <= self.gpu_memory_utilization <= 0.98:
            raise ConfigError(
                f"--gpu-memory-utilization must be between 0.05 and 0.98, not {self.gpu_memory_utilization}"
            )
        if not 0.001 <= self.cpu_kv_cache_gib <= 4096:
            raise ConfigError(f"--cpu-kv-cache-gib must be between 0.001 and 4096, not {self.cpu_kv_cache_gib}")

    def with_device_defaults(self, device: str) -> EngineConfig:
        """A copy in which every 0 has become the default of `device`, "cuda" or "cpu"."""
        num_seqs, num_tokens = DEVICE_DEFAULTS[device]
        max_num_seqs = self.max_num_seqs or min(num_seqs, self.max_num_batched_tokens or num_seqs)
        max_num_batched_tokens = self.max_num_batched_tokens or max(num_tokens, max_num_seqs)
        return msgspec.structs.replace(self, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
