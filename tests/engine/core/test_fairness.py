"""Accounts share the engine: bounds on what one may be served more than another, and on how long one waits."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import Any

import pytest

from tessera.engine.contract.errors import InvalidRequestError, QueueFullError
from tessera.engine.contract.messages import AccountRef, AddRequest, Sibling, client_decoder, client_encoder
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.account import Account, Accounts
from tessera.engine.core.fair_queue import AGEING_ADMISSIONS
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.slot_table import ScheduledStep
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.core.takeover import MAX_LAG
from tests.support.fakes.fake_runner import NON_FINITE, Harness, generate

MAX_LEN = 160
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
            max_model_len=MAX_LEN,
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
        charge_late = self.engine.core.accounts.charge_late

        def counted_late(account: Account, cost: float) -> None:
            self._serve(account.id, cost)
            charge_late(account, cost)

        self.engine.core.accounts.charge_late = counted_late  # type: ignore[method-assign]
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
        """Serve each account what the step computes for it for the first time."""
        for sequence, count in zip(step.sequences, step.num_scheduled_tokens, strict=True):
            fresh = min(max(sequence.num_computed_tokens - self._computed[sequence], 0), count)
            self._computed[sequence] += fresh
            self._serve(sequence.account.id, fresh)

    def _serve(self, account_id: int, cost: float) -> None:
        self.served[account_id] += cost / self._weights[account_id]


@pytest.mark.parametrize("seed", range(6))
def test_fault_fairness_accounts_with_work_waiting_are_served_equally_for_their_weights(seed: int) -> None:
    """As with deficit round robin and the virtual token counter: within a bound that does not grow with time."""
    rng = random.Random(seed)
    accounts = [AccountRef(number, rng.choice([1.0, 1.0, 2.0])) for number in range(1, rng.randint(3, 7))]
    world = World(rng, accounts, asynchronous=seed % 2 == 1)
    bound = 3 * world.engine.core.scheduler.max_num_batched_tokens + 2 * MAX_LEN
    for _ in range(400):
        world.top_up()
        world.step()
        shares = [world.served[account.id] for account in accounts]
        assert max(shares) - min(shares) <= bound, f"seed {seed}: {shares}"


def busy_engine(num_streams: int, **options: Any) -> Harness:
    """All seats are taken by one account's long completions, and as many wait."""
    engine = Harness(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=16, **options)
    for number in range(num_streams):
        engine.add(f"heavy{number}", [number % 90 + 1, 2, 3], 200, account=HEAVY, ignore_eos=True)
    for _ in range(20):
        engine.step()
    return engine


def steps_to_first_token(engine: Harness, name: str) -> int:
    for number in range(1, 2000):
        engine.step()
        if engine.token_ids[name]:
            return number
    raise AssertionError(f"{name} got no token")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fault_fairness_d7_a_light_keys_first_token_waits_for_no_end_of_a_heavy_keys_streams(
    asynchronous: bool,
) -> None:
    """Four prompts with n=128 hold the server no longer than one step or two."""
    engine = busy_engine(64, asynchronous=asynchronous)
    engine.add("light", [7, 8, 9], 5, account=LIGHT)
    assert steps_to_first_token(engine, "light") <= 3
    assert engine.core.metrics.num_preemptions == 1, "one seat is enough"


def test_fault_fairness_d7_a_key_that_uses_its_share_waits_for_no_turn_of_20_heavy_ones() -> None:
    """One request after the other of 33 + 8 tokens, beside 320 streams on 64 seats: about a 21st of all tokens."""
    engine = Harness(num_blocks=3000, max_num_seqs=64, max_num_batched_tokens=512)
    rng = random.Random(18)
    heavy = {f"{account}-{number}": AccountRef(account) for account in range(1, 21) for number in range(16)}
    for name, account in heavy.items():
        engine.add(name, [rng.randrange(1, 90) for _ in range(12)], rng.randint(40, 140), account=account)
    for _ in range(20):
        engine.step()
    waits = []
    for number in range(12):
        name = f"light{number}"
        engine.add(name, [rng.randrange(1, 90) for _ in range(33)], 8, account=AccountRef(99), ignore_eos=True)
        waits.append(steps_to_first_token(engine, name))
        while name not in engine.finish_reasons:
            engine.step()
    assert engine.core.num_waiting > 100
    assert max(waits) == 1, waits


