"""Device memory in which blocks that share a row's keys leave their results; allocated before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.tensor import Tensor, empty, float32, uint32

M = TypeVar("M")

MAX_SPLITS = 32  # of a decode row's keys
MIN_RESERVED_SPLITS = 8
RESERVED_BYTES = 128 << 20


def reserved_splits(max_num_seqs: int, num_heads: int, head_dim: int) -> int:
    """The most splits whose partial results fit into RESERVED_BYTES, within bounds."""
    fitting = RESERVED_BYTES // partial_bytes(max_num_seqs, num_heads, head_dim, 1)
    return min(max(fitting, MIN_RESERVED_SPLITS), MAX_SPLITS)


def partial_bytes(num_seqs: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Float32 outputs of all splits, and after them their maxima and sums."""
    return num_seqs * num_heads * splits * (head_dim + 2) * float32.itemsize


@dataclass(frozen=True)
class PrefillSplits:
    """Where the splits of tiles of prompts leave their results on sm_90a.

    Attributes:
        partials: float32, each block's outputs and after them maxima and sums.
        arrivals: uint32, counters of the warp groups that are done; every launch finds and leaves 0.
    """

    partials: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(cls, device: CudaDevice, block_floats: int, block_groups: int) -> PrefillSplits:
        """For any launch: a block for each multiprocessor with up to so many floats and warp groups.

        Raises: OutOfMemoryError.
        """
        partials = empty((device.multiprocessors * block_floats,), float32, device)
        arrivals = empty((device.multiprocessors * block_groups,), uint32, device)
        device.fill_bytes(arrivals.pointer, 0, arrivals.nbytes)
        return cls(partials, arrivals)


class AttentionMemory:
    """Memory of one device's attention kernels.

    Attributes:
        max_splits: of a decode row's keys.
        partials, arrivals: of decode rows; the counters are 0 before and after a launch.
        replaced: still in use by CUDA graphs that were captured before.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.max_splits = MAX_SPLITS
        self.partials: Tensor | None = None
        self.arrivals: Tensor | None = None
        self.replaced: tuple[Tensor, ...] = ()
        self._device = device
        self._prefill_splits: PrefillSplits | None = None
        self._shared: dict[type[Any], Any] = {}

    def reserve_decodes(self, max_num_seqs: int, num_heads: int, head_dim: int, max_splits: int | None = None) -> None:
        """Allocate what steps of up to `max_num_seqs` rows need, by default for as many splits as memory is spent on.

        Raises: OutOfMemoryError.
        """
        self.max_splits = max_splits or reserved_splits(max_num_seqs, num_heads, head_dim)
        self.decode_pointers(max_num_seqs, num_heads, head_dim)

    def decode_pointers(self, num_seqs: int, num_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Addresses of partial outputs, of partial sums and of counters of arrived blocks."""
        nbytes = partial_bytes(num_seqs, num_heads, head_dim, self.max_splits)
        if self.partials is None or self.partials.nbytes < nbytes:
            self._replace(self.partials)
            self.partials = empty((nbytes // float32.itemsize,), float32, self._device)
        if self.arrivals is None or self.arrivals.size < num_seqs * num_heads:
            self._replace(self.arrivals)
            self.arrivals = empty((num_seqs * num_heads,), uint32, self._device)
            self._device.fill_bytes(self.arrivals.pointer, 0, self.arrivals.nbytes)
        outputs = self.partials.pointer
        sums = outputs + num_seqs * num_heads * self.max_splits * head_dim * float32.itemsize
        return outputs, sums, self.arrivals.pointer

    def prefill_splits(self, block_floats: int, block_groups: int) -> PrefillSplits:
        """Allocated by the first call, for all: CUDA graphs keep its addresses."""
        if self._prefill_splits is None:
            self._check_not_capturing()
            self._prefill_splits = PrefillSplits.allocate(self._device, block_floats, block_groups)
        return self._prefill_splits

    def shared(self, kind: type[M], allocate: Callable[[CudaDevice], M]) -> M | None:
        """Of a kind of memory that all launches share; allocated by the first call, as CUDA graphs keep its addresses.

        None during a capture, if nothing has been allocated before.
        """
        if kind not in self._shared and not self._device.is_capturing:
            self._shared[kind] = allocate(self._device)
        found: M | None = self._shared.get(kind)
        return found

    def _replace(self, memory: Tensor | None) -> None:
        self._check_not_capturing()
        if memory is not None:
            self.replaced = (*self.replaced, memory)

    def _check_not_capturing(self) -> None:
        """CUDA graphs keep the addresses that they were captured with, and counters are cleared but once."""
        assert not self._device.is_capturing, "reserve_attention comes before a capture, for as many rows as it has"
