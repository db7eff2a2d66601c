"""When a running sequence makes way for a waiting one of another account.

A sequence that has never run takes a seat, or blocks, from the account that holds the most of them for its weight, if
it then still holds less than that one did and was not served more, with the queue's allowance for accounts that run
nothing; so a light account waits for no end of a heavy one's requests. Beyond that,
as with more accounts than seats, an account that lags behind by MAX_LAG takes a turn. A sequence displaces others at
most once for the first reason, and for the second at most once in MAX_LAG of service, so that progress is never lost
to taking turns.
"""

from __future__ import annotations

from tessera.engine.core.account import Account, Accounts, start_service
from tessera.engine.core.sequence import Sequence

MAX_LAG = 512.0  # service: computed tokens for an account of weight 1


def find_victim(head: Sequence, accounts: Accounts, num_blocks: int, start_allowance: float = 0.0) -> Sequence | None:
    """The running sequence that makes way for `head`, which needs `num_blocks` blocks or, with 0, a seat.

    None if there is none. Of its account it is the last in order.
    """
    own = head.account
    others = [account for account in accounts.active.values() if account is not own and account.num_running]
    if not others:
        return None
    rank = head.rank

    def share(account: Account, more: int = 0) -> float:
        return ((account.num_blocks if num_blocks else account.num_running) + more) / account.weight

    largest = max(others, key=share)
    most_served = max(others, key=lambda account: account.service)
    is_new = head.num_preemptions == 0 and start_service(own, start_allowance) <= largest.service
    if is_new and share(own, num_blocks or 1) < share(largest):
        return _last(largest, rank)
    if most_served.service - own.service > MAX_LAG:
        return _last(most_served, rank)
    return None


def _last(account: Account, rank: int) -> Sequence | None:
    """The last running sequence of an account's lowest lane, unless that goes before `rank`."""
    lane = max((lane for lane in account.lanes.values() if lane.running), key=lambda lane: lane.rank)
    return lane.running[-1] if lane.rank >= rank else None
