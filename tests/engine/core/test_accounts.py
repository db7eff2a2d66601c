"""Accounts and their queue alone: the order of admission, when a sequence makes way, and the bounds of the queue."""

from __future__ import annotations

from array import array

import pytest

from tessera.engine.contract.errors import QueueFullError
from tessera.engine.contract.messages import AccountRef
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core import account as account_module
from tessera.engine.core.account import Account, Accounts, check_queue, start_service
from tessera.engine.core.fair_queue import AGEING_ADMISSIONS, FairQueue
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.takeover import MAX_LAG, find_victim


def make_sequence(account: Account, arrival: int, *, priority: int = 0, rank: int = 0) -> Sequence:
    sequence = Sequence(
        request_id=f"{account.id}-{arrival}",
        client=b"c",
        account=account,
        token_ids=array("i", [1]),
        num_prompt_tokens=1,
        params=SamplingParams(max_tokens=1),
        max_num_tokens=2,
        stop_token_ids=frozenset(),
        arrival_number=arrival,
        arrival_time=0.0,
        priority=priority,
        rank=rank,
    )
    sequence.lane = account.lane(rank)
    return sequence


def run(account: Account, count: int, *, rank: int = 0, num_blocks: int = 0) -> list[Sequence]:
    """Sequences of the account that have seats, with so many blocks each."""
    sequences = [make_sequence(account, 1000 + number, rank=rank) for number in range(count)]
    for sequence in sequences:
        sequence.block_table = list(range(num_blocks))
        sequence.lane.running.append(sequence)
    return sequences


# ---- the order of the queue ---------------------------------------------------------------------


def queue_of(*sequences: Sequence, start_allowance: float = 0.0) -> FairQueue:
    queue = FairQueue(start_allowance)
    for sequence in sequences:
        queue.enqueue(sequence)
    return queue


def admitted(queue: FairQueue) -> list[Sequence]:
    """The whole queue, admitted one after the other."""
    found = []
    while len(queue):
        sequence = next(queue.candidates())
        queue.admit(sequence)
        found.append(sequence)
    return found


def test_the_account_that_was_served_least_is_first_and_of_equals_the_first_to_arrive() -> None:
    served, level, equal = Account(1, service=9.0), Account(2, service=5.0), Account(3, service=5.0)
    first, second, third = make_sequence(served, 0), make_sequence(level, 2), make_sequence(equal, 1)
    last = make_sequence(served, 3)
    queue = queue_of(last, first, second, third)
    assert list(queue.candidates()) == [third, second, first, last]
    assert sorted(one.arrival_number for one in queue) == [0, 1, 2, 3]
    assert (len(queue), served.num_waiting, level.num_waiting) == (4, 2, 1)
    assert [len(queue.some(count)) for count in (0, 1, 3, 9)] == [0, 1, 3, 4]
    assert queue.some(3) == list(queue)[:3]
    assert admitted(queue) == [third, second, first, last]
    assert (len(queue), served.num_waiting, bool(list(queue))) == (0, 0, False)


def test_an_account_with_nothing_running_starts_ahead_by_the_allowance_and_no_more() -> None:
    for service, is_first in ((103.0, True), (105.0, False)):
        runs, starts = Account(1, service=100.0), Account(2, service=service)
        run(runs, 1)
        early, late = make_sequence(runs, 0), make_sequence(starts, 1)
        queue = queue_of(early, late, start_allowance=4.0)
        assert queue.turn(late.lane) == (0, service - 4.0)
        assert queue.turn(early.lane) == early.lane.turn == (0, 100.0)
        assert next(queue.candidates()) is (late if is_first else early)
    assert start_service(runs, 4.0) == 100.0


def test_candidates_of_several_accounts_follow_what_is_admitted_between_them() -> None:
    accounts = [Account(1), Account(2)]
    sequences = [make_sequence(accounts[number % 2], number) for number in range(6)]
    queue = queue_of(*sequences)
    assert len(queue.some(5)) == 5
    candidates = queue.candidates()
    found = []
    for sequence in candidates:
        found.append(sequence)
        if sequence.arrival_number in (0, 3):
            queue.admit(sequence)
            sequence.account.charge(10.0)
    assert found == [sequences[place] for place in (0, 1, 3, 2, 4, 5)]
    assert list(queue.candidates()) == [sequences[place] for place in (1, 2, 4, 5)]


def test_candidates_of_one_account_go_on_behind_those_that_are_admitted() -> None:
    account = Account(1)
    sequences = [make_sequence(account, number) for number in range(5)]
    queue = queue_of(*sequences)
    assert queue.some(2) == sequences[:2]
    found = []
    for sequence in queue.candidates():
        found.append(sequence)
        if sequence.arrival_number in (1, 2, 4):
            queue.admit(sequence)
    assert found == sequences
    assert list(queue) == [sequences[0], sequences[3]]


