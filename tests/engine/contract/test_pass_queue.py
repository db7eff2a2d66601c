"""Work on the event loop: in turn by account, and so much in a pass as takes its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from tessera.engine.contract.passes.account_queue import AccountQueue
from tessera.engine.contract.passes.pass_queue import PassQueue


@dataclass
class Item:
    account_id: int
    name: str = ""


def test_accounts_take_turns_and_each_ones_items_keep_their_order() -> None:
    for most in (1, 2, 5, 7):
        queue: AccountQueue[Item] = AccountQueue()
        assert not queue
        queue.put(Item(account, name) for account, name in ((1, "a"), (1, "b"), (1, "c"), (2, "x"), (3, "m")))
        queue.put([Item(3, "n")])
        assert queue
        taken: list[str] = []
        while items := queue.take(most):
            assert len(items) == min(most, 6 - len(taken))
            taken += [item.name for item in items]
        assert taken == ["a", "x", "m", "b", "n", "c"]
        assert not queue


class Work:
    """Takes so many seconds of a clock for each piece; `by_pass` counts them by the loop's passes."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.queue: PassQueue[Item] = PassQueue(self._begin_item, 0.005, 2, 20, lambda: self.now)
        self.by_pass: Counter[int] = Counter()
        self.order: list[int] = []
        self._seconds = seconds
        self._pass = 0

    def ask(self, account_id: int) -> None:
        if self.queue.enter():
            self._begin(account_id)
        else:
            self.queue.put([Item(account_id)])

    def _begin_item(self, item: Item) -> bool:
        self._begin(item.account_id)
        return True

    def _begin(self, account_id: int) -> None:
        asyncio.get_running_loop().call_soon(self._run, account_id)

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
        begun: list[str] = []

        def begin(item: Item) -> bool:
            if item.name:
                begun.append(item.name)
            return item.name != ""

        queue: PassQueue[Item] = PassQueue(begin, 0.005, 1, 1)
        assert queue.enter()
        queue.put([Item(1)] * 5)
        queue.put([Item(1, "work")])
        await asyncio.sleep(0)
        assert begun
        for _ in range(4):
            await asyncio.sleep(0)
        assert not queue._has_pass
        assert queue.enter()
        assert not queue.enter()

    asyncio.run(scenario())
