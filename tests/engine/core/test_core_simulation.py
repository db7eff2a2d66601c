"""Many small random worlds: whatever comes, every request ends once, and no block is lost.

Half of the worlds run one step ahead, as on a GPU; a third keep every token's kind of row, whatever the batch; in two
fifths tokens are drafted. The
test id is the seed, so a failure can be repeated with `pytest -k "[SEED]"`. `make test-long` has more of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ContextLengthError, QueueFullError
from tessera.engine.contract.messages import AccountRef, TokenLogprobs
from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core import block_manager
from tessera.engine.kv_tiers.tiers import KVTiers
from tests.support.fakes.fake_runner import (
    CLIENT,
    EOS,
    NON_FINITE,
    FakeRunner,
    Harness,
    echo_token,
    generate,
    next_token,
    score,
)
from tests.support.fakes.fake_tiers import MemoryFiles, check_tiers_quiet, make_fake_tiers

MAX_MODEL_LEN = 48
MOST_LOOKS = 40  # steps in which a load ends


def draw_tiers(rng: random.Random) -> Callable[[FakeRunner], KVTiers] | None:
    """In half of the worlds there are tiers, some of them with faults."""
    if rng.random() < 0.5:
        return None
    files, max_files = None, 0
    if rng.random() < 0.5:
        files = MemoryFiles(rng, full_rate=rng.choice((0, 0, 0.1)), corrupt_rate=rng.choice((0, 0.2)))
        max_files = rng.choice((2, 10, 100))
    fault_rate = rng.choice((0, 0, 0, 0.02))
    num_slots = rng.choice((1, 6, 20, 100))
    return lambda runner: make_fake_tiers(
        rng, runner.planes, num_slots, fault_rate=fault_rate, files=files, max_files=max_files
    )


def draw_speculation(rng: random.Random) -> dict[str, Any]:
    """Settings of drafts, in two fifths of the worlds."""
    if rng.random() < 0.6:
        return {}
    return {
        "speculation": rng.choice(["on", "on", "auto"]),
        "speculative_method": (method := rng.choice(["ngram", "suffix", *MODEL_METHODS])),
        "num_speculative_tokens": rng.choice([1, 3, 7]),
        "prompt_lookup_min": 1,
        **({"draft_len": rng.choice([25, MAX_MODEL_LEN])} if method in MODEL_METHODS else {}),
    }


def make_engine(
    rng: random.Random, max_queue_len: int, *, asynchronous: bool, batch_invariant: bool, speculation: dict[str, Any]
) -> Harness:
    max_num_seqs = rng.randint(1, 6)
    return Harness(
        num_blocks=rng.randint(3, 30),
        block_size=rng.choice([2, 4, 8]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, max_num_seqs + 3, 24, 100]),
        max_queue_len=max_queue_len,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=rng.random() < 0.8,
        asynchronous=asynchronous,
        batch_invariant=batch_invariant,
        short_rope_len=rng.choice([0, 0, 20, 30]),
        make_tiers=draw_tiers(rng),
        **speculation,
    )


def make_prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    tail = [rng.randrange(1, NON_FINITE) for _ in range(rng.randint(1, 12))]
    if rng.random() < 0.1:
        return [NON_FINITE, *tail]
    prefix = rng.choice(prefixes)
    return prefix[: rng.randint(0, len(prefix))] + tail * rng.choice([1, 1, 1, 4])


def make_accounts(rng: random.Random) -> list[AccountRef]:
    return [
        AccountRef(number, rng.choice([0.5, 1.0, 1.0, 3.0]), outranks=rng.random() < 0.2)
        for number in range(1, rng.randint(2, 6))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("worlds")))


def test_fault_liveness_every_request_ends_once_with_the_tokens_it_gives_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 5 == 0:
        monkeypatch.setattr(block_manager, "MAX_RESET", 3)
    max_queue_len = rng.randint(1, 8)
    speculation = draw_speculation(random.Random(f"drafts of {seed}"))
    engine = make_engine(
        rng, max_queue_len, asynchronous=seed % 2 == 1, batch_invariant=seed % 3 == 2, speculation=speculation
    )
    engine.runner.say = say = echo_token if speculation else next_token
    prefixes = [[rng.randrange(1, NON_FINITE) for _ in range(20)] for _ in range(3)]
    accounts = [AccountRef()] if rng.random() < 0.3 else make_accounts(rng)
    context = min(MAX_MODEL_LEN, engine.core.block_manager.num_blocks * engine.core.block_manager.block_size)
    prompt: list[int] = []
    cache_salt = ""
    expected: dict[str, tuple[list[int], str]] = {}
    scores: dict[str, list[TokenLogprobs]] = {}
    aborted: set[str] = set()
    num_requests, most_steps = rng.randint(5, 25), 0
    for index in range(num_requests):
        name, max_tokens = f"r{index}", rng.randint(1, 30)
        if not prompt or rng.random() < 0.6:  # else the same once more, at once if it comes to that
            prompt, cache_salt = make_prompt(rng, prefixes), rng.choice(["", "", "alice", "bob"])
        stop_ids = frozenset(rng.sample(range(1, NON_FINITE), rng.choice([0, 0, 5])))
        min_tokens = rng.choice([0, 0, rng.randint(0, max_tokens)])
        num_logprobs = rng.choice([None, None, None, 0, 2])
        try:
            engine.add(
                name,
                prompt,
                max_tokens,
                priority=rng.choice([0, 0, 0, -1, 1]),
                account=rng.choice(accounts),
                cache_salt=cache_salt,
                stop_token_ids=tuple(stop_ids),
                min_tokens=min_tokens,
                prompt_logprobs=num_logprobs,
            )
        except ContextLengthError:
            assert len(prompt) >= context
        except QueueFullError:
            assert engine.core.stats().num_waiting >= max_queue_len
        else:
            limit = min(max_tokens, context - len(prompt))
            expected[name] = generate(prompt, limit, stop_ids={EOS, *stop_ids}, min_tokens=min_tokens, say=say)
            most_steps += len(prompt) + limit
            if num_logprobs is not None:
                tokens = np.array(prompt)
                scores[name] = [score(tokens[:end], prompt[end], num_logprobs) for end in range(1, len(prompt))]
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            engine.step()
        if rng.random() < 0.05:
            engine.core.reset_prefix_cache(rng.choice([None, [accounts[0].id]]))
        if expected and rng.random() < 0.15:
            victim = rng.choice(sorted(expected))
            engine.core.abort([victim], CLIENT)
            if victim not in engine.finish_reasons:
                aborted.add(victim)
            engine.check_blocks()
    # The first in order advances in every step and, now that nobody arrives, is never preempted.
    # One step ahead, each of its tokens is followed by a step that may have been for nothing.
    engine.run(max_steps=(2 * most_steps + 2) * (MOST_LOOKS if engine.tiers is not None else 1))

    for name, (token_ids, finish_reason) in expected.items():
        if name in aborted:
            assert name not in engine.finish_reasons
            assert engine.token_ids[name] == token_ids[: len(engine.token_ids[name])]
        else:
            assert (engine.token_ids[name], engine.finish_reasons[name]) == (token_ids, finish_reason)
        if engine.token_ids[name]:
            assert engine.prompt_logprobs.get(name) == scores.get(name)
    assert engine.finish_reasons.keys() == expected.keys() - aborted
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert sum(engine.core.metrics.num_finished.values()) == len(expected)
    if engine.tiers is not None:
        check_tiers_quiet(engine.tiers)
    if prompt and not aborted:  # a night, in which the KV cache loses its memory
        engine.core.drop_kv_cache()
        engine.runner.lose_memory()
        engine.check_blocks()
        with contextlib.suppress(ContextLengthError):
            engine.add("morning", prompt, 5, account=rng.choice(accounts), cache_salt=cache_salt)
            engine.run(max_steps=2 * (len(prompt) + 7) * MOST_LOOKS)
            assert engine.token_ids["morning"] == generate(prompt, min(5, context - len(prompt)), say=say)[0]