def test_what_does_not_wait_cannot_be_removed() -> None:
    account = Account(1)
    inside, between, behind = (make_sequence(account, number) for number in range(3))
    queue = queue_of(inside, behind)
    same_place = make_sequence(account, 0)
    queue.remove(behind)
    for sequence in (behind, between, same_place):
        with pytest.raises(ValueError, match=f"{sequence.request_id} is not in the queue"):
            queue.remove(sequence)
    assert list(queue) == [inside]
    assert (len(queue), account.num_waiting) == (1, 1)


def test_an_urgent_sequence_is_preferred_to_an_older_one_only_so_often() -> None:
    account = Account(1)
    old = make_sequence(account, 0, priority=1)
    newer = make_sequence(account, 1, priority=1)
    urgent = [make_sequence(account, number) for number in range(2, 2 * AGEING_ADMISSIONS + 4)]
    other = make_sequence(Account(2, service=10.0**9), 10**6)
    for extra in ((), (other,)):  # beside another account's
        queue = queue_of(newer, old, *urgent, *extra)
        own = [one for one in admitted(queue) if one is not other]
        assert own[: AGEING_ADMISSIONS + 1] == [*urgent[:AGEING_ADMISSIONS], old]
        assert own[AGEING_ADMISSIONS + 1 :][: AGEING_ADMISSIONS + 1] == [
            *urgent[AGEING_ADMISSIONS : 2 * AGEING_ADMISSIONS],
            newer,
        ], "and then as often again"
        assert len(own) == len(urgent) + 2
        account.lane(0).num_passed_over = 0


def test_candidates_begin_with_one_that_was_passed_over_too_often_and_have_each_once() -> None:
    account = Account(1)
    urgent, old, newer = (
        make_sequence(account, arrival, priority=priority) for arrival, priority in ((2, 0), (0, 1), (1, 1))
    )
    queue = queue_of(urgent, old, newer)
    account.lane(0).num_passed_over = AGEING_ADMISSIONS - 1
    assert list(queue.candidates()) == [urgent, old, newer]
    account.lane(0).num_passed_over = AGEING_ADMISSIONS
    assert list(queue.candidates()) == [old, urgent, newer]


def test_a_higher_rank_goes_before_a_lower_one_only_so_often() -> None:
    busy, background = Account(1, service=10.0**6), Account(2)
    low = [make_sequence(background, number, rank=1) for number in range(2)]
    high = [make_sequence(busy, number + 10) for number in range(2 * AGEING_ADMISSIONS + 5)]
    order = admitted(queue_of(*low, *high))
    assert order[: AGEING_ADMISSIONS + 1] == [*high[:AGEING_ADMISSIONS], low[0]]
    assert order[AGEING_ADMISSIONS + 1 :][: AGEING_ADMISSIONS + 1] == [
        *high[AGEING_ADMISSIONS : 2 * AGEING_ADMISSIONS],
        low[1],
    ]


# ---- making way ---------------------------------------------------------------------------------


def accounts_of(*accounts: Account) -> Accounts:
    found = Accounts()
    found.active.update({account.id: account for account in accounts})
    return found


def test_a_new_sequence_takes_a_seat_only_where_it_then_holds_less() -> None:
    for num_own, num_others, is_taken in ((0, 1, False), (0, 2, True), (2, 3, False), (2, 4, True)):
        own, other = Account(1), Account(2, service=10.0)
        run(own, num_own)
        theirs = run(other, num_others)
        head = make_sequence(own, 0)
        assert find_victim(head, accounts_of(own, other), 0) is (theirs[-1] if is_taken else None)
    assert find_victim(head, accounts_of(own, Account(3)), 0) is None, "nothing else runs"


@pytest.mark.parametrize(
    ("own_weight", "other_weight", "is_taken"),
    [(1.0, 2.0, True), (1.0, 4.0, False), (0.25, 1.0, False), (0.5, 1.0, True)],
)
def test_seats_are_counted_by_weight(own_weight: float, other_weight: float, is_taken: bool) -> None:
    own, other = Account(1, own_weight), Account(2, other_weight, service=10.0)
    theirs = run(other, 4)
    found = find_victim(make_sequence(own, 0), accounts_of(own, other), 0)
    assert found is (theirs[-1] if is_taken else None)


