"""A model whose weights several GPUs of one host share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import permutations

from tessera.engine.collectives.cuda import CudaCollectives
from tessera.engine.collectives.nccl import NcclCollectives, NcclGroup
from tessera.engine.collectives.nccl_library import NcclLibrary
from tessera.engine.collectives.peers import PeerGroup
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, RankError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import find_device, sees_memory
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.partition import Partition, Rank
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.make import make_ops
from tessera.engine.ranks.parallel_runner import RANK_TIMEOUT, ParallelRunner, end_process, noted
from tessera.engine.runner.model_runner import GIB, ModelRunner, Progress, resolve_dtype

logger = logging.getLogger("tessera.engine")


def make_cuda_runner(
    config: EngineConfig,
    model: ModelConfig,
    device: CudaDevice,
    ops: Ops,
    progress: Progress | None = None,
    on_hang: Callable[[RankError], None] | None = None,
) -> ParallelRunner:
    """Ranks on the first GPUs, of which `device` with its `ops` is rank 0's.

    Where they do not see each other's memory, NCCL moves what they give one another.

    Raises: ConfigError where they are too few, lack an operation, or need NCCL, which is not installed; ModelError.
    """
    size = config.tensor_parallel_size
    option = f"--tensor-parallel-size {size}"
    Partition(model, Rank(0, size))  # refused before threads begin
    for other, given in (
        ("--kv-offload-gib", config.kv_offload_gib is not None),
        ("--sleep-host-gib", config.can_sleep),
    ):
        if given:
            raise ConfigError(f"{option} on GPUs cannot be used with {other}")
    attentions = [layer.attention for layer in model.layers]
    if any(attention.qk_norm is not None and attention.qk_norm_form == "width" for attention in attentions):
        raise ConfigError(f"{option} on GPUs: norms over all heads together, which this model has, are not supported")
    for index in range(1, size):
        found = find_device(index)
        if not found.usable:
            raise ConfigError(f"{option} needs {size} GPUs: {found.reason}")
    rendezvous = Rendezvous(size, RANK_TIMEOUT, on_hang or end_process)
    group: PeerGroup | NcclGroup
    if all(sees_memory(index, other) for index, other in permutations(range(size), 2)):
        group = PeerGroup(rendezvous)
    else:
        group = NcclGroup(rendezvous, _nccl(option))

    def make(index: int) -> ModelRunner:
        own = device if index == 0 else CudaDevice(index)
        own_ops = ops if index == 0 else make_ops(own, batch_invariant=config.batch_invariant)
        ranks = (
            CudaCollectives(index, group, own) if isinstance(group, PeerGroup) else NcclCollectives(index, group, own)
        )
        ranks.prepare(resolve_dtype(config, model, own))
        runner = ModelRunner(config, model, own, own_ops, noted(rendezvous, index, progress), ranks)
        if isinstance(ranks, CudaCollectives):
            ranks.starting = False
        rendezvous.states[index].stage = "a step"
        logger.info(
            "rank %d is ready: %.2f GiB of weights, %.2f GiB of KV cache, %.2f GiB of its device free",
            index,
            runner.weight_bytes / GIB,
            runner.kv_cache_bytes / GIB,
            own.free_memory() / GIB,
        )
        return runner

    return ParallelRunner(rendezvous, make, group.reports)


def _nccl(option: str) -> NcclLibrary:
    """Raises: ConfigError."""
    try:
        library = NcclLibrary()
    except ConfigError as error:
        raise ConfigError(
            f"{option}: these GPUs do not see each other's memory (no NVLink, and no peer access over PCIe). {error}"
        ) from error
    logger.warning("GPUs do not see each other's memory (no NVLink, and no peer access over PCIe): ranks use NCCL")
    return library
