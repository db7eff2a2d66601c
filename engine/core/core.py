"""The engine core: requests in, steps, outputs out. One thread, no sockets, no device code."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from itertools import repeat
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from tessera.engine.adapters.catalog import AdapterCatalog, unknown_model
from tessera.engine.adapters.seats import AdapterSeats
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import (
    EngineError,
    InvalidRequestError,
    RequestError,
)
from tessera.engine.contract.messages import (
    AddRequest,
    FinishReason,
    RequestOutput,
    SchedulerStats,
    TokenLogprobs,
    refused,
)
from tessera.engine.core.account import COST_PER_COMPILE_SECOND, Account, Accounts, check_queue
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.metrics import EngineMetrics
from tessera.engine.core.prefill_budget import DecodeReads
from tessera.engine.core.prompt_logprobs import keep_prompt_logprobs
from tessera.engine.core.request_verifier import RequestVerifier
from tessera.engine.core.scheduler import Scheduler
from tessera.engine.core.sequence import ClientId, Sequence, SequenceStatus
from tessera.engine.core.slot_table import BeginDraft, ScheduledStep
from tessera.engine.core.step_batch import Int32Array, StepBatch, StepResult, TokenMask
from tessera.engine.grammar.compiler import GrammarCompiler, PendingGrammar
from tessera.engine.grammar.constraint import (
    GrammarConstraint,
    ReasoningConstraint,
    TokenConstraint,
    advance_constraints,
)
from tessera.engine.grammar.token_tables import TokenTables
from tessera.engine.kv_tiers.prefix_report import PrefixReport
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.speculation.draft_keys import DraftKeys, DraftLimits
from tessera.engine.speculation.masks import masks_along
from tessera.engine.speculation.model_drafts import ModelDrafts
from tessera.engine.speculation.speculator import Speculator

Outputs: TypeAlias = defaultdict[ClientId, list[RequestOutput]]

MAX_RETRY_AFTER = 60  # seconds
THROUGHPUT_WINDOW = 64  # finished requests that the recent throughput is taken from
GRAMMAR_WAIT = 0.002  # seconds that a step without other work waits for a grammar
MAX_CONSTRAINED = 64  # sequences whose grammar has compiled that are queued before one step, in a few milliseconds
ADAPTER_WAIT = 0.002  # likewise for an adapter that is being read


class Running(Protocol):
    """A submitted step; `result` waits for it, and `drafts` for the tokens that its draft model computed.

    These are [num_tokens, num_slots], of which what no sequence's draft has means nothing.
    """

    def result(self) -> StepResult: ...
    def drafts(self) -> Int32Array: ...


class Runner(Protocol):
    """Executes steps in order: the model runner, or a fake in tests.

    `start` submits a step; a constrained one stops before it chooses tokens and goes on with `sample`.
    An asynchronous runner computes in the background and takes the next step before the last one's result. Steps
    with prompts are best filled up to one of `full_sizes` tokens. `num_awaited_graphs` counts the CUDA graphs that were
    captured in `start`.
    """

    @property
    def asynchronous(self) -> bool: ...
    @property
    def full_sizes(self) -> tuple[int, ...]: ...
    @property
    def num_awaited_graphs(self) -> int: ...
    def start(self, batch: StepBatch) -> Running: ...
    def sample(self, running: Any, mask: TokenMask | None) -> None: ...


class EngineCore:
    """Add and abort requests between steps; each `step()` moves all of them forward.

    `config` has its device defaults filled in. `num_kv_blocks` blocks of `config.block_size` tokens are what `runner`
    has room for, `short_rope_len` is that of its RoPE tables. `grammars` is None without a tokenizer that can spell
    tokens. `adapters` are those that requests may name, of which `config.max_loras` fit on the device at a time.
    `draft_limits` are those of the runner's draft model, where the settings ask for one, and `begin_draft` submits
    its steps before `runner` is given the step that they are for. `reads`: of a step of decodes.
    Every accepted request ends with exactly one output that has a finish_reason; an aborted one has no further output.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        vocab_size: int,
        max_model_len: int,
        num_kv_blocks: int,
        eos_token_ids: Iterable[int],
        short_rope_len: int = 0,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        metrics: EngineMetrics | None = None,
        accounts: Accounts | None = None,
        tiers: KVTiers | None = None,
        adapters: AdapterCatalog | None = None,
        prefix_report: PrefixReport | None = None,
        draft_limits: DraftLimits | None = None,
        begin_draft: BeginDraft | None = None,
        reads: DecodeReads | None = None,
    ) -> None:
        self.num_steps = 0
        self.accounts = accounts if accounts is not None else Accounts()
        self.metrics = metrics if metrics is not None else EngineMetrics(config.model)
        self._tiers = tiers
        draft_keys = None if draft_limits is None else DraftKeys(num_kv_blocks, config.block_size)
        self.block_manager = BlockManager(
            num_kv_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching,
            tiers=tiers,
            report=prefix_report,
            draft_keys=draft_keys,
        )
        self._vocab_size = vocab_size
        self._max_context = min(max_model_len, num_kv_blocks * config.block_size)
        self._verifier = RequestVerifier(
            vocab_size, self._max_context, max_model_len=max_model_len, has_grammars=grammars is not None
        )
        self._adapters = adapters
        self._adapter_seats = None if adapters is None else AdapterSeats(adapters, config.max_loras)
        if self._adapter_seats is not None:
            self.metrics.watch_adapters(self._adapter_seats, self._adapters_in_use)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_context=self._max_context,
            full_sizes=runner.full_sizes,
            accounts=self.accounts,
            batch_invariant=config.batch_invariant,
            adapters=self._adapter_seats,
            max_drafts=config.max_step_drafts,
            draft_limits=draft_limits,
            begin_draft=begin_draft,
            reads=reads,
        )
        speculation = config.speculation_settings
        drafts = None
        if draft_limits is not None and draft_keys is not None:
            drafts = ModelDrafts(draft_limits, draft_keys, config.draft_step_tokens)
        self._speculator = Speculator(speculation, config.max_step_drafts, drafts) if speculation is not None else None
        self.metrics.speculator = self._speculator
        self._batch_invariant = config.batch_invariant
        self._runner = runner
        # With the times when the device may have begun, and whether that was before the end of the step before.
        self._in_flight: deque[tuple[ScheduledStep, Running, float, bool]] = deque()
        self._last_finished = 0.0  # when the newest result came
        self._unpublished: list[ScheduledStep] = []  # executed, but their blocks are not in the prefix cache yet
        self._unemitted: tuple[list[tuple[Sequence, list[int]]], float] | None = None  # tokens, and when they came
        self._unrecorded: list[tuple[int, list[float]]] = []  # of sampled tokens, for the metrics: numbers and gaps
        self._max_queue_len = config.max_queue_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._short_rope_len = short_rope_len
        self._clock = clock
        self._grammars = grammars
        self._sequences: dict[tuple[ClientId, str], Sequence] = {}
        self._compiling: dict[Sequence, PendingGrammar] = {}  # they join the scheduler's queue afterwards
        self._refusals: Outputs = defaultdict(list)
        self._num_arrivals = 0
        self._finish_times: deque[float] = deque(maxlen=THROUGHPUT_WINDOW)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._compiling or self._refusals or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._compiling)

    def reset_prefix_cache(self, accounts: Collection[int] | None = None) -> None:
        """Forget all cached prefixes, or those that these accounts have computed; sequences that share one go on."""
        self.block_manager.reset(accounts)
        if self._speculator is not None:
            self._speculator.forget_completions()

    def drop_kv_cache(self) -> None:
        """Forget what the device's KV cache holds, before its memory goes; there is no work."""
        assert not self.has_work, "requests have their blocks"
        self._publish()
        if self._tiers is not None:
            self._tiers.finish_copies()
        self.block_manager.drop_contents()

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        stats.num_waiting += len(self._compiling)
        stats.totals = self.metrics.totals()
        return stats

    def render_metrics(self) -> bytes:
        """Prometheus text format."""
        return self.metrics.render(self.stats())

    def add_request(self, request: AddRequest, client: ClientId) -> None:
        """Queue a request with all of its sequences, or none of them.

        Raises:
            QueueFullError: as many sequences wait as may, of all accounts or of the request's.
            InvalidRequestError: a wrong prompt or parameter, or a request id that is in use.
            ContextLengthError: a prompt and one token can never fit.
            NotFoundError: there is no adapter of the name.
        """
        account = self.accounts.find(request.account)
        self._check_queue(request, account)
        self._check_ids(request, client)
        self._verifier.verify(request)
        adapter = None
        if request.adapter:
            if self._adapters is None:
                raise unknown_model(request.adapter)
            adapter = self._adapters.find(request.adapter)
        params = request.sampling_params
        sequences = Sequence.from_request(
            request,
            client,
            account=account,
            eos_token_ids=self._eos_token_ids,
            max_context=self._max_context,
            short_rope_len=self._short_rope_len,
            arrival_number=self._num_arrivals,
            token_tables=TokenTables(params, self._vocab_size) if params.is_constrained else None,
            batch_invariant=self._batch_invariant,
            adapter=adapter,
        )
        pending: list[PendingGrammar] = []
        if params.grammar is not None and self._grammars is not None:
            pending = [self._grammars.submit(params.grammar, account.id) for _ in sequences]
        self._num_arrivals += len(sequences)
        for number, sequence in enumerate(sequences):
            self.metrics.record_arrival(0 if number else request.num_choices, sequence.params.max_tokens)
            self._sequences[client, sequence.request_id] = sequence
            if self._speculator is not None:
                sequence.drafting = self._speculator.make_drafting(
                    sequence.prefix_salt, sequence.num_prompt_tokens, request.prediction_token_ids
                )
            self.accounts.open(account)
            if pending:
                self._compiling[sequence] = pending[number]
                account.num_waiting += 1
            else:
                self._enqueue(sequence)

    def _check_ids(self, request: AddRequest, client: ClientId) -> None:
        request_ids = request.request_ids
        for request_id in request_ids:
            if (client, request_id) in self._sequences:
                raise InvalidRequestError(f"the request id {request_id!r} is in use", param="request_id")
        if len(set(request_ids)) < len(request_ids):
            raise InvalidRequestError("each sequence of a request needs an id of its own", param="request_id")

    def _enqueue(self, sequence: Sequence) -> None:
        params = sequence.params
        if params.allowed_token_ids is not None or params.bad_words:
            sequence.constraint = TokenConstraint(params, self._vocab_size, sequence.token_tables)
        elif params.reasoning_budget is not None:
            sequence.constraint = ReasoningConstraint(params, self._vocab_size, sequence.token_tables)
        self.scheduler.enqueue(sequence)

    def _check_queue(self, request: AddRequest, account: Account) -> None:
        """Raise QueueFullError unless the queue has places for all of a request's sequences."""
        count, num_waiting = 1 + len(request.siblings), self.num_waiting
        if not request.account.max_waiting and num_waiting + count <= self._max_queue_len:
            return
        check_queue(
            count,
            account.num_waiting,
            num_waiting,
            self.accounts.num_waiting_accounts - (account.num_waiting > 0),
            max_queue_len=self._max_queue_len,
            max_own=request.account.max_waiting,
            retry_after=lambda: self._estimate_retry_after(account),
        )

    def abort(self, request_ids: list[str], client: ClientId) -> None:
        """End these requests of `client` without an output; unknown ids are ignored."""
        for request_id in request_ids:
            sequence = self._sequences.get((client, request_id))
            if sequence is not None:
                self._finish(sequence, "abort", self._clock())

    def step(self) -> Outputs:
        """Submit the next step and take the result of the oldest; -> every client's outputs.

        An asynchronous runner is kept one step ahead: it computes a step while the one before is
        postprocessed and the one after is scheduled. A constrained step is computed ahead like others,
        but chooses its tokens only once the tokens before are known. No step is computed ahead of one with drafts, as
        it is not known which tokens that leaves, or where a draft is likely: then the next one is submitted as soon as
        they are known, and its outputs are returned while it is computed. Without work nothing is done.

        An exception of the runner propagates, and the engine cannot be used afterwards.
        """
        in_flight = self._in_flight
        step = self.schedule()
        outputs = self._take_refusals()
        if step is None and in_flight:
            self._finish_step(outputs, is_awaited=True)
            step = self.schedule(is_awaited=True)
        waited = False
        if step is not None:
            num_graphs, submitted = self._runner.num_awaited_graphs, self._clock()
            running = self._runner.start(step.batch)
            launched = self._clock()
            waited = self._runner.num_awaited_graphs > num_graphs
            in_flight.append((step, running, launched if waited else submitted, bool(in_flight)))
            self.scheduler.record_launch(step, launched - submitted)
        self._emit_late(outputs)
        if step is not None:
            # Nothing above waits for what follows, which may run beside the step.
            self.metrics.record_scheduled(step.batch.num_tokens, step.admitted, len(step.preempted))
            self.scheduler.index_prefixes()
            self.block_manager.store_ahead()
            if self._speculator is not None:
                self._speculator.catch_up()
            if self._tiers is not None and self.scheduler.loading:
                self._tiers.go_on(beside_prompts=not step.is_decode)
        if len(in_flight) > 1:
            self._finish_step(outputs, is_late=waited)
        if step is not None:
            if step.constrained:
                self._learn_drafts(*in_flight[-1][:2])
                self._runner.sample(in_flight[-1][1], self._token_mask(step))
            if not self._runner.asynchronous:
                self._finish_step(outputs)
        for num_tokens, token_gaps in self._unrecorded:
            self.metrics.record_tokens(num_tokens, token_gaps)
        self._unrecorded.clear()
        if step is not None:
            return outputs
        if self._compiling and not outputs and not in_flight and self._grammars is not None:
            self._grammars.wait(list(self._compiling.values()), GRAMMAR_WAIT)
        elif self._adapters is not None and self._adapters.is_reading and not outputs and not in_flight:
            self._adapters.wait(ADAPTER_WAIT)
        elif self._tiers is not None and self.scheduler.loading and not outputs and not in_flight:
            self._tiers.wait()
        return outputs

    def _finish_step(self, outputs: Outputs, *, is_awaited: bool = False, is_late: bool = False) -> None:
        """Take the oldest step's result. Where the device waits for the next one, outputs may be made later.

        `is_late`: the result may have been ready for some time, so the step's duration is not recorded.
        """
        step, running, submitted, ran_ahead = self._in_flight.popleft()
        result = running.result()
        self._learn_drafts(step, running)
        now = self._clock()
        if not is_late:
            self._record_duration(step, submitted, now, ran_ahead=ran_ahead)
        self._last_finished = now
        self.postprocess(step, result, outputs, is_awaited=is_awaited)

    def _record_duration(self, step: ScheduledStep, submitted: float, now: float, *, ran_ahead: bool) -> None:
        self.scheduler.record_duration(step, now - max(submitted, self._last_finished))
        if self._speculator is not None:
            seconds = now - self._last_finished  # what the host does in between counts
            is_typical = bool(step.verified) or ran_ahead or not self._runner.asynchronous
            is_plain = step.is_decode and not step.reads_texts and is_typical
            self._speculator.record_step(len(step.sequences), step.num_draft_tokens, seconds, is_plain=is_plain)

    def _learn_drafts(self, step: ScheduledStep, running: Running) -> None:
        """Wait for draft tokens that only the device knows. Of a constrained sequence those can be accepted that its
        constraint allows, and their masks are known now."""
        unknown = [draft for draft in step.verified if draft.is_unknown]
        if not unknown:
            return
        drafts = running.drafts()
        for draft in unknown:
            sequence = step.sampled[draft.index]
            tokens = drafts[: len(draft.rows), draft.slot].tolist()
            if sequence.constraint is not None and not sequence.is_finished:
                sequence.draft_masks = masks_along(sequence.constraint, tokens, self._grammars)
                tokens = tokens[: len(sequence.draft_masks)]
            draft.tokens, draft.slot = tokens, -1

    def _token_mask(self, step: ScheduledStep) -> TokenMask | None:
        """Masks of the constrained rows, without those of sequences that have ended; None if none is left."""
        masks = [
            (row, sequence.draft_masks[depth - 1] if depth else sequence.constraint.mask)
            for row, sequence, depth in step.constrained
            if sequence.constraint is not None and not sequence.is_finished and depth <= len(sequence.draft_masks)
        ]
        if not masks:
            return None
        rows, words = zip(*masks, strict=True)
        return TokenMask(np.array(rows, np.int32), np.stack(words))

    def schedule(self, *, is_awaited: bool = False) -> ScheduledStep | None:
        """Decide the next step and count its tokens as computed; None if there is nothing to compute yet.

        Where the device waits for it, blocks that no waiting sequence may share are published later.
        """
        if not is_awaited or self.scheduler.waiting:
            self._publish()
        now = self._clock()
        for sequence in [each for each, pending in self._compiling.items() if pending.ready][:MAX_CONSTRAINED]:
            self._constrain(sequence, now)
        if self._adapters is not None and self._adapters.is_reading:
            self._finish_reads(self._adapters, now)
        if self._speculator is not None:
            running = self.scheduler.running
            if self._in_flight and (self._in_flight[-1][0].verified or self._speculator.awaits_tokens(running)):
                return None
            self._speculator.draft(running, self._grammars)
        return self.scheduler.schedule(now)

    def postprocess(
        self, step: ScheduledStep, result: StepResult, outputs: Outputs, *, is_awaited: bool = False
    ) -> None:
        """Append what an executed step sampled and end the sequences that are done with it.

        What it sampled for sequences that had ended before is dropped. Its blocks are published only before a
        sequence ends or the next step is scheduled, so that a long prompt's first token need not wait for it.
        """
        assert len(result.token_ids) == step.batch.num_sampled, "one token for each sampled row"
        now = self._clock()
        token_ids = cast("list[int]", result.token_ids.tolist())
        for sequence in step.sampled:
            sequence.num_pending_tokens -= 1
        num_accepted = self._settle_drafts(step, token_ids)
        if is_awaited and step.verified and self._append_alone(step, token_ids, result, num_accepted, now):
            return
        if token_ids and min(token_ids) < 0:
            self._fail_rows_without_token(step.sampled, token_ids, outputs, now)
        self._unpublished.append(step)
        keep_prompt_logprobs(step.prompt_rows, result.prompt_logprobs)
        emitted = self._append_tokens(step.sampled, token_ids, result.logprobs or repeat(None), {}, outputs, now)
        if num_accepted:
            self._append_accepted(step, token_ids, result.logprobs, num_accepted, emitted, outputs, now)
        self.num_steps += 1

    def _append_alone(
        self,
        step: ScheduledStep,
        token_ids: list[int],
        result: StepResult,
        num_accepted: dict[int, int],
        now: float,
    ) -> bool:
        """Append the tokens of a step after which all its sequences go on, and leave their outputs to `_emit_late`;
        else False, and nothing is done."""
        if step.prompt_rows or result.logprobs is not None or min(token_ids) < 0:
            return False
        chosen = [[token_id] for token_id in token_ids[: len(step.sampled)]]
        for draft in step.verified:
            chosen[draft.index] += [token_ids[row] for row in draft.rows[: num_accepted[draft.index]]]
        pairs = list(zip(step.sampled, chosen, strict=True))
        for sequence, tokens in pairs:
            if sequence.first_token_time is None or sequence.is_finished or sequence.may_end_with(tokens):
                return False
        for sequence, tokens in pairs:
            sequence.token_ids.extend(tokens)
        self._unpublished.append(step)
        self._unemitted = pairs, now
        self.num_steps += 1
        return True

    def _emit_late(self, outputs: Outputs) -> None:
        """Make the outputs that `_append_alone` has left."""
        if self._unemitted is None:
            return
        pairs, now = self._unemitted
        self._unemitted = None
        token_gaps: list[float] = []
        for sequence, tokens in pairs:
            assert sequence.last_token_time is not None, "it has its first token"
            token_gaps += [now - sequence.last_token_time, *[0.0] * (len(tokens) - 1)]  # they came together
            sequence.last_token_time = now
            output = RequestOutput(sequence.request_id, tokens, num_cached_tokens=sequence.num_cached_tokens)
            if sequence.drafting is not None:
                output.num_accepted_draft_tokens = sequence.drafting.num_accepted
                output.num_rejected_draft_tokens = sequence.drafting.num_rejected
            outputs[sequence.client].append(output)
        self._unrecorded.append((len(token_gaps), token_gaps))

    def _settle_drafts(self, step: ScheduledStep, token_ids: list[int]) -> dict[int, int]:
        """Count what was accepted of each draft, by its index, and take the rest back from its sequence."""
        num_accepted: dict[int, int] = {}
        for draft in step.verified:
            count = num_accepted[draft.index] = draft.count_accepted(token_ids)
            sequence = step.sampled[draft.index]
            if self._speculator is not None and sequence.drafting is not None and not sequence.is_finished:
                self._speculator.note_verified(sequence.drafting, draft, count)
            self.scheduler.give_back(sequence, len(draft.rows) - count)
            sequence.draft = []
        if step.filled and step.verified:
            step.filled = [(each, min(count, each.num_computed_tokens)) for each, count in step.filled]
        return num_accepted

    def _append_accepted(
        self,
        step: ScheduledStep,
        token_ids: list[int],
        all_logprobs: list[TokenLogprobs | None] | None,
        num_accepted: dict[int, int],
        emitted: dict[Sequence, RequestOutput],
        outputs: Outputs,
        now: float,
    ) -> None:
        """Append the tokens behind accepted draft tokens to the outputs that were `emitted` for the tokens in front."""
        if any(step.sampled[draft.index].constraint is not None for draft in step.verified):
            for sequences, rows in step.accepted_rows(num_accepted):  # constraints advance together
                chosen = [token_ids[row] for row in rows]
                logprobs = [all_logprobs[row] for row in rows] if all_logprobs is not None else repeat(None)
                self._fail_rows_without_token(sequences, chosen, outputs, now)
                self._append_tokens(sequences, chosen, logprobs, emitted, outputs, now)
            return
        num_tokens = 0
        for draft in step.verified:
            sequence = step.sampled[draft.index]
            for row in draft.rows[: num_accepted[draft.index]]:
                if sequence.is_finished:
                    break
                token_id = token_ids[row]
                if token_id < 0:
                    self._fail_rows_without_token([sequence], [token_id], outputs, now)
                    break
                num_tokens += 1
                finish_reason = sequence.append(token_id)
                output = emitted[sequence]
                output.token_ids.append(token_id)
                if (
                    output.logprobs is not None
                    and all_logprobs is not None
                    and (found := all_logprobs[row]) is not None
                ):
                    output.logprobs.append(found)
                if finish_reason is not None:
                    output.finish_reason = finish_reason
                    output.stop_token_id = token_id if finish_reason == "stop" else None
                    output.decode_time = now - (sequence.first_token_time or now)
                    self._finish(sequence, finish_reason, now)
        self._unrecorded.append((num_tokens, [0.0] * num_tokens))  # they came with the ones in front

    def _append_tokens(
        self,
        sequences: list[Sequence],
        token_ids: list[int],
        all_logprobs: Iterable[TokenLogprobs | None],
        emitted: dict[Sequence, RequestOutput],
        outputs: Outputs,
        now: float,
    ) -> dict[Sequence, RequestOutput]:
        """Append a token to each sequence that has not ended; -> its output, which may be among those `emitted`.

        `token_ids` and `all_logprobs` begin with those of the sequences.
        """
        self._advance_constraints(sequences, token_ids)
        num_tokens = 0
        token_gaps: list[float] = []
        current: dict[Sequence, RequestOutput] = {}
        for sequence, token_id, logprobs in zip(sequences, token_ids, all_logprobs, strict=False):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if sequence.constraint is not None and sequence.constraint.error is not None:
                error = InvalidRequestError(sequence.constraint.error, param=sequence.constraint.param)
                self._fail(sequence, error, outputs, now)
                continue
            num_tokens += 1
            if sequence.last_token_time is None:
                sequence.first_token_time = now
                self.metrics.record_first_token(sequence)
            else:
                token_gaps.append(now - sequence.last_token_time)
            sequence.last_token_time = now
            finish_reason = sequence.append(token_id)
            stop_token_id = token_id if finish_reason == "stop" and token_id in sequence.stop_token_ids else None
            output = emitted.get(sequence) if emitted else None
            if output is None:
                output = RequestOutput(
                    sequence.request_id,
                    [token_id],
                    None if logprobs is None else [logprobs],
                    finish_reason,
                    stop_token_id,
                    sequence.num_cached_tokens,
                    prompt_logprobs=sequence.prompt_logprobs,
                )
                sequence.prompt_logprobs = None
                if sequence.first_token_time == now and sequence.first_scheduled_time is not None:
                    output.queue_time = sequence.first_scheduled_time - sequence.arrival_time
                    output.prefill_time = now - sequence.first_scheduled_time
                if sequence.drafting is not None:
                    output.num_accepted_draft_tokens = sequence.drafting.num_accepted
                    output.num_rejected_draft_tokens = sequence.drafting.num_rejected
                    current[sequence] = output
                outputs[sequence.client].append(output)
            else:
                output.token_ids.append(token_id)
                output.finish_reason, output.stop_token_id = finish_reason, stop_token_id
                if output.logprobs is not None and logprobs is not None:
                    output.logprobs.append(logprobs)
            if finish_reason is not None:
                output.decode_time = now - (sequence.first_token_time or now)
                self._finish(sequence, finish_reason, now)
        self._unrecorded.append((num_tokens, token_gaps))
        return emitted or current

    def _publish(self) -> None:
        for step in self._unpublished:
            self.scheduler.publish(step)
        self._unpublished.clear()

    def _constrain(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence whose grammar has compiled, or refuse it if the grammar is wrong."""
        pending = self._compiling.pop(sequence)
        sequence.account.num_waiting -= 1
        sequence.account.charge(pending.seconds * COST_PER_COMPILE_SECOND)
        try:
            sequence.constraint = GrammarConstraint(
                sequence.params,
                pending.result(),
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                tables=sequence.token_tables,
            )
        except RequestError as error:
            self._fail(sequence, error, self._refusals, now)
        else:
            self.scheduler.enqueue(sequence)

    def _finish_reads(self, adapters: AdapterCatalog, now: float) -> None:
        """Fail the sequences that wait for an adapter which cannot be read again."""
        failed = adapters.finish_reads()
        for sequence in list(self._sequences.values()) if failed else ():
            if sequence.adapter in failed and sequence.status is SequenceStatus.WAITING:
                self._fail(sequence, failed[sequence.adapter], self._refusals, now)

    def _adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Names of those of running and of waiting sequences; may be called from other threads."""
        named = [each for each in list(self._sequences.values()) if each.adapter is not None]
        running = {each.adapter.name for each in named if each.adapter is not None and each.is_running}
        return running, {each.adapter.name for each in named if each.adapter is not None} - running

    def _take_refusals(self) -> Outputs:
        refusals, self._refusals = self._refusals, defaultdict(list)
        return refusals

    def _advance_constraints(self, sampled: list[Sequence], token_ids: list[int]) -> None:
        """Advance constraints past the sampled tokens, before their masks are read."""
        followed = [
            (sequence, sequence.constraint, token_id)
            for sequence, token_id in zip(sampled, token_ids, strict=False)
            if sequence.constraint is not None and not sequence.is_finished
        ]
        if not followed:
            return
        sequences, constraints, chosen = zip(*followed, strict=True)
        were_idle = [constraint.is_idle for constraint in constraints]
        advance_constraints(constraints, chosen, self._grammars)
        for sequence, constraint, was_idle in zip(sequences, constraints, were_idle, strict=True):
            if constraint.is_idle != was_idle:
                self.scheduler.note_constraint(sequence)

    def _fail_rows_without_token(
        self,
        sampled: list[Sequence],
        token_ids: list[int],
        outputs: Outputs,
        now: float,
    ) -> None:
        """Fail each sequence that got no token, before any of its blocks can be shared."""
        for sequence, token_id in zip(sampled, token_ids, strict=False):
            if token_id >= 0 or sequence.is_finished:
                continue
            error: RequestError = EngineError(
                "the model's output for this request was not finite, so it cannot be continued"
            )
            if sequence.constraint is not None and not isinstance(sequence.constraint, ReasoningConstraint):
                param = sequence.constraint.param
                error = InvalidRequestError(f"{param} and the request's other fields leave no token", param=param)
            self._fail(sequence, error, outputs, now)

    def _fail(
        self, sequence: Sequence, error: RequestError, outputs: dict[ClientId, list[RequestOutput]], now: float
    ) -> None:
        output = refused(sequence.request_id, error)
        output.num_cached_tokens = sequence.num_cached_tokens
        outputs[sequence.client].append(output)
        self._finish(sequence, "error", now)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._publish()
        if (pending := self._compiling.pop(sequence, None)) is not None:
            sequence.account.num_waiting -= 1
            pending.give_up()
        if self._speculator is not None and reason != "error":
            completion = sequence.token_ids[sequence.num_prompt_tokens :]
            self._speculator.keep_completion(sequence.prefix_salt, completion, len(self.scheduler.running))
        self.scheduler.finish(sequence, reason)
        self.accounts.close(sequence.account)
        del self._sequences[sequence.client, sequence.request_id]
        self._finish_times.append(now)
        self.metrics.record_finished(sequence, now)

    def _estimate_retry_after(self, account: Account) -> int:
        """Seconds in which the recent throughput serves what waits before a new sequence, from 1 to 60."""
        if not self._finish_times:
            return 1
        elapsed = self._clock() - self._finish_times[0]
        seconds_per_request = elapsed / len(self._finish_times)
        num_before = min(account.num_waiting * max(self.accounts.num_waiting_accounts, 1), self.num_waiting)
        return min(max(math.ceil(num_before * seconds_per_request), 1), MAX_RETRY_AFTER)
