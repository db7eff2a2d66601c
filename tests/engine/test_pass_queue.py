"""Work on the event loop: in turn by account, and so much in a pass as takes its time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tessera.engine.contract.passes.account_queue import AccountQueue
from tessera.engine.contract.passes.pass_queue import PassQueue


def test_accounts_take_turns_and_each_ones_items_keep_their_order() -> None:
    queue: AccountQueue[str] = AccountQueue()
    assert not queue
    for account, item in ((1, "a"), (1, "b"), (1, "c"), (2, "x"), (3, "m"), (3, "n")):
        queue.put(account, item)
    assert queue
    assert [queue.take() for _ in range(6)] == ["a", "x", "m", "b", "n", "c"]
    with pytest.raises(KeyError):
        queue.take()


class Work:
    """Takes so many seconds of a clock for each piece; `by_pass` counts them by the loop's passes."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.queue: PassQueue[int] = PassQueue(self._begin, 0.005, 2, 20, lambda: self.now)
        self.by_pass: Counter[int] = Counter()
        self.order: list[int] = []
        self._seconds = seconds
        self._pass = 0

    def ask(self, account_id: int) -> None:
        if self.queue.enter():
            self._begin(account_id)
        else:
            self.queue.put(account_id, account_id)

    def _begin(self, account_id: int) -> bool:
        asyncio.get_running_loop().call_soon(self._run, account_id)
        return True

    def _run(self, account_id: int) -> None:
        self.now += self._seconds
        self.by_pass[self._pass] += 1
        self.order.append(account_id)

    async def run(self, num_passes: int) -> list[int]:
        for _ in range(num_passes):
            await asyncio.sleep(0)
            self.now += 1.0  # of others' work
            self._pass += 1
        return [count for _, count in sorted(self.by_pass.items())]


def test_a_pass_has_as_much_as_takes_its_time() -> None:
    async def scenario(seconds: float) -> list[int]:
        work = Work(seconds)
        for _ in range(400):
            work.ask(1)
        return await work.run(250)

    for seconds, expected in ((0.0, 20), (0.0005, 10), (0.001, 5), (0.1, 2)):
        first, *others = asyncio.run(scenario(seconds))
        assert first == 2, "nothing is known of them yet"
        assert abs(max(others) - expected) <= 1, (seconds, others)
        assert sum(others) == 398


def test_where_others_wait_as_well_a_pass_has_the_least() -> None:
    async def scenario() -> list[int]:
        work = Work(0.0)
        for account in (*(1 for _ in range(100)), 2):
            work.ask(account)
        await work.run(10)
        work.queue.is_shared = True
        counts = await work.run(30)
        assert work.order.index(2) <= 4, "in its turn"
        return counts

    counts = asyncio.run(scenario())
    assert max(counts[:10]) > 4
    assert set(counts[11:-1]) == {2}


def test_what_has_nothing_to_do_any_more_takes_no_place_and_the_loop_sleeps_afterwards() -> None:
    async def scenario() -> None:
        begun: list[int] = []

        def begin(item: int) -> bool:
            if item:
                begun.append(item)
            return item > 0

        queue: PassQueue[int] = PassQueue(begin, 0.005, 1, 1)
        assert queue.enter()
        for item in (0, 0, 0, 0, 0, 1):
            queue.put(1, item)
        await asyncio.sleep(0)
        assert begun
        for _ in range(4):
            await asyncio.sleep(0)
        assert not queue._has_pass
        assert queue.enter()
        assert not queue.enter()

    asyncio.run(scenario())
