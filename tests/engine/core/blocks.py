"""Sequences for a block manager."""

from __future__ import annotations

from array import array

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.account import Account
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.sequence import Sequence
from tessera.engine.kv_tiers.prefix_report import PrefixReport

BLOCK_SIZE = 4


def make_sequence(token_ids: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r",
        client=b"c",
        account=Account(0),
        token_ids=array("i", token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=1),
        max_num_tokens=len(token_ids) + 1,
        stop_token_ids=frozenset(),
        arrival_number=0,
        arrival_time=0.0,
        prefix_salt=salt,
    )


def start(manager: BlockManager, token_ids: list[int], salt: bytes = b"") -> tuple[Sequence, int]:
    """Admit, compute and publish a whole sequence; -> it and the number of blocks it found."""
    sequence = make_sequence(token_ids, salt)
    shared = manager.match_prefix(sequence)
    manager.share(sequence, shared)
    assert manager.allocate(sequence, len(token_ids))
    manager.publish(sequence, len(token_ids))
    return sequence, len(shared)


def num_hits(manager: BlockManager, token_ids: list[int], salt: bytes = b"") -> int:
    return len(manager.match_prefix(make_sequence(token_ids, salt)))


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK_SIZE))


class Report(PrefixReport):
    """Keeps every change."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, bytes]] = []

    def note_stored(self, digest: bytes) -> None:
        self.changes.append(("stored", digest))

    def note_evicted(self, digest: bytes) -> None:
        self.changes.append(("evicted", digest))