@pytest.mark.parametrize("is_own", [False, True])
def test_fault_fairness_a_heavy_keys_prompts_leave_half_of_the_time_to_a_light_keys_decodes(is_own: bool) -> None:
    engine = Harness(num_blocks=80, block_size=64, max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=1024)
    decode_seconds, token_seconds = 0.0024, 0.00003
    start = engine.runner.start

    def timed(batch: StepBatch) -> Any:
        engine.now += decode_seconds + batch.num_tokens * token_seconds
        return start(batch)

    engine.runner.start = timed  # type: ignore[method-assign]
    rng = random.Random(18)

    def long_prompt() -> list[int]:
        return [rng.randrange(1, 90) for _ in range(400)]

    for name in ("one", "two"):  # so that the engine learns what steps take
        engine.add(name, long_prompt(), 5, account=HEAVY, ignore_eos=True)
        engine.run()
    engine.add("light", [7, 8, 9], 60, account=HEAVY if is_own else LIGHT, ignore_eos=True)
    engine.step(0.0)
    for number in range(10):
        engine.add(f"heavy-{number}", long_prompt(), 1, account=HEAVY)
    gaps = []
    while "light" not in engine.finish_reasons:
        begin = engine.now
        engine.step(0.0)
        gaps.append(engine.now - begin)
    gaps = gaps[2:]  # until the heavy key is ahead
    assert (max(gaps) < 2.2 * decode_seconds) == (not is_own), gaps
    assert sum(f"heavy-{number}" in engine.finish_reasons for number in range(10)) >= 6, "they always move on"


def test_a_key_that_is_ahead_by_more_than_a_step_waits_until_others_have_caught_up() -> None:
    """What is allowed to an account that runs nothing has a bound: it is no way to get more than one's share."""
    engine = busy_engine(64)
    accounts = engine.core.accounts
    allowance = engine.core.scheduler.max_num_batched_tokens
    for name, ahead, most in (("at once", allowance - 1, 1), ("later", 3 * allowance, 30)):
        light = accounts.find(AccountRef(3))
        accounts.open(light)
        light.service = accounts.active[HEAVY.id].service + ahead
        begun = accounts.active[HEAVY.id].service
        engine.add(name, [7, 8, 9], 1, account=AccountRef(3))
        assert steps_to_first_token(engine, name) <= most
        caught_up = accounts.active[HEAVY.id].service - begun
        accounts.close(light)
    assert caught_up >= 2 * allowance


def test_fault_fairness_d7_a_priority_acts_within_its_key() -> None:
    """Streams of priority -2**31 are before their own key's others, and not before others'."""
    engine = Harness(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=16)
    for number in range(64):
        engine.add(f"heavy{number}", [number + 1, 2, 3], 100, account=HEAVY, ignore_eos=True, priority=-(2**31))
    engine.add("light", [7, 8, 9], 5, account=LIGHT, priority=2**31 - 1)
    assert steps_to_first_token(engine, "light") <= 3


def test_a_key_that_may_outrank_others_does() -> None:
    engine = Harness(num_blocks=400, max_num_seqs=1, max_num_batched_tokens=16)
    engine.add("runs", [1, 2, 3], 5, account=LIGHT, ignore_eos=True)
    engine.step()
    engine.add("waits", [4, 5, 6], 5, account=LIGHT, ignore_eos=True)
    engine.add("urgent", [7, 8, 9], 5, account=AccountRef(3, outranks=True), priority=-1)
    while not engine.token_ids["waits"]:
        engine.step()
    assert engine.finish_reasons.keys() >= {"runs", "urgent"}


def test_fault_fairness_d7_prompt_logprobs_are_charged_and_long_prompts_leave_tokens_to_others() -> None:
    """128 prompts of 150 tokens, each to be scored, beside one short prompt."""
    engine = Harness(num_blocks=800, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256)
    for number in range(128):
        prompt = [(number * 7 + place) % 90 + 1 for place in range(150)]
        engine.add(f"heavy{number}", prompt, 1, account=HEAVY, prompt_logprobs=0)
    for _ in range(5):
        engine.step()
    engine.add("light", [7, 8, 9], 5, account=LIGHT)
    assert steps_to_first_token(engine, "light") <= 3
    accounts = engine.core.accounts.active
    num_computed = sum(sequence.num_computed_tokens for sequence in engine.core.scheduler.running)
    assert accounts[HEAVY.id].service > 2.5 * num_computed, "a scored token costs more than one that is only computed"


