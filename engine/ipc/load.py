"""Loads the engine that the process serves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.messages import EmbeddingInfo, EngineInfo, GpuUsage, ScorerInfo
from tessera.engine.ipc.loaded_engine import LoadedEngine, Progress
from tessera.engine.ipc.turns import TimedRunner, Turns
from tessera.engine.tensor import Buffer, Device

if TYPE_CHECKING:
    from tessera.engine.drafters.draft_model import DraftModel
    from tessera.engine.kv_tiers.tiers import KVTiers
    from tessera.engine.models.config import ModelConfig
    from tessera.engine.ops.interface import Ops
    from tessera.engine.ranks.parallel_runner import ParallelRunner
    from tessera.engine.runner.model_runner import ModelRunner

logger = logging.getLogger("tessera.engine")


def load_engine(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Device, model, weights, KV cache and scheduler for `config`.

    Raises: ConfigError (ModelError) for settings that cannot be met; DeviceError.
    """
    # Imported here, so that a failing import is reported like any failed start.
    from tessera.engine.adapters.make import make_catalog
    from tessera.engine.core.account import Accounts
    from tessera.engine.core.core import EngineCore
    from tessera.engine.core.embedder import EmbeddingOnlyCore
    from tessera.engine.core.metrics import EngineMetrics
    from tessera.engine.drafters.make import make_drafter
    from tessera.engine.grammar.compiler import GrammarCompiler
    from tessera.engine.kv_tiers.make import make_tiers
    from tessera.engine.kv_tiers.prefix_report import PrefixReport
    from tessera.engine.models.config import load_config
    from tessera.engine.models.partition import Partition, Rank
    from tessera.engine.models.weights.rounding import rounded_while_loading
    from tessera.engine.ops.make import make_ops
    from tessera.engine.ranks.metrics import RankMetrics
    from tessera.engine.runner.devices import select_device
    from tessera.engine.runner.embedding_engine import EmbeddingEngine
    from tessera.engine.runner.memory.sleeper import make_releasable
    from tessera.engine.runner.model_runner import ModelRunner

    start = time.monotonic()
    folder = Path(config.model)
    model = load_config(folder)
    if config.quantization != "none":
        model = rounded_while_loading(model, config.quantization, folder)
    device, device_reason = select_device(config.device)
    if config.can_sleep and config.tensor_parallel_size == 1:
        make_releasable(device)
    config = config.with_device_defaults("cpu" if device.name == "cpu" else "cuda")
    config.verify()
    if config.batch_invariant and device.name == "cpu":
        raise ConfigError("--batch-invariant is for CUDA devices; on the CPU sums depend on the batch")
    ops = make_ops(device, batch_invariant=config.batch_invariant)
    adapters, max_lora_rank = make_catalog(config, model, device)
    accounts = Accounts()
    embedding = EmbeddingEngine(config, accounts)
    Partition(model, Rank(0, config.tensor_parallel_size))  # refused before anything is loaded
    if model.is_encoder:
        encoder_core, info = embedding.load_alone(model, ops, device_reason, progress)
        encoder = LoadedEngine(encoder_core, info, embedding.render_metrics, embedding.embedders, watch_gpu(device))
        return with_sleeper(encoder, config, device)
    for sentence in config.unused_speculative_hints:
        logger.warning("%s", sentence)
    drafter = make_drafter(config, model, ops)
    grammars = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)  # reads its tokenizer meanwhile
    embedding.load_beside(ops, progress)  # before the KV cache takes what memory is left
    ranks: ParallelRunner | None = None
    if config.tensor_parallel_size > 1:
        ranks = make_ranks(config, model, ops, progress)
        runner = ranks.first
        if not runner.generates:
            raise ConfigError("--tensor-parallel-size is for models that generate text, and this one has no head")
    else:
        runner = ModelRunner(config, model, device, ops, progress, max_lora_rank=max_lora_rank, drafter=drafter)
        embedding.add_decoder(model, runner)
    planes = ranks.planes if ranks is not None else runner.kv_cache.planes if runner.generates else []
    if drafter is not None:
        planes = [*planes, *drafter.kept_planes]
    tiers, tier_metrics = make_tiers(runner.config, device, planes, runner.dtype, config.served_name or folder.name)
    info = engine_info(
        runner,
        ranks,
        device_reason=device_reason,
        load_seconds=time.monotonic() - start,
        embeddings=embedding.infos,
        scorer=embedding.scorer,
        tiers=tiers,
        drafter=drafter,
    )
    if not runner.generates:
        grammars.close()
        only = EmbeddingOnlyCore()
        embedder = LoadedEngine(only, info, embedding.render_metrics, embedding.embedders, watch_gpu(device))
        return with_sleeper(embedder, config, device, runner.scratch)
    turns = Turns(config.served_name or folder.name, config.log_stalls)
    prefix_report = PrefixReport() if config.reports_prefixes else None
    timed = TimedRunner(runner if ranks is None else ranks, turns)
    core = EngineCore(
        config,
        timed,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=runner.num_kv_blocks,
        eos_token_ids=model.eos_token_ids,
        short_rope_len=runner.short_rope_len,
        grammars=grammars,
        metrics=EngineMetrics(config.served_name or folder.name),
        accounts=accounts,
        tiers=tiers,
        prefix_report=prefix_report,
        adapters=adapters,
        draft_limits=drafter.limits if drafter is not None else None,
        begin_draft=timed.timed(drafter.begin) if drafter is not None else None,
        reads=runner.decode_reads,
    )

    rank_metrics = None
    if ranks is not None:
        rank_metrics = RankMetrics(
            config.served_name or folder.name, ranks.rendezvous.states, ranks.weight_bytes, ranks.kv_cache_bytes
        )

    def render_metrics() -> bytes:
        offload = tier_metrics.render() if tier_metrics is not None else b""
        of_ranks = rank_metrics.render() if rank_metrics is not None else b""
        return core.render_metrics() + embedding.render_metrics() + offload + of_ranks

    engine = LoadedEngine(
        core,
        info,
        render_metrics,
        embedding.embedders,
        watch_gpu(device),
        turns,
        prefix_report=prefix_report,
        adapters=adapters,
        loads_adapters=config.allow_lora_loading,
        prepare_next=runner.capture_next,
    )
    if ranks is not None:
        return engine  # ranks sleep on none of their devices yet
    return with_sleeper(engine, config, device, runner.scratch, core.drop_kv_cache)


