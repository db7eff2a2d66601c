"""One sequence: its tokens, how far they are computed, and what it holds while it runs."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tessera.engine.adapters.catalog import ServedAdapter
from tessera.engine.contract.block_digests import Digest, extend_digests, first_row, prefix_salt
from tessera.engine.contract.messages import AddRequest, FinishReason, PromptScores, TokenIds
from tessera.engine.contract.sampling_params import MAX_INT32, SamplingParams
from tessera.engine.core.account import CONSTRAINT_COST, LOGPROBS_COST, SAMPLED_COST, Account, Lane
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.grammar.token_tables import TokenTables, Words
from tessera.engine.kv_tiers.load import Load, SavedTail
from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.speculation.drafting import Drafting

ClientId: TypeAlias = bytes


class SequenceStatus(enum.Enum):
    NEW = enum.auto()  # its grammar may still be compiled
    WAITING = enum.auto()
    LOADING = enum.auto()  # it has a seat, and its prefix is on the way back to the device
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one request inside the engine. Times are the engine clock's seconds.

    Attributes:
        client: opaque address for the outputs.
        account: what it costs is charged to it.
        rank: of its lane; lower ranks of any account go first. Work in the background has 1, most requests 0.
        lane: its account's sequences of this rank, once it is queued.
        sampled_cost: of one token of its completion, beside computing it; see `account`.
        num_charged_tokens: where it was preempted, the tokens that had been computed before, and charged.
        displaced_by: the account that it was preempted for, which pays for computing those again.
        token_ids: prompt, then output.
        max_num_tokens: the sequence ends at this length: prompt and `max_tokens`, or the whole context.
        rope_row: of position 0 in the RoPE tables.
        prefix_salt: keeps apart what the prefix cache must not share: the request's salts, the rows of RoPE tables,
            adapters.
        prefill_end: where results must not depend on the batch, tokens before this one are computed in rows of
            several, by the kernels for prompts, and this one and those behind it in rows of one, by those for decodes,
            however they are scheduled; else None.
        stop_token_ids: ids that end the sequence: the model's own (unless ignored) and the request's.
        arrival_number: position in the order of arrival; breaks ties of equal priority.
        num_computed_tokens: tokens whose keys and values are in the cache, or will be after the steps
            that are being executed.
        num_pending_tokens: tokens that steps being executed will append.
        num_cached_tokens: tokens found in the prefix cache when the sequence was first scheduled.
        block_table: KV blocks, in the order of their tokens.
        shares_tokens, shares_digests: `token_ids` and `block_digests` are those of all of the request's sequences with
            this prompt, and hold no more than the prompt.
        block_digests: chained hashes of the first full blocks; kept by the block manager.
        matched: what the prefix cache held of it when it was last looked for, while it waits.
        awaited_digest: of a block that another sequence is computing; this one waits until it is published.
        num_published_blocks: blocks of the table that were offered to the prefix cache or came from it.
        load: of blocks on their way back to the device.
        saved_tail: what it had computed and not published when it was preempted.
        slot: row of the scheduler's arrays while running, else -1.
        adapter: that of its model's name, if it has one.
        adapter_slot: where that is on the device while the sequence has a seat, else -1.
        num_prompt_logprobs: prompt tokens whose log-probability has been requested, preemptions included.
        prompt_logprobs: the results, until they are sent with the first token; None if not requested.
        token_tables: of what constrains its tokens, shared by the sequences of a request.
        constraint: on the tokens that may be chosen; in step with `token_ids`, also through preemptions.
        drafting: proposes drafts; None where none are made.
        draft: tokens that may follow `token_ids`, which the next step verifies, or the one that is being executed.
        draft_source: a method, `grammar` or `prediction`.
        draft_masks: where constrained, the masks behind each of them.
        num_drafter_tokens: leading tokens of which the draft model has keys and values.
        num_drafter_chunk: tokens behind those that it reads before the next step.
    """

    request_id: str
    client: ClientId
    account: Account
    token_ids: TokenIds
    num_prompt_tokens: int
    params: SamplingParams
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    arrival_number: int
    arrival_time: float
    priority: int = 0
    rank: int = 0
    rope_row: int = 0
    prefix_salt: bytes = b""
    prefill_end: int | None = None
    adapter: ServedAdapter | None = None

    lane: Lane = field(init=False)
    sampled_cost: float = SAMPLED_COST
    num_charged_tokens: int = 0
    displaced_by: Account | None = None
    status: SequenceStatus = SequenceStatus.NEW
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    shares_tokens: bool = False
    shares_digests: bool = False
    block_digests: list[bytes] = field(default_factory=list)
    matched: list[PublishedBlock] = field(default_factory=list)
    awaited_digest: bytes | None = None
    num_published_blocks: int = 0
    load: Load | None = None
    saved_tail: SavedTail | None = None
    slot: int = -1
    adapter_slot: int = -1
    num_prompt_logprobs: int = 0
    prompt_logprobs: list[PromptScores] | None = None
    token_tables: TokenTables | None = None
    constraint: TokenConstraint | None = None
    drafting: Drafting | None = None
    draft: list[int] = field(default_factory=list)
    draft_source: str = ""
    draft_masks: list[Words] = field(default_factory=list)
    num_drafter_tokens: int = 0
    num_drafter_chunk: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reason: FinishReason | None = None

    @classmethod
    def from_request(
        cls,
        request: AddRequest,
        client: ClientId,
        *,
        account: Account,
        eos_token_ids: Iterable[int],
        max_context: int,
        short_rope_len: int = 0,
        arrival_number: int,
        token_tables: TokenTables | None = None,
        batch_invariant: bool = False,
        adapter: ServedAdapter | None = None,
    ) -> list[Sequence]:
        """The waiting sequences of a request whose fields have been verified; `arrival_number` is the first one's."""
        shared = request.sampling_params
        stop_token_ids = frozenset(shared.stop_token_ids).union(() if shared.ignore_eos else eos_token_ids)
        is_background = request.priority > MAX_INT32  # beyond all that requests can ask for
        rank = request.priority if request.account.outranks else int(is_background)
        sequences: list[Sequence] = []
        prompt_before: TokenIds | None = None
        for number, (request_id, prompt, params) in enumerate(_each(request)):
            max_num_tokens = min(len(prompt) + params.max_tokens, max_context)
            is_shared = prompt is prompt_before
            prompt_before = prompt
            rope_row = first_row(short_rope_len, max_num_tokens)
            if not sequences or rope_row != sequences[-1].rope_row:
                salt = prefix_salt(rope_row, request.cache_salt, b"" if adapter is None else adapter.digest)
            sequence = cls(
                request_id=request_id,
                client=client,
                account=account,
                token_ids=sequences[-1].token_ids if is_shared else array("i", prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                max_num_tokens=max_num_tokens,
                stop_token_ids=stop_token_ids,
                arrival_number=arrival_number + number,
                arrival_time=request.arrival_time,
                priority=request.priority,
                rank=rank,
                rope_row=rope_row,
                prefix_salt=salt,
                prefill_end=len(prompt) - 1 if batch_invariant else None,
                adapter=adapter,
                token_tables=token_tables,
                prompt_logprobs=None if params.prompt_logprobs is None else [],
            )
            if is_shared:
                sequence._share_with(sequences[-1])
            sequences.append(sequence)
        return sequences

    def _share_with(self, other: Sequence) -> None:
        """Another sequence of the request has the same prompt."""
        self.shares_tokens = other.shares_tokens = True
        if self.prefix_salt == other.prefix_salt:
            self.block_digests = other.block_digests
            self.shares_digests = other.shares_digests = True

    def note_start(self, now: float) -> None:
        """Its first step, unless it was preempted."""
        if self.shares_tokens:  # copied one by one as they start: a request may have a thousand with a long prompt
            self.token_ids, self.shares_tokens = self.token_ids[:], False
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
            self.num_cached_tokens = self.num_computed_tokens

    def extend_digests(self, num_blocks: int, block_size: int, digest: Digest) -> None:
        """Compute the digests of the first `num_blocks` blocks, which the tokens fill."""
        num_known = len(self.block_digests)
        if num_known >= num_blocks:
            return
        if self.shares_digests and num_blocks > self.num_prompt_tokens // block_size:
            self.block_digests, self.shares_digests = self.block_digests.copy(), False
        blocks = self.block_bytes(num_known, num_blocks, block_size)
        extend_digests(self.block_digests, self.prefix_salt, blocks, digest)

    def note_costs(self) -> None:
        """Set `sampled_cost`, once it is settled whether the sequence is constrained."""
        has_mask = self.constraint is not None
        reports = self.params.logprobs is not None
        self.sampled_cost = SAMPLED_COST + LOGPROBS_COST * reports + CONSTRAINT_COST * has_mask

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the first is served first."""
        return self.priority, self.arrival_number

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def matched_blocks(self) -> list[int]:
        """Where what was matched lies on the device."""
        return [entry.block for entry in self.matched]

    @property
    def num_tokens_to_schedule(self) -> int:
        """As `num_uncomputed_tokens`, with those that are being sampled."""
        return self.num_uncomputed_tokens + self.num_pending_tokens

    @property
    def prompt_token_ids(self) -> TokenIds:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def max_shared_tokens(self) -> int:
        """Most leading tokens that the prefix cache may provide: none whose logits are needed, and never the last."""
        if self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1:
            return self.num_prompt_logprobs
        return len(self.token_ids) - 1

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def has_seat(self) -> bool:
        return self.status in (SequenceStatus.RUNNING, SequenceStatus.LOADING)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def can_draft(self) -> bool:
        """It has caught up with all tokens but the last, and may get more than one."""
        num_tokens = len(self.token_ids)
        return (
            self.drafting is not None
            and not self.num_pending_tokens
            and self.num_computed_tokens == num_tokens - 1
            and num_tokens > self.num_prompt_tokens
            and self.max_num_tokens > num_tokens + 1
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; -> why the sequence ends with it, or None if it goes on."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        if len(token_ids) >= self.max_num_tokens:
            return "length"
        return None

    def may_end_with(self, token_ids: list[int]) -> bool:
        """Whether it may end with one of these, if they are sampled next."""
        return (
            self.constraint is not None
            or len(self.token_ids) + len(token_ids) >= self.max_num_tokens
            or not self.stop_token_ids.isdisjoint(token_ids)
        )

    def block_bytes(self, start: int, stop: int, block_size: int) -> Iterator[bytes]:
        """The token ids of each of the full blocks start..stop - 1, as the prefix cache hashes and compares them.

        With a `prefill_end`, a block that reaches behind it says where: the bits of its keys depend on that.
        """
        data = self.token_ids[start * block_size : stop * block_size].tobytes()
        size = block_size * self.token_ids.itemsize
        end = self.prefill_end
        for number in range(len(data) // size):
            block = data[number * size : (number + 1) * size]
            if end is not None and (within := end - (start + number) * block_size) < block_size:
                block += max(within, 0).to_bytes(2, "little")
            yield block


def _each(request: AddRequest) -> Iterator[tuple[str, TokenIds, SamplingParams]]:
    """Id, prompt and parameters of each of a request's sequences; what is large in the parameters is shared."""
    prompt, shared = request.prompt_token_ids, request.sampling_params
    yield request.request_id, prompt, shared
    for sibling in request.siblings:
        prompt = sibling.prompt_token_ids if sibling.prompt_token_ids is not None else prompt
        params = msgspec.structs.replace(
            shared,
            seed=sibling.seed,
            max_tokens=sibling.max_tokens,
            min_tokens=sibling.min_tokens,
            prompt_logprobs=sibling.prompt_logprobs,
        )
        yield sibling.request_id, prompt, params
