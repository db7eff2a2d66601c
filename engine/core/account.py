"""Accounts: how much of the engine each key has used, so that those with work waiting get equal shares.

Virtual time as in weighted fair queueing, over tokens, as the virtual token counter of Sheng et al. 2024 ("Fairness in
Serving Large Language Models", arXiv 2401.00588): an account's `service` grows by the cost of what is computed for it,
divided by its weight, and the account with the least is served next. One that comes back after a pause starts level
with the least of those that have work, so that a pause saves nothing up, and keeps what it is ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.engine.contract.errors import QueueFullError
from tessera.engine.contract.messages import AccountRef

if TYPE_CHECKING:
    from tessera.engine.core.sequence import Sequence

# Costs in computed tokens. A sampled token costs as much as one that is computed, and the same again where its
# log-probabilities are reported or a mask is made for it. Grammars are charged for the time that they took to compile.
SAMPLED_COST = 1.0
LOGPROBS_COST = 1.0
CONSTRAINT_COST = 1.0
SCORED_PROMPT_TOKEN_COST = 2.0
COST_PER_COMPILE_SECOND = 1000.0

MAX_OVERFILL = 4  # a queue is never longer than so many times its length
MAX_IDLE_ACCOUNTS = 4096  # remembered because they are ahead; the least ahead are forgotten first


class Lane:
    """An account's sequences of one rank, each list in order of (priority, arrival).

    Attributes:
        num_passed_over: admissions in a row that went before an older sequence of the lane.
    """

    __slots__ = ("account", "num_passed_over", "rank", "running", "waiting")

    def __init__(self, account: Account, rank: int) -> None:
        self.account = account
        self.rank = rank
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_passed_over = 0

    @property
    def turn(self) -> tuple[int, float]:
        """Sort key: the first is served first."""
        return self.rank, self.account.service


class Account:
    """One key's use of the engine.

    Attributes:
        service: cost of what was computed for it so far, divided by `weight`.
        num_live: requests and sequences that have not ended.
        num_waiting: sequences in the queue, or whose grammar is being compiled.
        lanes: by rank, which is 0 unless the account's priorities count among all accounts.
    """

    __slots__ = ("id", "lanes", "num_live", "num_waiting", "service", "weight")

    def __init__(self, id: int, weight: float = 1.0, service: float = 0.0) -> None:
        self.id = id
        self.weight = weight
        self.service = service
        self.num_live = 0
        self.num_waiting = 0
        self.lanes: dict[int, Lane] = {}

    @property
    def num_running(self) -> int:
        return sum(len(lane.running) for lane in self.lanes.values())

    @property
    def num_blocks(self) -> int:
        """KV blocks in its running sequences' tables; shared ones count for each."""
        return sum(len(sequence.block_table) for lane in self.lanes.values() for sequence in lane.running)

    def lane(self, rank: int) -> Lane:
        lane = self.lanes.get(rank)
        if lane is None:
            lane = self.lanes[rank] = Lane(self, rank)
        return lane

    def drop_if_empty(self, lane: Lane) -> None:
        if not lane.running and not lane.waiting:
            self.lanes.pop(lane.rank, None)

    def charge(self, cost: float) -> None:
        self.service += cost / self.weight


def start_service(account: Account, allowance: float) -> float:
    """The service by which an account is judged when one of its sequences is to start."""
    return account.service if account.num_running else account.service - allowance


class Accounts:
    """The accounts with live requests, and what is known of others."""

    def __init__(self) -> None:
        self.active: dict[int, Account] = {}
        self._idle: dict[int, float] = {}  # service of those that are ahead of an active one

    @property
    def is_shared(self) -> bool:
        """More than one lane may have sequences."""
        return len(self.active) > 1 or any(len(account.lanes) > 1 for account in self.active.values())

    @property
    def num_waiting_accounts(self) -> int:
        return sum(account.num_waiting > 0 for account in self.active.values())

    def find(self, ref: AccountRef) -> Account:
        """The account, new or known; its weight is the newest."""
        account = self.active.get(ref.id)
        if account is None:
            return Account(ref.id, ref.weight, self._idle.get(ref.id, 0.0))
        account.weight = ref.weight
        return account

    def open(self, account: Account) -> None:
        """A request or sequence of the account begins."""
        if account.num_live == 0:
            others = self.active.values()
            account.service = max(account.service, min((other.service for other in others), default=0.0))
            self._idle.pop(account.id, None)
            self.active[account.id] = account
        account.num_live += 1

    def close(self, account: Account) -> None:
        """It has ended."""
        account.num_live -= 1
        if account.num_live:
            return
        del self.active[account.id]
        least = min((other.service for other in self.active.values()), default=float("inf"))
        self._idle[account.id] = account.service
        self._idle = {id: service for id, service in self._idle.items() if service > least}
        while len(self._idle) > MAX_IDLE_ACCOUNTS:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]

    def charge_late(self, account: Account, cost: float) -> None:
        """Charge an account whose requests may have ended meanwhile."""
        current = self.active.get(account.id)
        if current is not None:
            current.charge(cost)
        else:
            account.service = max(account.service, self._idle.get(account.id, 0.0))
            account.charge(cost)
            self._idle[account.id] = account.service


def check_queue(
    count: int,
    num_own: int,
    num_all: int,
    num_others: int,
    *,
    max_queue_len: int,
    max_own: int = 0,
    retry_after: Callable[[], int] = lambda: 1,
) -> None:
    """Raise QueueFullError unless a queue of `num_all` entries has places for `count` more of an account.

    A queue that is full of others' entries takes an account's up to its fair share, so that one account's backlog
    never refuses another. So it can be longer than `max_queue_len`, by no more than a factor of MAX_OVERFILL.

    Args:
        num_own: entries of the account.
        num_others: other accounts with entries.
        max_own: most entries of the account; 0: no limit of its own.
        retry_after: estimates the seconds until there are places.
    """
    if max_own and num_own + count > max_own:
        raise QueueFullError(
            f"{num_own} requests of this key are waiting already, and only {max_own} may; try again later",
            retry_after=retry_after(),
        )
    if num_all + count <= max_queue_len:
        return
    share = max(max_queue_len // (num_others + 1), 1)
    if not num_others or num_own + count > share or num_all + count > MAX_OVERFILL * max_queue_len:
        raise QueueFullError(
            f"{num_all} requests are waiting already, and no more may; try again later", retry_after=retry_after()
        )
