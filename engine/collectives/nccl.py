"""Ranks on GPUs that do not see each other's memory: NCCL moves what they give one another, through the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.collectives.nccl_library import MAX, SUM, NcclCommunicator, NcclLibrary, UniqueId
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.collectives.trial import try_sums
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.collectives import launch_own_ids
from tessera.engine.tensor import Tensor, float32

logger = logging.getLogger("tessera.engine")


@dataclass
class NcclGroup:
    """One for all ranks.

    Attributes:
        communicators: of each rank, once it has joined.
    """

    rendezvous: Rendezvous
    library: NcclLibrary
    unique_id: UniqueId = field(init=False)
    communicators: list[NcclCommunicator | None] = field(init=False)

    def __post_init__(self) -> None:
        self.unique_id = self.library.unique_id()
        self.communicators = [None] * self.rendezvous.size
        self.rendezvous.on_failure = self.stop

    def stop(self) -> None:
        """End all kernels that wait, with errors."""
        for index, communicator in enumerate(self.communicators):
            self.communicators[index] = None
            if communicator is None:
                continue
            try:
                communicator.abort()
            except TesseraError as error:
                logger.error("rank %d: %s", index, error)

    def reports(self) -> list[str]:
        """Nothing: NCCL does not say what its kernels wait for."""
        return []


class NcclCollectives(Collectives):
    """The order of NCCL's sums is its own, the same for the same ranks and sizes; several ranks' sums of 16-bit numbers
    are rounded more than once."""

    def __init__(self, index: int, group: NcclGroup, device: CudaDevice) -> None:
        """To be called in each rank's thread; returns when all ranks have joined.

        Raises: DeviceError; RankError.
        """
        super().__init__(index, group.rendezvous)
        self._group, self._device = group, device
        self._columns: dict[int, list[tuple[int, int]]] = {}  # of each rank, by their number in all
        device.activate()
        self.wait_for_all()  # a rank that failed before this would leave the others in NCCL's call
        made = NcclCommunicator(group.library, group.unique_id, index, self.size, int(device.stream))
        group.communicators[index] = self._communicator = made

    def prepare(self, dtype: np.dtype[np.generic]) -> None:
        """Try it. Raises: DeviceError where sums are wrong."""
        self.wait_for_all()
        try_sums(self, self._device, dtype)
        self.wait_for_all()
        version = ".".join(map(str, self._group.library.version))
        logger.info("rank %d on %s sums with the others through NCCL %s", self.index, self._device.name, version)

    def all_reduce(self, x: Tensor) -> None:
        self._device.activate()
        self._communicator.all_reduce(x.pointer, x.size, x.dtype, SUM)

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        return False

    def gather_columns(self, x: Tensor, out: Tensor | None, *, first: int, whole: int) -> None:
        rows, width = x.shape
        columns = self._columns.get(whole)
        if columns is None:
            columns = self._columns[whole] = self.rendezvous.exchange(self.index, (first, width))
        self._device.activate()
        size = float32.itemsize
        with self._group.library.group():
            for row in range(rows):
                self._communicator.send(x.pointer + row * width * size, width, float32, 0)
                if out is None:
                    continue
                for rank, (begin, count) in enumerate(columns):
                    self._communicator.receive(out.pointer + (row * whole + begin) * size, count, float32, rank)

    def own_ids(self, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> Tensor:
        launch_own_ids(self._device, ids, sampled, first, out)
        return out

    def norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int, centred: bool) -> None:
        raise ConfigError("norms over the heads of several GPUs are not supported")

    def broadcast(self, x: Tensor) -> None:
        self._device.activate()
        self._communicator.broadcast(x.pointer, x.size, x.dtype)

    def all_reduce_max(self, x: Tensor) -> None:
        self._device.activate()
        self._communicator.all_reduce(x.pointer, x.size, x.dtype, MAX)
