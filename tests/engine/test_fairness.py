"""Accounts share the engine: bounds on what one may be served more than another, and on how long one waits."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tessera.engine.contract.messages import AccountRef
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.slot_table import ScheduledStep
from tessera.engine.core.takeover import MAX_LAG
from tests.support.fake_runner import NON_FINITE, Harness

HEAVY, LIGHT = AccountRef(1), AccountRef(2)


class World:
    """An engine on which accounts always have sequences waiting, and what each was served, per weight."""

    def __init__(self, rng: random.Random, accounts: list[AccountRef], *, asynchronous: bool = False) -> None:
        self.max_num_seqs = rng.randint(2, 12)
        self.max_step = rng.choice([self.max_num_seqs, 24, 64])
        self.longest = rng.choice([20, 60, 120])
        self.engine = Harness(
            num_blocks=rng.choice([40, 80, 300]),
            block_size=rng.choice([4, 8]),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_step, self.max_num_seqs),
            max_queue_len=10_000,
            max_model_len=160,
            prefix_caching=rng.random() < 0.7,
            asynchronous=asynchronous,
        )
        schedule = self.engine.core.scheduler.schedule

        def counted(now: float) -> ScheduledStep | None:
            step = schedule(now)
            if step is not None:
                self._count(step)
            return step

        self.engine.core.scheduler.schedule = counted  # type: ignore[method-assign]
        self.rng = rng
        self.accounts = accounts
        self.served: defaultdict[int, float] = defaultdict(float)
        self._computed: defaultdict[Sequence, int] = defaultdict(int)
        self._names = 0
        self._weights = {account.id: account.weight for account in accounts}
        self._habits = {
            account.id: (rng.randint(1, self.longest), rng.randint(1, self.longest)) for account in accounts
        }

    def top_up(self) -> None:
        waiting = {account.id: account.num_waiting for account in self.engine.core.accounts.active.values()}
        for account in self.accounts:
            for _ in range(3 - waiting.get(account.id, 0)):
                most_prompt, most_tokens = self._habits[account.id]
                prompt = [self.rng.randrange(1, NON_FINITE) for _ in range(self.rng.randint(1, most_prompt))]
                self._names += 1
                self.engine.add(
                    f"r{self._names}", prompt, self.rng.randint(1, most_tokens), account=account, ignore_eos=True
                )

    def step(self) -> None:
        before = {sequence: sequence.num_tokens for sequence in self.engine.core._sequences.values()}
        self.engine.step()
        for sequence, num_tokens in before.items():
            self._serve(sequence.account.id, sequence.num_tokens - num_tokens)

    def _count(self, step: ScheduledStep) -> None:
        """What a step computes is its account's; what it computes again, that of the account that took its place."""
        for sequence, count in zip(step.sequences, step.num_scheduled_tokens, strict=True):
            fresh = min(max(sequence.num_computed_tokens - self._computed[sequence], 0), count)
            self._computed[sequence] += fresh
            self._serve(sequence.account.id, fresh)
            if sequence.displaced_by is not None:
                self._serve(sequence.displaced_by.id, count - fresh)

    def _serve(self, account_id: int, cost: float) -> None:
        self.served[account_id] += cost / self._weights[account_id]


@pytest.mark.parametrize("seed", range(40))
def test_accounts_with_work_waiting_are_served_equally_for_their_weights(seed: int) -> None:
    """As the theorems of deficit round robin and of the virtual token counter have it: within a bound that does not
    grow with time."""
    rng = random.Random(seed)
    accounts = [AccountRef(number, rng.choice([1.0, 1.0, 2.0])) for number in range(1, rng.randint(3, 7))]
    world = World(rng, accounts, asynchronous=seed % 2 == 1)
    bound = 2 * (MAX_LAG + 2 * world.engine.core.scheduler.max_num_batched_tokens)
    for _ in range(1500):
        world.top_up()
        world.step()
        shares = [world.served[account.id] for account in accounts]
        assert max(shares) - min(shares) <= bound, f"seed {seed}: {shares}"
