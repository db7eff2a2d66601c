"""A scheduler that is driven step by step."""

from __future__ import annotations

from typing import Any

from tessera.engine.contract.messages import NO_ACCOUNT, AccountRef, AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.scheduler import Scheduler
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.slot_table import ScheduledStep
from tests.support.cases.token_ids import token_ids

BLOCK_SIZE = 4


class Steps:
    """A scheduler whose steps always sample token 1; `options` are the scheduler's further ones."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        prefix_caching: bool = False,
        **options: Any,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_context=num_blocks * BLOCK_SIZE,
            **options,
        )
        self.num_arrivals = 0

    def add(
        self, name: str, num_tokens: int, *, priority: int = 0, account: AccountRef = NO_ACCOUNT, **params: float
    ) -> Sequence:
        prompt = [self.num_arrivals + 2] * num_tokens
        sampling_params = SamplingParams(max_tokens=100, **params)  # type: ignore[arg-type]
        request = AddRequest(name, token_ids(prompt), sampling_params, 0.0, priority, account=account)
        opened = self.scheduler.accounts.find(request.account)
        self.scheduler.accounts.open(opened)
        (sequence,) = Sequence.from_request(
            request, b"c", account=opened, eos_token_ids=[0], max_context=1000, arrival_number=self.num_arrivals
        )
        self.num_arrivals += 1
        self.scheduler.enqueue(sequence)
        return sequence

    def schedule(self) -> ScheduledStep:
        step = self.scheduler.schedule(now=1.0)
        assert step is not None
        return step

    def complete(self, step: ScheduledStep) -> None:
        self.scheduler.publish(step)
        for sequence in step.sampled:
            sequence.num_pending_tokens -= 1
            sequence.append(1)

    def step(self) -> dict[str, int]:
        """-> request id to number of tokens of the next step, which is then completed."""
        step = self.schedule()
        self.complete(step)
        return tokens_of(step)


def tokens_of(step: ScheduledStep) -> dict[str, int]:
    ids = [sequence.request_id for sequence in step.sequences]
    return dict(zip(ids, step.num_scheduled_tokens, strict=True))
