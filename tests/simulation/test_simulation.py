"""Histories of hundreds of seeds, and that the simulation notices what is broken.

A failure is repeated by `python -m tests.simulation --show SEED`; millions of seeds run by `make simulate`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tessera.app.generate.generation import Generation
from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.core import EngineCore
from tessera.engine.core.scheduler import Scheduler
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.engine_process import EngineProcess
from tessera.engine.ipc.supervisor import EngineSupervisor
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.speculation.draft_keys import DraftKeys
from tessera.engine.speculation.verification import VerifiedDraft
from tests.simulation.history import DROP_SECONDS, History
from tests.simulation.virtual_loop import START
from tests.simulation.wire import Listener

NUM_SEEDS = 400  # about 4 s
CHUNK = 50
MOST_SEEDS = 200  # until a broken server is found out


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of simulated deaths are not for the log."""
    logger = logging.getLogger("tessera")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_fault_liveness_whatever_breaks_requests_end_once_and_the_server_serves_again(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            History(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}; see python -m tests.simulation --show {seed}") from error


def test_a_seed_is_a_whole_history() -> None:
    for seed in range(10):
        assert History(seed).run() == History(seed).run()
    assert len({History(seed).run() for seed in range(10)}) == 10


def raises(self: Any) -> None:
    raise AttributeError("a socket that cannot do that")


def calls_itself(self: Any) -> None:
    self._loop.call_soon(self._receive)


def test_an_error_that_only_the_event_loop_sees_ends_the_history_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "receive", raises)
    history = History(3)
    with pytest.raises(AttributeError, match="cannot do that"):
        history.run()
    assert history.loop.now < START + DROP_SECONDS + 1


def test_callbacks_that_follow_each_other_without_end_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "_receive", calls_itself)
    with pytest.raises(AssertionError, match="without end"):
        History(3).run()


def test_an_engine_that_is_never_heard_of_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "_dispatch", lambda self, message: None)
    with pytest.raises(asyncio.TimeoutError):
        History(3).run()


def loses_blocks(self: Any, sequence: Any, *, withdraw: bool = False) -> None:
    sequence.block_table.pop()
    RELEASE(self, sequence, withdraw=withdraw)


def overtakes_copies(self: Any, block: int) -> None:
    pass


def runs_too_early(self: Any) -> None:
    for load in self.loads:
        load.is_done = True
    POLL(self)


def forgets_preempted(self: Any, sequence: Any) -> None:
    PREEMPT(self, sequence)
    self.waiting.remove(sequence)


def ends_twice(self: Any, core: Any, client: bytes, outputs: Any) -> None:
    SEND_OUTPUTS(self, core, client, outputs)
    SEND_OUTPUTS(self, core, client, [output for output in outputs if output.finish_reason is not None])


def loses_ends(self: Any, reason: str) -> None:
    self._inboxes.clear()


def keeps_inboxes(self: Any, request_id: str) -> None:
    pass


def never_restarts(self: Any, exit_code: int) -> str:
    self._stopping.set()
    return ""


async def leaves_choices(self: Any) -> None:
    await asyncio.sleep(0)


def stands_still(self: Any, now: float) -> None:
    return None


def believes_in_lost_blocks(self: Any) -> None:
    pass


RELEASE, PREEMPT, SEND_OUTPUTS = BlockManager.release, Scheduler._preempt, EngineProcess._send_outputs
POLL = KVTiers.poll


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (BlockManager, "release", loses_blocks),
        (Scheduler, "_preempt", forgets_preempted),
        (EngineClient, "_fail_all", loses_ends),
        (EngineClient, "abandon", keeps_inboxes),
        (EngineSupervisor, "_describe_end", never_restarts),
        (Generation, "abort", leaves_choices),
        (EngineCore, "schedule", stands_still),
        (KVTiers, "claim", overtakes_copies),
        (KVTiers, "poll", runs_too_early),
        (EngineCore, "drop_kv_cache", believes_in_lost_blocks),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "__name__", ""),
)
def test_the_simulation_notices_a_server_that(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert some_history_fails(drafts=False)


def some_history_fails(*, drafts: bool) -> bool:
    for seed in range(MOST_SEEDS):
        try:
            History(seed, drafts=drafts).run()
        except Exception:
            return True
    return False


def accepts_every_draft(self: Any, sampled: Any) -> int:
    return len(self.tokens)


def keeps_rejected_tokens(self: Any, sequence: Any, num_rejected: int) -> None:
    pass


def believes_in_blocks_of_others(self: Any, block: int) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (VerifiedDraft, "count_accepted", accepts_every_draft),
        (Scheduler, "give_back", keeps_rejected_tokens),
        (DraftKeys, "forget_block", believes_in_blocks_of_others),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "__name__", ""),
)
def test_the_simulation_notices_drafts_that(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert some_history_fails(drafts=True)


def test_drafts_of_histories_are_right_wrong_and_late() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for seed in range(60, 90):
        history = History(seed, drafts=True)
        history.run()
        found.update(history.count_drafts())
    print(found)
    for source in ("ngram", "suffix", "prediction", *MODEL_METHODS):
        assert found[source, "accepted"] > 0, source
        assert found[source, "rejected"] > 0, source