def test_long_prompts_of_two_keys_take_turns_in_the_steps_prompt_tokens() -> None:
    engine = Harness(num_blocks=800, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256)
    for account in (HEAVY, LIGHT):
        for number in range(2):
            prompt = [(number * 7 + place) % 90 + account.id for place in range(200)]
            engine.add(f"{account.id}-{number}", prompt, 1, account=account)
    computed: defaultdict[int, int] = defaultdict(int)
    for _ in range(16):
        engine.step()
        for sequence in engine.core.scheduler.running:
            computed[sequence.account.id] = max(computed[sequence.account.id], sequence.num_computed_tokens)
        assert abs(computed[HEAVY.id] - computed[LIGHT.id]) <= 2 * 16


def test_an_account_pays_for_what_is_computed_again_because_of_it() -> None:
    """A key of many short requests would otherwise have long contexts of others computed over and over."""
    engine = Harness(num_blocks=400, max_num_seqs=2, max_num_batched_tokens=64, prefix_caching=False)
    for number in range(2):
        engine.add(f"heavy{number}", [number + 1] * 100, 100, account=HEAVY, ignore_eos=True)
    for _ in range(10):
        engine.step()
    level = engine.core.accounts.active[HEAVY.id].service
    engine.add("light", [7], 1, account=LIGHT)
    for _ in range(10):
        engine.step()
    assert engine.finish_reasons == {"light": "length"}
    assert engine.core.accounts.find(LIGHT).service > level + 100, "also for the sequence that made way"


def test_a_heavy_key_gets_its_seats_back() -> None:
    engine = busy_engine(16)
    engine.add("light", [7, 8, 9], 3, account=LIGHT, ignore_eos=True)
    while "light" not in engine.finish_reasons:
        engine.step()
    engine.step()
    assert len(engine.core.scheduler.running) == 8
    engine.run(max_steps=2000)
    assert len(engine.finish_reasons) == 17


def test_more_keys_than_seats_take_turns() -> None:
    """Each of 12 keys has one endless stream for 3 seats; all get on."""
    engine = Harness(num_blocks=1600, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=4000)
    names = [f"key{number}" for number in range(12)]
    for number, name in enumerate(names, 1):
        engine.add(name, [number, 2, 3], 3500, account=AccountRef(number), ignore_eos=True)
    for _ in range(int(2.5 * MAX_LAG)):
        engine.core.step()
    shares = [account.service for account in engine.core.accounts.active.values()]
    assert len(shares) == 12
    assert min(shares) > 0
    assert max(shares) - min(shares) <= 2 * MAX_LAG


def test_the_weight_is_the_share() -> None:
    engine = Harness(num_blocks=800, max_num_seqs=8, max_num_batched_tokens=32)
    for number in range(120):
        for account in (AccountRef(1, weight=3.0), AccountRef(2, weight=1.0)):
            engine.add(f"{account.id}-{number}", [number % 90 + 1, account.id], 30, account=account, ignore_eos=True)
    for _ in range(250):
        engine.step()
    tokens = {id: sum(len(got) for name, got in engine.token_ids.items() if name.startswith(id)) for id in ("1-", "2-")}
    assert tokens["1-"] / tokens["2-"] == pytest.approx(3.0, rel=0.1)


def test_a_pause_saves_nothing_up_and_forgives_nothing() -> None:
    accounts = Accounts()
    busy, pausing = accounts.find(HEAVY), accounts.find(LIGHT)
    accounts.open(busy)
    busy.charge(1000)
    accounts.open(pausing)
    assert pausing.service == busy.service
    pausing.charge(500)
    accounts.close(pausing)
    again = accounts.find(LIGHT)
    accounts.open(again)
    assert again.service == 1500, "it is still ahead"
    accounts.close(again)
    busy.charge(5000)
    again = accounts.find(LIGHT)
    accounts.open(again)
    assert again.service == busy.service, "not behind, although it was served less"


def test_a_low_priority_is_passed_over_only_so_often() -> None:
    engine = Harness(num_blocks=400, max_num_seqs=1, max_num_batched_tokens=16)
    engine.add("low", [1, 2], 1, priority=5)
    for number in range(3 * AGEING_ADMISSIONS):
        engine.add(f"r{number}", [number + 1, 3], 1)
    while "low" not in engine.finish_reasons:
        engine.step()
    assert len(engine.finish_reasons) == AGEING_ADMISSIONS + 1