def with_sleeper(
    engine: LoadedEngine,
    config: EngineConfig,
    device: Device,
    scratch: Sequence[Buffer] = (),
    prepare: Callable[[], None] = lambda: None,
) -> LoadedEngine:
    """The engine, able to sleep where it shall be and the device can; `scratch` is memory that may be lost."""
    from tessera.engine.runner.memory.sleeper import make_sleeper

    sleeper = make_sleeper(device, scratch, engine.info.weight_bytes, prepare) if config.can_sleep else None
    if sleeper is None:
        return engine
    return replace(engine, info=msgspec.structs.replace(engine.info, sleep_bytes=sleeper.host_bytes), sleeper=sleeper)


def make_ranks(config: EngineConfig, model: ModelConfig, ops: Ops, progress: Progress) -> ParallelRunner:
    """Those that share a model, on the kind of device that `ops` is for. Raises: ConfigError."""
    if ops.device.name == "cpu":
        from tessera.engine.ranks.parallel_runner import make_cpu_runner

        return make_cpu_runner(config, model, progress)
    # Imported only here, so that a machine without the driver never loads its bindings.
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ranks.cuda_runner import make_cuda_runner

    assert isinstance(ops.device, CudaDevice), f"no ranks on {ops.device}"
    return make_cuda_runner(config, model, ops.device, ops, progress)


def engine_info(
    runner: ModelRunner,
    ranks: ParallelRunner | None = None,
    *,
    device_reason: str,
    load_seconds: float,
    embeddings: tuple[EmbeddingInfo, ...],
    scorer: ScorerInfo | None,
    tiers: KVTiers | None,
    drafter: DraftModel | None = None,
) -> EngineInfo:
    """The facts of a loaded decoder; `runner` is rank 0's where `ranks` share it."""
    from tessera.engine.gguf.model import stored_bytes
    from tessera.engine.models.weights.build import num_parameters

    config, model, device = runner.config, runner.model, runner.device
    return EngineInfo(
        device=device.name,
        device_name=getattr(device, "device_name", f"{os.cpu_count()} cores"),
        num_ranks=config.tensor_parallel_size,
        device_reason=device_reason,
        dtype=runner.dtype,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=runner.block_size,
        num_kv_blocks=runner.num_kv_blocks,
        kv_cache_bytes=runner.kv_cache_bytes if ranks is None else sum(ranks.kv_cache_bytes),
        kv_cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        num_host_kv_blocks=tiers.pool.num_slots if tiers is not None else 0,
        num_disk_kv_blocks=tiers.disk.max_blocks if tiers is not None and tiers.disk is not None else 0,
        weight_bytes=runner.weight_bytes if ranks is None else sum(ranks.weight_bytes),
        weight_offload=runner.weight_offload,
        num_parameters=runner.num_parameters if ranks is None else num_parameters(model),
        eos_token_ids=model.eos_token_ids,
        load_seconds=load_seconds,
        generates=runner.generates,
        speculates=config.speculation_settings is not None,
        draft=drafter.info if drafter is not None else None,
        embeddings=embeddings,
        scorer=scorer,
        stored_bytes=(runner.stored_bytes if ranks is None else ranks.stored_bytes) or stored_bytes(Path(config.model)),
        short_rope_len=runner.short_rope_len,
    )


def watch_gpu(device: Device) -> Callable[[], GpuUsage | None]:
    """-> a function that returns the device's use a few seconds ago."""
    if device.name == "cpu":
        return lambda: None
    from tessera.engine.cuda.inspection.nvml import UsageMonitor

    monitor = UsageMonitor()
    monitor.start()

    def usage() -> GpuUsage | None:
        latest = monitor.latest
        return GpuUsage(*latest) if latest is not None else None

    return usage
