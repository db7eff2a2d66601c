"""What ranks on GPUs of one host tell each other on the host: their boxes, and boards on which kernels report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.collectives import MAX_RANKS, Board, Meeting

PHASES = ("begin", "end")

Words = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass
class PeerGroup:
    """One for all ranks.

    Attributes:
        devices, boxes: of each rank, once it has joined; a box is an address in its device's memory.
        boards: words of the host's memory that each rank's kernels see; see `Board`.
    """

    rendezvous: Rendezvous
    devices: list[CudaDevice | None] = field(init=False)
    boxes: list[int] = field(init=False)
    boards: list[Words | None] = field(init=False)

    def __post_init__(self) -> None:
        size = self.rendezvous.size
        if size > MAX_RANKS:
            raise ConfigError(f"--tensor-parallel-size {size} is more than the {MAX_RANKS} GPUs that can share a model")
        self.devices, self.boxes, self.boards = [None] * size, [0] * size, [None] * size
        self.rendezvous.on_failure = self.stop

    def stop(self) -> None:
        """End all kernels that wait, with errors."""
        for board in self.boards:
            if board is not None:
                board[Board.STOP] = 1

    def reports(self) -> list[str]:
        """What kernels waited for in vain, a sentence for each rank that has such a one."""
        return [
            _report(rank, board) for rank, board in enumerate(self.boards) if board is not None and board[Board.LATE]
        ]


def _report(rank: int, board: Words) -> str:
    kind, phase = Meeting(int(board[Board.KIND])), PHASES[int(board[Board.PHASE])]
    wanted, seen = int(board[Board.WANTED]), int(board[Board.SEEN])
    return (
        f"block {board[Board.BLOCK]} of rank {rank}'s {kind.name.lower()} (meeting {wanted}) waited for rank "
        f"{board[Board.OTHER]} at its {phase}, which has come to meeting {seen}"
    )