def test_a_new_sequence_takes_blocks_of_the_account_that_holds_the_most_of_them() -> None:
    own, many_seats, many_blocks = Account(1), Account(2, service=10.0), Account(3, service=10.0)
    run(own, 1, num_blocks=2)
    seats = run(many_seats, 5, num_blocks=1)
    blocks = run(many_blocks, 2, num_blocks=6)
    accounts, head = accounts_of(own, many_seats, many_blocks), make_sequence(own, 0)
    assert find_victim(head, accounts, 9) is blocks[-1]
    assert find_victim(head, accounts, 10) is None, "it would hold as many"
    assert find_victim(head, accounts, 0) is seats[-1]


def test_a_new_sequence_takes_nothing_from_an_account_that_was_served_less() -> None:
    for service, is_taken in ((104.0, True), (105.0, False)):
        own, other = Account(1, service=service), Account(2, service=100.0)
        theirs = run(other, 3)
        found = find_victim(make_sequence(own, 0), accounts_of(own, other), 0, start_allowance=4.0)
        assert found is (theirs[-1] if is_taken else None)
    run(own, 1)
    own.service = 101.0
    assert find_victim(make_sequence(own, 0), accounts_of(own, other), 0, start_allowance=4.0) is None, (
        "it runs already"
    )
    own.service = 4.0
    other.service = 3.0
    assert find_victim(make_sequence(own, 0), accounts_of(own, other), 0) is None, "without an allowance"


def test_a_sequence_that_has_run_takes_a_turn_only_after_a_lag() -> None:
    for lag, is_taken in ((MAX_LAG, False), (MAX_LAG + 1, True)):
        own, largest, most_served = Account(1, service=5.0), Account(2, service=5.0), Account(3, service=5.0 + lag)
        run(largest, 4)
        theirs = run(most_served, 1)
        head = make_sequence(own, 0)
        head.num_preemptions = 1
        found = find_victim(head, accounts_of(own, largest, most_served), 0)
        assert found is (theirs[-1] if is_taken else None)


def test_an_account_that_runs_nothing_has_nothing_to_give_up() -> None:
    own, waits, runs = Account(1), Account(2, service=10.0**6), Account(3, service=10.0)
    (theirs,) = run(runs, 1)
    head = make_sequence(own, 0)
    head.num_preemptions = 1
    assert find_victim(head, accounts_of(own, waits, runs), 0) is None
    runs.service = 2 * MAX_LAG
    assert find_victim(head, accounts_of(own, waits, runs), 0) is theirs


def test_the_last_of_the_lowest_rank_makes_way_and_none_of_a_higher_rank() -> None:
    own, other = Account(1), Account(2, service=10.0)
    high, low = run(other, 2, rank=-1), run(other, 2, rank=1)
    other.lane(2)  # without sequences
    accounts = accounts_of(own, other)
    for rank in (-1, 0, 1):
        assert find_victim(make_sequence(own, 0, rank=rank), accounts, 0) is low[-1]
    assert find_victim(make_sequence(own, 0, rank=2), accounts, 0) is None
    low[0].lane.running.clear()
    run(other, 2, rank=-1)
    assert find_victim(make_sequence(own, 0, rank=-1), accounts, 0) is other.lane(-1).running[-1]
    assert find_victim(make_sequence(own, 0), accounts, 0) is None
    assert high[0].lane.running


# ---- accounts -----------------------------------------------------------------------------------


def test_an_account_is_active_while_it_has_requests() -> None:
    accounts = Accounts()
    account = accounts.find(AccountRef(1, 2.0))
    assert (account.id, account.weight, account.service) == (1, 2.0, 0.0)
    accounts.open(account)
    accounts.open(account)
    assert accounts.find(AccountRef(1, 4.0)) is account
    assert account.weight == 4.0, "the newest"
    account.charge(8.0)
    assert account.service == 2.0
    accounts.close(account)
    assert accounts.active == {1: account}
    assert not accounts.is_shared
    other = accounts.find(AccountRef(2))
    accounts.open(other)
    assert other.service == 2.0, "level with the least"
    assert accounts.is_shared
    other.num_waiting = 1
    assert accounts.num_waiting_accounts == 1
    accounts.close(account)
    assert accounts.active == {2: other}


def test_two_lanes_of_one_account_are_compared_too() -> None:
    accounts = Accounts()
    account = accounts.find(AccountRef(1))
    accounts.open(account)
    lane = account.lane(0)
    assert account.lane(0) is lane
    assert not accounts.is_shared
    low = account.lane(1)
    assert accounts.is_shared
    low.waiting.append(make_sequence(account, 0, rank=1))
    account.drop_if_empty(low)
    assert accounts.is_shared, "it has a sequence"
    low.running.append(low.waiting.pop())
    account.drop_if_empty(low)
    assert accounts.is_shared
    low.running.clear()
    account.drop_if_empty(low)
    assert list(account.lanes) == [0]
    account.drop_if_empty(low)  # it is gone already


