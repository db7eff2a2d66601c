"""The tiers that a configuration asks for. What cannot be had is left out, with a line in the log."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tessera import __version__
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import DeviceError
from tessera.engine.contract.machine import available_memory
from tessera.engine.gguf.names import split_paths
from tessera.engine.kv_tiers.array_copies import ArrayCopies
from tessera.engine.kv_tiers.block_files import HEADER_BYTES, BlockFiles
from tessera.engine.kv_tiers.copies import BlockCopies
from tessera.engine.kv_tiers.disk_tier import DiskTier
from tessera.engine.kv_tiers.metrics import TierMetrics
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.tensor import CpuDevice, Device, Tensor

logger = logging.getLogger("tessera.engine")

GIB = 2**30
DEFAULT_DISK_GIB = 100.0


def make_tiers(
    config: EngineConfig, device: Device, planes: Sequence[Tensor], dtype: str, name: str
) -> tuple[KVTiers | None, TierMetrics | None]:
    """Tiers for the KV cache `planes`, each [num_blocks, ...], and their metrics.

    None and None if none are asked for; metrics alone if no memory can be had. `name`: the model's, in metrics and in
    the folder's name.
    """
    if config.kv_offload_gib is None or not planes:
        return None, None
    metrics = TierMetrics(name)
    slot_bytes = sum(plane.nbytes // plane.shape[0] for plane in planes)
    num_slots = int(config.kv_offload_gib * GIB) // slot_bytes
    try:
        copies = _make_copies(device, planes, num_slots, num_slots * slot_bytes)
    except (DeviceError, MemoryError) as error:
        logger.warning("no KV blocks are kept in host memory, --kv-offload-gib %g: %s", config.kv_offload_gib, error)
        metrics.failures["memory"] += 1
        metrics.gauges = lambda: {"up": {"host": 0}}
        return None, metrics
    disk = _make_disk(config, device, slot_bytes, dtype, name, metrics)
    return KVTiers(copies, disk=disk, metrics=metrics), metrics


def _make_copies(device: Device, planes: Sequence[Tensor], num_slots: int, nbytes: int) -> BlockCopies:
    """Raises: DeviceError, MemoryError."""
    if num_slots < 1:
        raise MemoryError("a block is larger")
    available = available_memory()
    if available is not None and nbytes > available:
        raise MemoryError(f"only {available / GIB:.1f} GiB are available")
    if isinstance(device, CpuDevice):
        return ArrayCopies(device, planes, num_slots)
    from tessera.engine.cuda.copies.block_copies import CudaBlockCopies
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no copies for {device}"
    return CudaBlockCopies(device, planes, num_slots)


def _make_disk(
    config: EngineConfig, device: Device, slot_bytes: int, dtype: str, name: str, metrics: TierMetrics
) -> DiskTier | None:
    if config.kv_offload_dir is None:
        return None
    share = DEFAULT_DISK_GIB if config.kv_offload_disk_gib is None else config.kv_offload_disk_gib
    model = Path(config.model).resolve()
    place = hashlib.sha256(f"{model}\n{config.block_size}\n{dtype}\n{config.kv_cache_dtype}".encode()).hexdigest()[:12]
    folder = Path(config.kv_offload_dir) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.') or 'model'}-{place}"
    try:
        files = BlockFiles(folder, form_of(config, device, slot_bytes, dtype))
    except OSError as error:
        reason = "another server uses it" if isinstance(error, BlockingIOError) else str(error)
        logger.warning("no KV blocks are kept on disk, in %s: %s", folder, reason)
        metrics.failures["disk_open"] += 1
        return None
    return DiskTier(files, max(int(share * GIB) // (slot_bytes + HEADER_BYTES), 1), metrics=metrics)


def form_of(config: EngineConfig, device: Device, slot_bytes: int, dtype: str) -> str:
    """A digest of all that the bytes of a KV block depend on: weights, kernels, dtype, sizes.

    Weights are told apart by their files' names, sizes and times.
    """
    described = _describe_files(Path(config.model))
    settings = config.speculation_settings
    if settings is not None and settings.reads_states:  # what the model leaves for a head is in the blocks
        described += [settings.method, *(_describe_files(Path(settings.model)) if settings.model else ())]
    kernels = getattr(device, "arch", "cpu")
    facts = [
        __version__,
        kernels,
        config.batch_invariant,
        config.load_format,
        config.quantization,
        config.seed if config.load_format == "dummy" else None,
        dtype,
        config.kv_cache_dtype,
        config.block_size,
        slot_bytes,
        *([config.tensor_parallel_size] if config.tensor_parallel_size > 1 else []),
        *([config.prompt_activations] if config.prompt_activations != "16bit" else []),
    ]
    return hashlib.sha256("\n".join([*described, repr(facts)]).encode()).hexdigest()


def _describe_files(model: Path) -> list[str]:
    files = split_paths(model) if model.is_file() else [path for path in model.iterdir() if path.is_file()]
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(files)]
