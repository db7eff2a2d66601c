"""Layers in host memory, as `--cpu-offload-gib` asks for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.machine import available_memory
from tessera.engine.contract.messages import OffloadInfo
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.offload.choice import LEAST_LAYERS, layers_beyond, layers_within, spread
from tessera.engine.models.offload.copies import ArrayCopies, LayerCopies
from tessera.engine.models.offload.host_layers import HostLayers
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.models.weights.build import layer_bytes
from tessera.engine.tensor import CpuDevice, Device, Tensor

logger = logging.getLogger("tessera.engine")

GIB = 2**30
AUTO = "auto"
AUTO_TOKENS = 16384  # of KV cache that `auto` leaves room for, where no --max-model-len says how many


def make_host_layers(
    config: EngineConfig, model: ModelConfig, dtype: np.dtype[Any], device: Device, room: Callable[[], int]
) -> HostLayers | None:
    """What takes layers while the weights load; None where all of them stay on the device.

    `room`: bytes of the device that layers may still take, beside the KV cache and buffers.
    """
    asked = config.cpu_offload_gib
    if asked is None or (asked == AUTO and isinstance(device, CpuDevice)):
        return None
    if asked != AUTO and float(asked) == 0:
        return None
    estimates = layer_bytes(model, dtype)

    def choose(first_layer: int) -> Sequence[int]:
        sizes = [estimate * first_layer // estimates[0] for estimate in estimates]
        if asked == AUTO:
            chosen = layers_beyond(room() + first_layer, sizes)
        else:
            chosen = layers_within(int(float(asked) * GIB), sizes)
            _check_count(chosen, sizes, asked)
        return _within_memory(chosen, sizes)

    return HostLayers(device, choose, lambda slots: _make_copies(device, slots))


def offload_info(stream: LayerStream, model: ModelConfig) -> OffloadInfo:
    """The facts of layers in host memory; measures the copies."""
    return OffloadInfo(
        num_layers=len(stream.indices),
        num_all_layers=model.num_layers,
        nbytes=stream.nbytes,
        copy_seconds=stream.measure_seconds(),
    )


def _check_count(chosen: Sequence[int], sizes: Sequence[int], asked: str) -> None:
    """Raises: ConfigError where so few layers free no memory."""
    if len(chosen) >= LEAST_LAYERS:
        return
    if len(sizes) < LEAST_LAYERS:
        raise ConfigError(
            f"--cpu-offload-gib needs a model of at least {LEAST_LAYERS} layers; this one has {len(sizes)}"
        )
    least = sum(sizes[index] for index in spread(LEAST_LAYERS, len(sizes))) / GIB
    raise ConfigError(
        f"--cpu-offload-gib {asked} holds {len(chosen)} of this model's layers, and fewer than {LEAST_LAYERS} free no "
        f"memory, as {LEAST_LAYERS - 1} are on the device at a time: pass {math.ceil(100 * least) / 100:g} or more"
    )


def _within_memory(chosen: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    """Fewer layers, with a line in the log, where the machine has not the memory."""
    available = available_memory()
    wanted = sum(sizes[index] for index in chosen)
    if available is None or wanted <= available:
        return chosen
    fewer = layers_within(available, sizes)
    fewer = fewer if len(fewer) >= LEAST_LAYERS else ()
    logger.warning(
        "%d layers are kept in host memory, not %d: only %.1f GiB of the %.1f GiB for them are available",
        *(len(fewer), len(chosen), available / GIB, wanted / GIB),
    )
    return fewer


def _make_copies(device: Device, slots: Sequence[Tensor]) -> LayerCopies:
    if isinstance(device, CpuDevice):
        return ArrayCopies(device, slots)
    from tessera.engine.cuda.copies.layer_copies import CudaLayerCopies
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), f"no copies for {device}"
    return CudaLayerCopies(device, slots)
