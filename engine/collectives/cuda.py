"""Ranks on GPUs of one host that see each other's memory: kernels that meet there, without the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig, P
from tessera.engine.ops.cuda.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_PARTS,
    BOX_BYTES,
    BROADCAST,
    GATHER_COLUMNS,
    MAX_RANKS,
    MOST_AT_ONCE,
    OWN_IDS,
    THREADS,
    AllReduceParams,
    AllReducePartsParams,
    BroadcastParams,
    GatherColumnsParams,
    OwnIdsParams,
    instantiations,
    meeting_config,
)
from tessera.engine.ops.cuda.types import CHUNK, ceil_div, cuda_type
from tessera.engine.tensor import Tensor, empty, from_numpy, uint8, uint64

STEP_PATIENCE = 4.0  # seconds that a kernel waits for another rank's before it ends the device's work with an error
START_PATIENCE = 600.0  # while ranks load and compile


@dataclass
class PeerGroup:
    """What ranks tell each other on the host when they start."""

    rendezvous: Rendezvous
    devices: list[CudaDevice | None] = field(init=False)
    boxes: list[int] = field(init=False)
    numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        size = self.rendezvous.size
        if size > MAX_RANKS:
            raise ConfigError(f"--tensor-parallel-size {size} is more than the {MAX_RANKS} GPUs that can share a model")
        self.devices, self.boxes, self.numbers = [None] * size, [0] * size, [0] * size


class CudaCollectives(Collectives):
    """Small sums in one shot, by way of boxes that all ranks read; large ones in two, by writing to all ranks.

    Attributes:
        starting: while ranks load, a kernel waits longer for others; not in a CUDA graph.
    """

    def __init__(self, index: int, group: PeerGroup, device: CudaDevice) -> None:
        """To be called in each rank's thread; returns when the ranks see each other's memory.

        Raises: ConfigError where a device cannot see another's; RankError.
        """
        self.index, self.size = index, group.rendezvous.size
        self.starting = True
        self._group, self._device = group, device
        self._box = empty((BOX_BYTES,), uint8, device)
        device.fill_bytes(self._box.pointer, 0, BOX_BYTES)
        device.synchronize()
        group.devices[index], group.boxes[index] = device, self._box.pointer
        self._wait()
        for other in group.devices:
            if other is not None and other is not device:
                device.see_memory_of(other)
        self._boxes = from_numpy(np.array(group.boxes, uint64), device)
        self._wait()

    def compile(self, dtype: np.dtype[np.generic]) -> None:
        """What a model in `dtype` launches."""
        self._device.compile(instantiations((cuda_type(dtype),)))

    def all_reduce(self, x: Tensor) -> None:
        self._all_reduce(x, None)

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> bool:
        if x.size > MOST_AT_ONCE:
            return False
        self._all_reduce(x, residual)
        return True

    def _all_reduce(self, x: Tensor, residual: Tensor | None) -> None:
        dtype, config = cuda_type(x.dtype), meeting_config(x.size, CHUNK)
        if x.size <= MOST_AT_ONCE:
            adds = "false" if residual is None else "true"
            params = AllReduceParams(x, residual, self._boxes, x.size, self.index, self.size, self._patience)
            self._launch(ALL_REDUCE, (dtype, adds), config, params)
            return
        parts = AllReducePartsParams(x, self._boxes, x.size, self.index, self.size, self._patience)
        self._launch(ALL_REDUCE_PARTS, (dtype,), config, parts)

    def gather_columns(self, x: Tensor, out: Tensor | None, *, first: int, whole: int) -> None:
        rows, width = x.shape
        params = GatherColumnsParams(
            x, out, self._boxes, rows, width, whole, first, self.index, self.size, self._patience
        )
        self._launch(GATHER_COLUMNS, (), meeting_config(rows * whole // self.size), params)

    def own_ids(self, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> Tensor:
        config = LaunchConfig((ceil_div(ids.size, THREADS), 1, 1), (THREADS, 1, 1))
        self._launch(OWN_IDS, (), config, OwnIdsParams(ids, sampled, out, ids.size, first))
        return out

    def norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int, centred: bool) -> None:
        raise ConfigError("norms over the heads of several GPUs are not supported")

    def broadcast(self, x: Tensor) -> None:
        params = BroadcastParams(x, self._boxes, x.size, self.index, self.size, self._patience)
        self._launch(BROADCAST, (), meeting_config(1), params)

    def least(self, value: int) -> int:
        self._group.numbers[self.index] = value
        self._wait()
        found = min(self._group.numbers)
        self._wait()
        return found

    @property
    def _patience(self) -> int:
        """In nanoseconds."""
        patient = self.starting and not self._device.is_capturing
        return int((START_PATIENCE if patient else STEP_PATIENCE) * 1e9)

    def _launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        self._device.launch(spec, template, config, params)

    def _wait(self) -> None:
        self._group.rendezvous.wait(self.index, patient=True)
