"""KV blocks: those of a request whose client has left serve others at once."""

from __future__ import annotations

import random

import pytest

from tests.support.fakes.fake_runner import CLIENT, Harness

SEED = 5
FREED_WITHIN = 2  # steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fault_kv_life_cycle_an_abort_frees_all_blocks_within_two_steps(asynchronous: bool) -> None:
    """In the queue, in the prompt, and while tokens are generated; the others go on."""
    rng = random.Random(SEED)
    for number in range(30):
        engine = Harness(num_blocks=40, prefix_caching=False, max_num_seqs=3, asynchronous=asynchronous)
        for name in ("stays", "leaves", "waits"):
            engine.add(name, [rng.randrange(1, 90) for _ in range(rng.randint(1, 40))], 40, ignore_eos=True)
        for _ in range(rng.randrange(12)):
            engine.step()
        victim = rng.choice(("leaves", "waits"))
        engine.core.abort([victim], CLIENT)
        for _ in range(FREED_WITHIN):
            engine.step()
        alive = [sequence.request_id for sequence in engine.core.scheduler.running]
        held = sum(len(sequence.block_table) for sequence in engine.core.scheduler.running)
        assert victim not in alive, number
        assert engine.core.block_manager.num_used_blocks == held
        engine.run()
        assert engine.finish_reasons.keys() == {"stays", "leaves", "waits"} - {victim}
        assert engine.core.block_manager.num_used_blocks == 0