# ---- the queue ----------------------------------------------------------------------------------


def test_fault_fairness_d7_a_queue_that_one_key_has_filled_takes_others_requests() -> None:
    engine = Harness(num_blocks=400, max_num_seqs=1, max_queue_len=16)
    for number in range(16):
        engine.add(f"heavy{number}", [number + 1], 200, account=HEAVY, ignore_eos=True)
    with pytest.raises(QueueFullError):
        engine.add("one too many", [1], 1, account=HEAVY)
    for number in range(8):
        engine.add(f"light{number}", [number + 1], 1, account=LIGHT)
    with pytest.raises(QueueFullError):
        engine.add("beyond its share", [1], 1, account=LIGHT)


def test_a_keys_own_bound_of_the_queue() -> None:
    engine = Harness(num_blocks=400, max_num_seqs=1, max_queue_len=16)
    bounded = AccountRef(1, max_waiting=2)
    for number in range(2):
        engine.add(f"r{number}", [1], 1, account=bounded)
    with pytest.raises(QueueFullError, match="only 2 may"):
        engine.add("r2", [1], 1, account=bounded)


# ---- requests of many sequences -----------------------------------------------------------------


def siblings(count: int) -> list[Sibling]:
    return [Sibling(f"s{number}", number, 5, 0, None) for number in range(count)]


def test_fault_fairness_d6_parameters_are_verified_and_worked_out_once_for_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified: list[SamplingParams] = []
    verify = SamplingParams.verify

    def noted(params: SamplingParams, vocab_size: int) -> None:
        verified.append(params)
        verify(params, vocab_size)

    monkeypatch.setattr(SamplingParams, "verify", noted)
    engine = Harness(num_blocks=400, max_queue_len=2000)
    words = tuple((word, word + 1) for word in range(1, 80))
    engine.add("first", [1, 2], 5, bad_words=words, allowed_token_ids=tuple(range(90)), siblings=siblings(500))
    assert len(verified) == 1
    sequences = list(engine.core.scheduler.waiting)
    assert len(sequences) == 501
    assert len({id(sequence.token_tables) for sequence in sequences}) == 1
    assert len({id(sequence.params.bad_words) for sequence in sequences}) == 1


def test_fault_fairness_d6_a_request_is_as_large_on_the_wire_as_its_parameters_once() -> None:
    words = tuple(tuple(range(1, 257)) for _ in range(128))
    params = SamplingParams(max_tokens=5, bad_words=words)
    alone = AddRequest("a", array("i", [1] * 100), params, 0.0)
    many = AddRequest("a", array("i", [1] * 100), params, 0.0, siblings=siblings(1000))
    encode = client_encoder().encode
    assert len(encode(many)) - len(encode(alone)) < 30 * 1000
    decoded = client_decoder().decode(encode(many))
    assert isinstance(decoded, AddRequest)
    assert decoded.request_ids[-1] == "s999"


def test_a_request_is_queued_whole_or_not_at_all() -> None:
    engine = Harness(num_blocks=400, max_queue_len=10)
    with pytest.raises(QueueFullError):
        engine.add("first", [1, 2], 5, siblings=siblings(10))
    assert not engine.core.has_work
    wrong = Sibling("s0", 0, 5, 0, None, array("i", [1, 10_000]))
    with pytest.raises(InvalidRequestError, match="token id 10000"):
        engine.add("first", [1, 2], 5, siblings=[wrong])
    with pytest.raises(InvalidRequestError, match="out of range"):
        engine.add("first", [1, 2], 5, siblings=[Sibling("s0", 2**64, 5, 0, None)])
    with pytest.raises(InvalidRequestError, match="an id of its own"):
        engine.add("s0", [1, 2], 5, siblings=siblings(1))
    assert not engine.core.has_work
    other = Sibling("s0", 3, 4, 0, None, array("i", [5, 6, 7]))
    engine.add("first", [1, 2], 5, siblings=[other, Sibling("s1", 9, 2, 0, None)], ignore_eos=True)
    engine.run()
    assert engine.token_ids["s0"] == generate([5, 6, 7], 4, stop_ids=set(), min_tokens=0)[0]
    assert engine.token_ids["s1"] == generate([5, 6, 7], 2, stop_ids=set(), min_tokens=0)[0]
