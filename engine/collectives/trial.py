"""A trial of ranks before they load weights."""

from __future__ import annotations

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.collectives import THREADS, most_at_once
from tessera.engine.ops.cuda.types import CHUNK
from tessera.engine.tensor import from_numpy


def try_sums(ranks: Collectives, device: CudaDevice, dtype: np.dtype[np.generic]) -> None:
    """A small sum and a large one, in each rank's thread.

    Raises: DeviceError where one is wrong: memory of other devices can be had, but has other contents.
    """
    for size in (THREADS, most_at_once(ranks.size) + CHUNK):
        x = from_numpy(np.full((1, size), ranks.index + 1, dtype), device)
        ranks.all_reduce(x)
        wrong = int(np.count_nonzero(x.numpy() != ranks.size * (ranks.size + 1) // 2))
        if wrong:
            raise DeviceError(
                f"{device.name} (rank {ranks.index}) gets {wrong} wrong sums of {size} over the ranks: the host "
                "connects the devices, but one does not read what another writes"
            )
