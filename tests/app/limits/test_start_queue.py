"""Requests start on the event loop in turn by account, however many arrive together."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from starlette.types import Receive, Scope, Send

from tessera.app.http.limits import StartMiddleware
from tessera.app.keys.key_ring import KeyHolder
from tessera.app.limits.start_queue import MAX_STARTS, MAX_STARTS_ALONE, StartQueue
from tessera.engine.contract.messages import AccountRef

HEAVY, LIGHT = "10.0.0.1", "10.9.9.9"


class Starts:
    """An application behind the middleware, which notes what starts in which pass of the loop."""

    def __init__(self, ring: Any = None) -> None:
        self.clients: list[tuple[str, int]] = []
        self.scopes: list[Scope] = []  # of all requests
        self.by_pass: Counter[int] = Counter()
        self._pass = 0
        self._num_requests = 0
        self._middleware = StartMiddleware(self._app, ring)

    @property
    def num_passes(self) -> int:
        return self._pass

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.clients]

    def request(
        self, address: str, method: str = "POST", path: str = "/v1/completions", key: bytes = b""
    ) -> asyncio.Task[None]:
        headers = [(b"x-api-key", key)]
        client = (address, self._num_requests)
        scope = {"type": "http", "method": method, "path": path, "client": client, "headers": headers}
        self._num_requests += 1
        self.scopes.append(scope)
        return asyncio.ensure_future(self._middleware(scope, self._none, self._none))

    async def run(self, *tasks: asyncio.Task[None]) -> None:
        ticks = asyncio.ensure_future(self._count_passes())
        await asyncio.gather(*tasks, return_exceptions=True)
        ticks.cancel()

    async def _count_passes(self) -> None:
        while True:
            self._pass += 1
            await asyncio.sleep(0)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.clients.append(scope["client"])
        self.by_pass[self._pass] += 1

    async def _none(self, *arguments: Any) -> Any:
        raise AssertionError("nothing is sent or received")


def test_fault_fairness_hundreds_of_requests_that_arrive_together_do_not_hold_up_another_keys() -> None:
    async def main() -> None:
        starts = Starts()
        await starts.run(*(starts.request(HEAVY) for _ in range(300)), starts.request(LIGHT))
        assert starts.addresses.index(LIGHT) <= 2 * MAX_STARTS, "behind those that came before it, and one in its turn"
        assert Counter(starts.addresses) == {HEAVY: 300, LIGHT: 1}
        first, second, *later = (starts.by_pass[number] for number in sorted(starts.by_pass))
        assert first == second == MAX_STARTS, "there is another key"
        assert MAX_STARTS < max(later) <= MAX_STARTS_ALONE, "its request has ended"

    asyncio.run(main())


def test_where_one_account_has_requests_more_of_them_start_in_a_pass() -> None:
    async def main() -> None:
        starts = Starts()
        await starts.run(*(starts.request(HEAVY) for _ in range(5 * MAX_STARTS_ALONE)))
        assert MAX_STARTS < max(starts.by_pass.values()) <= MAX_STARTS_ALONE

    asyncio.run(main())


def test_accounts_start_in_turn_and_each_ones_requests_in_order() -> None:
    async def main() -> None:
        starts = Starts()
        addresses = [f"10.0.0.{number}" for number in range(28) for _ in range(16)]
        await starts.run(*map(starts.request, addresses), starts.request(LIGHT))
        begun = MAX_STARTS
        assert len(set(starts.addresses[begun : begun + 20])) == 20, "one of each other key's"
        assert [port for address, port in starts.clients if address == addresses[-1]] == [*range(432, 448)]
        assert sorted(starts.addresses) == sorted([*addresses, LIGHT])

    asyncio.run(main())


def test_a_request_that_comes_alone_starts_at_once_and_the_loop_sleeps_afterwards() -> None:
    async def main() -> None:
        starts = Starts()
        for method in ("POST", "GET", "POST"):
            task = starts.request(LIGHT, method)
            await asyncio.sleep(0)
            assert task.done()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        assert not asyncio.all_tasks() - {asyncio.current_task()}

    asyncio.run(main())


def test_fault_fairness_hundreds_of_scrapes_that_arrive_together_do_not_hold_up_others() -> None:
    async def main() -> None:
        starts = Starts()
        await starts.run(*(starts.request(HEAVY, "GET", "/metrics") for _ in range(240)), starts.request(LIGHT))
        assert starts.addresses.index(LIGHT) <= 2 * MAX_STARTS
        assert max(starts.by_pass.values()) <= MAX_STARTS_ALONE

    asyncio.run(main())


def test_a_request_that_ends_while_it_waits_leaves_its_place_to_others() -> None:
    async def main() -> None:
        starts = Starts()
        tasks = [starts.request(HEAVY) for _ in range(MAX_STARTS + 1026)]
        await asyncio.sleep(0)
        for task in tasks[MAX_STARTS:-10]:
            task.cancel()
        await starts.run(*tasks)
        assert [port for _, port in starts.clients[:MAX_STARTS]] == [*range(MAX_STARTS)]
        assert [port for _, port in starts.clients[-10:]] == [*range(MAX_STARTS + 1016, MAX_STARTS + 1026)]
        assert starts.num_passes <= 8, "those that have left take no pass"
        await asyncio.sleep(0)
        await starts.request(LIGHT)
        assert starts.addresses[-1] == LIGHT

    asyncio.run(main())


def test_a_pass_of_one_takes_no_room_from_those_that_come_later() -> None:
    async def main() -> None:
        starts = Starts()
        await starts.run(*(starts.request(HEAVY) for _ in range(MAX_STARTS + 1)))
        await asyncio.sleep(0)
        later = [starts.request(LIGHT) for _ in range(MAX_STARTS)]
        await asyncio.sleep(0)
        assert all(task.done() for task in later)

    asyncio.run(main())


def test_an_account_whose_requests_have_ended_bounds_nobody() -> None:
    async def main() -> None:
        queue, order = StartQueue(), []

        async def request(account: int) -> None:
            async with queue.request(account):
                order.append(account)
                await asyncio.sleep(0)

        await asyncio.gather(*(request(1) for _ in range(3)), request(2))
        assert not queue._under_way, "nothing is kept of accounts without requests"
        assert not queue._queue.is_shared, "one account alone has more in a pass"
        async with queue.request(1):
            async with queue.request(2):
                assert queue._queue.is_shared
            assert not queue._queue.is_shared
            async with queue.request(2):
                async with queue.request(3):
                    pass
                assert queue._queue.is_shared, "two are left"

    asyncio.run(main())


def test_keys_take_turns_wherever_their_clients_are() -> None:
    holders = {name: KeyHolder(name.decode(), "", None, AccountRef(number)) for number, name in enumerate((b"a", b"b"))}

    async def main() -> None:
        starts = Starts(SimpleNamespace(find=holders.get))
        heavy = [starts.request(f"10.0.0.{number}", key=b"a") for number in range(100)]
        await starts.run(*heavy, starts.request("10.0.0.1", key=b"b"), starts.request(LIGHT, key=b"unknown"))
        ports = [port for _, port in starts.clients]
        assert ports.index(100) <= 2 * MAX_STARTS
        assert ports.index(101) <= 2 * MAX_STARTS, "by its address"

    asyncio.run(main())


def test_the_wait_counts_in_the_time_of_a_request() -> None:
    async def main() -> None:
        starts = Starts()
        tasks = [starts.request(HEAVY) for _ in range(3 * MAX_STARTS)]
        await asyncio.sleep(0)
        assert len(starts.clients) == MAX_STARTS
        assert all("trace" in scope["state"] for scope in starts.scopes)
        await starts.run(*tasks)

    asyncio.run(main())


def test_only_requests_have_to_wait() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(scope)

    asyncio.run(StartMiddleware(app)({"type": "lifespan"}, Starts()._none, Starts()._none))
    assert seen == [{"type": "lifespan"}]


def test_a_request_that_is_cut_off_while_it_waits_says_so_itself() -> None:
    """At the end of the time for the drain: what is within the queue has the words for it."""
    cut_off: list[int] = []

    async def main() -> None:
        queue = StartQueue()

        async def request(number: int) -> None:
            async with queue.request(1):
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    cut_off.append(number)

        tasks = [asyncio.ensure_future(request(number)) for number in range(MAX_STARTS + 3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert sorted(cut_off) == [*range(MAX_STARTS + 3)]
