"""What holds after every event of a history.

Fairness between keys is an invariant of the engine's own simulation, `tests/engine`; a bound that also holds across
restarts belongs here, in `check_core`.
"""

from __future__ import annotations

from tessera.engine.core.core import EngineCore
from tests.support.fakes.fake_tiers import check_tiers, check_tiers_quiet


def check_core(core: EngineCore) -> None:
    """Every block and every sequence of the engine is in one place, and each that was taken has ended or lives."""
    blocks, scheduler = core.block_manager, core.scheduler
    seated = [*scheduler.running, *scheduler.loading]
    tables = [sequence.block_table for sequence in seated]
    num_references = sum(map(len, tables))
    num_used = len({block for table in tables for block in table})
    assert len(blocks.free_blocks) + len(blocks.cached_blocks) + num_used == blocks.num_blocks, "a block is lost"
    assert sum(blocks.reference_counts) == num_references, "references are counted wrong"
    assert len(seated) <= scheduler.max_num_seqs
    num_live = len(core._sequences)
    assert num_live == len(seated) + len(scheduler.waiting), "a sequence is in no queue"
    num_ended = sum(core.metrics.num_finished.values())
    assert num_ended + num_live == core._num_arrivals, "a sequence ended twice, or never"
    if blocks.tiers is not None:
        check_tiers(blocks.tiers, blocks.published)


def check_quiet(core: EngineCore) -> None:
    """Nothing is left of requests that have ended."""
    check_core(core)
    assert not core._sequences
    assert core.block_manager.num_used_blocks == 0
    if core.block_manager.tiers is not None:
        check_tiers_quiet(core.block_manager.tiers)