def test_those_that_are_ahead_are_remembered_and_the_least_ahead_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account_module, "MAX_IDLE_ACCOUNTS", 2)
    accounts = Accounts()
    busy = accounts.find(AccountRef(100))
    accounts.open(busy)
    busy.service = 10.0
    for number, service in ((1, 10.0), (2, 12.0), (3, 11.0), (4, 13.0)):
        account = accounts.find(AccountRef(number))
        accounts.open(account)
        account.service = service
        accounts.close(account)
        assert accounts.find(AccountRef(1)).service == 0.0, "level is not ahead"
    assert [accounts.find(AccountRef(number)).service for number in (1, 2, 3, 4)] == [0.0, 12.0, 0.0, 13.0]
    again = accounts.find(AccountRef(2))
    accounts.open(again)
    assert again.service == 12.0
    other = accounts.find(AccountRef(5))
    accounts.open(other)
    other.service = 11.0
    accounts.close(other)
    assert accounts.find(AccountRef(5)).service == 11.0, "the one that is active again needs no place"
    again.service = 15.0
    accounts.close(busy)
    assert accounts.find(AccountRef(100)).service == 0.0, "it is behind"
    accounts.close(again)
    assert [accounts.find(AccountRef(number)).service for number in (2, 4)] == [0.0, 0.0], (
        "there is nothing to be ahead of"
    )


def test_an_account_whose_requests_have_ended_is_charged_late() -> None:
    accounts = Accounts()
    busy, gone = accounts.find(AccountRef(1)), accounts.find(AccountRef(2, 2.0))
    accounts.open(busy)
    accounts.open(gone)
    accounts.charge_late(gone, 20.0)
    assert gone.service == 10.0
    accounts.close(gone)
    accounts.charge_late(gone, 6.0)
    assert accounts.find(AccountRef(2)).service == 13.0
    stale = Account(2, 2.0)
    accounts.charge_late(stale, 2.0)
    assert accounts.find(AccountRef(2)).service == 14.0, "on top of what is known"
    newest = accounts.find(AccountRef(2, 2.0))
    accounts.open(newest)
    accounts.charge_late(gone, 4.0)
    assert newest.service == 16.0, "the one that is active now"
    accounts.charge_late(Account(3), 5.0)
    assert accounts.find(AccountRef(3)).service == 5.0


@pytest.mark.parametrize(
    ("count", "num_own", "num_all", "num_others", "fits"),
    [
        (1, 9, 9, 0, True),
        (2, 8, 8, 0, True),
        (1, 10, 10, 0, False),
        (2, 9, 9, 0, False),
        # Full of others' entries: up to its share, which is at least one.
        (1, 4, 14, 1, True),
        (1, 5, 15, 1, False),
        (2, 4, 14, 1, False),
        (5, 0, 10, 1, True),
        (3, 0, 12, 2, True),
        (4, 0, 12, 2, False),
        (1, 0, 30, 20, True),
        (2, 0, 30, 20, False),
        # Never longer than four times its length.
        (1, 0, 39, 20, True),
        (1, 0, 40, 20, False),
        (2, 1, 38, 2, True),
        (3, 0, 38, 2, False),
    ],
)
def test_a_full_queue_has_places_up_to_a_fair_share(
    count: int, num_own: int, num_all: int, num_others: int, fits: bool
) -> None:
    if fits:
        check_queue(count, num_own, num_all, num_others, max_queue_len=10)
        return
    with pytest.raises(QueueFullError, match=f"^{num_all} requests are waiting already, and no more may") as raised:
        check_queue(count, num_own, num_all, num_others, max_queue_len=10, retry_after=lambda: 7)
    assert raised.value.retry_after == 7
    with pytest.raises(QueueFullError) as raised:
        check_queue(count, num_own, num_all, num_others, max_queue_len=10)
    assert raised.value.retry_after == 1


def test_an_accounts_own_bound_comes_first() -> None:
    check_queue(1, 2, 2, 0, max_queue_len=10, max_own=3)
    check_queue(3, 0, 0, 0, max_queue_len=10, max_own=3)
    for count, num_own in ((1, 3), (2, 2)):
        with pytest.raises(QueueFullError, match=f"{num_own} requests of this key are waiting already, and only 3 may"):
            check_queue(count, num_own, num_own, 0, max_queue_len=10, max_own=3)
    with pytest.raises(QueueFullError, match="and only 1 may"):
        check_queue(1, 1, 1, 0, max_queue_len=10, max_own=1)
    check_queue(1, 9, 9, 0, max_queue_len=10, max_own=0)
