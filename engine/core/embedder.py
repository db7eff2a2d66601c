"""Embeddings and scores beside generation: a queue of requests, and passes that take from them in turn.

No device code.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessera.engine.contract.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    RequestError,
)
from tessera.engine.contract.messages import (
    AddEmbedding,
    AddRequest,
    EmbeddingOutput,
    RequestOutput,
    SchedulerStats,
    TokenIds,
    refused,
)
from tessera.engine.core.account import Account, Accounts, check_queue
from tessera.engine.core.prefill_budget import smoothed
from tessera.engine.core.sequence import ClientId

Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

BUSY_SHARE = 4  # while text is generated, a pass has this part of the tokens it may have otherwise
BUSY_SECONDS = 0.02  # likewise, that it may take, unless one text alone or MIN_BUSY_COST takes longer
MIN_BUSY_COST = 64  # of a pass: fewer take the device as long
INPUT_COST = 8  # of a text beside its tokens, in tokens: a CPU computes each on its own
GENERATION_TURNS = 2  # times as long as a pass took, others' generation goes on before the next
VERIFIED_TOGETHER = 2**13  # token ids, at least


class EmbeddingModel(Protocol):
    """Computes a pass: an EmbeddingRunner, a Scorer, or a fake in tests."""

    dimension: int
    vocab_size: int
    max_input_tokens: int
    max_num_tokens: int
    max_num_inputs: int

    def compute(
        self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None
    ) -> Float32Array: ...


class PassTurns:
    """When a pass may come between two steps: generation for other accounts first gets a few times as long as the last
    pass took, so that no account's long inputs delay the others' tokens by more than a third.

    One for all embedders of an engine.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._accounts = accounts
        self._ids: frozenset[int] = frozenset()  # of the accounts that the last pass was for
        self._seconds = 0.0
        self._end = 0.0

    def is_due(self) -> bool:
        if self.clock() >= self._end + GENERATION_TURNS * self._seconds:
            return True
        return not any(account.num_running for id, account in self._accounts.active.items() if id not in self._ids)

    def record_pass(self, accounts: Iterable[Account], begin: float) -> None:
        """A pass for these accounts has ended that began at `begin`."""
        self._ids = frozenset(account.id for account in accounts)
        self._end = self.clock()
        self._seconds = self._end - begin


class PassSize:
    """Limits a pass while text is generated, by the measured time of past passes."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_cost = max_num_tokens // BUSY_SHARE
        self._seconds_per_cost: float | None = None

    @property
    def limit(self) -> float:
        """In tokens, of which each text counts as some more."""
        if not self._seconds_per_cost:
            return self._max_cost
        return min(self._max_cost, max(BUSY_SECONDS / self._seconds_per_cost, MIN_BUSY_COST))

    def record(self, cost: int, seconds: float) -> None:
        self._seconds_per_cost = smoothed(self._seconds_per_cost, seconds / cost)


class _Job:
    """One request in progress."""

    __slots__ = ("account", "client", "num_done", "num_taken", "request", "vectors")

    def __init__(self, request: AddEmbedding, client: ClientId, account: Account, dimension: int) -> None:
        self.request = request
        self.account = account
        self.client = client
        self.num_taken = 0
        self.num_done = 0
        self.vectors = np.empty((len(request.inputs), dimension), np.dtype("<f4"))

    def first_length(self, index: int) -> int:
        """Tokens of the first text of an input, which may be all."""
        lengths = self.request.first_lengths
        return lengths[index] if lengths else len(self.request.inputs[index])


class Embedder:
    """Add and abort requests between passes. Every accepted request ends with exactly one output, unless it is
    aborted.

    A pass takes inputs of the account that was served least, and of its requests one in turn, so that a long list does
    not delay short ones.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        *,
        max_queue_len: int,
        accounts: Accounts | None = None,
        turns: PassTurns | None = None,
    ) -> None:
        """`accounts`: those of the engine, where generation charges them too; `turns`: those of all its embedders."""
        self.num_steps = 0
        self.num_requests = 0
        self.num_tokens = 0
        self._model = model
        self._max_queue_len = max_queue_len
        self._jobs: dict[tuple[ClientId, str], _Job] = {}
        self._accounts = accounts if accounts is not None else Accounts()
        self._turns = turns if turns is not None else PassTurns(self._accounts)
        self._size = PassSize(model.max_num_tokens)
        self._queues: dict[Account, deque[_Job]] = {}  # jobs with inputs left to take

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    @property
    def num_in_hand(self) -> int:
        """Requests that wait or are being computed."""
        return len(self._jobs)

    def add_request(self, request: AddEmbedding, client: ClientId) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: no inputs, an empty one, a wrong token id, or a request id that is in use.
            ContextLengthError: an input is longer than the model takes.
            QueueFullError: as many requests wait as may.
        """
        if (client, request.request_id) in self._jobs:
            raise InvalidRequestError(f"the request id {request.request_id!r} is in use", param="request_id")
        account = self._accounts.find(request.account)
        self._check_queue(request, account)
        if not request.inputs:
            raise InvalidRequestError("input must not be empty", param="input")
        self._verify(request.inputs)
        if request.first_lengths and len(request.first_lengths) != len(request.inputs):
            raise InvalidRequestError("first_lengths must have an entry for each input", param="input")
        job = _Job(request, client, account, self._model.dimension)
        self._jobs[client, request.request_id] = job
        self._accounts.open(account)
        self._queues.setdefault(account, deque()).append(job)

    def abort(self, request_ids: list[str], client: ClientId) -> None:
        """End these requests of `client` without an output; unknown ids are ignored."""
        for request_id in request_ids:
            job = self._jobs.pop((client, request_id), None)
            if job is None:
                continue
            if job.num_taken < len(job.request.inputs):
                self._queues[job.account].remove(job)
                self._drop_if_empty(job.account)
            self._accounts.close(job.account)

    def step(self, *, busy: bool) -> list[tuple[ClientId, EmbeddingOutput]]:
        """One pass; -> the requests that it ended. `busy`: generation waits meanwhile, so the pass is small, and there
        is none while it is generation's turn.

        An exception of the model passes through, and the engine is of no use afterwards.
        """
        if busy and not self._turns.is_due():
            return []
        begin = self._turns.clock()
        picked = self._pick(self._size.limit if busy else None)
        if not picked:
            return []
        vectors = self._model.compute(
            [job.request.inputs[index] for job, index in picked], [job.first_length(index) for job, index in picked]
        )
        self._size.record(sum(_cost(job, index) for job, index in picked), self._turns.clock() - begin)
        self._turns.record_pass((job.account for job, _ in picked), begin)
        self.num_steps += 1
        finite: list[bool] = [bool(np.isfinite(vector).all()) for vector in vectors]
        ended: list[tuple[ClientId, EmbeddingOutput]] = []
        for (job, index), vector, is_finite in zip(picked, vectors, finite, strict=True):
            key = (job.client, job.request.request_id)
            if key not in self._jobs:
                continue
            if not is_finite:
                self.abort([job.request.request_id], job.client)
                error = EngineError(f"the model's output for input {index} was not finite")
                ended.append((job.client, failed(job.request.request_id, error)))
                continue
            job.vectors[index] = vector
            job.num_done += 1
            self.num_tokens += len(job.request.inputs[index])
            if job.num_done == len(job.request.inputs):
                del self._jobs[key]
                self._accounts.close(job.account)
                self.num_requests += 1
                ended.append((job.client, EmbeddingOutput(job.request.request_id, job.vectors.data.cast("B"))))
        return ended

    def _pick(self, max_cost: float | None) -> list[tuple[_Job, int]]:
        """Inputs for a pass that costs at most `max_cost`, or of one input that costs more."""
        picked: list[tuple[_Job, int]] = []
        num_tokens, cost = 0, 0
        while self._queues and len(picked) < self._model.max_num_inputs:
            account = min(self._queues, key=lambda account: account.service)
            job = self._queues[account][0]
            size = len(job.request.inputs[job.num_taken])
            cost += _cost(job, job.num_taken)
            is_full = num_tokens + size > self._model.max_num_tokens or (max_cost is not None and cost > max_cost)
            if picked and is_full:
                break
            picked.append((job, job.num_taken))
            num_tokens += size
            account.charge(size)
            job.num_taken += 1
            self._queues[account].popleft()
            if job.num_taken < len(job.request.inputs):
                self._queues[account].append(job)
            self._drop_if_empty(account)
        return picked

    def _drop_if_empty(self, account: Account) -> None:
        if not self._queues[account]:
            del self._queues[account]

    def _check_queue(self, request: AddEmbedding, account: Account) -> None:
        """Raise QueueFullError unless the queue has a place for the request."""
        num_by_account = Counter(job.account for job in self._jobs.values())
        num_own = num_by_account.pop(account, 0)
        check_queue(
            1,
            num_own,
            len(self._jobs),
            len(num_by_account),
            max_queue_len=self._max_queue_len,
            max_own=request.account.max_waiting,
        )

    def _verify(self, inputs: Sequence[TokenIds]) -> None:
        for token_ids in inputs:
            if not token_ids:
                raise InvalidRequestError("input must not be empty: one of its texts has no tokens", param="input")
            if len(token_ids) > self._model.max_input_tokens:
                raise ContextLengthError(
                    f"the model takes at most {self._model.max_input_tokens} tokens, but an input has {len(token_ids)}",
                    param="input",
                )
        for joined in _joined(inputs):
            if joined.max() >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"input has a token id outside 0 to {self._model.vocab_size - 1}, the model's vocabulary",
                    param="input",
                )


def _cost(job: _Job, index: int) -> int:
    return len(job.request.inputs[index]) + INPUT_COST


def _joined(inputs: Sequence[TokenIds]) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
    """All ids, many inputs at a time: one by one, thousands of short ones hold up the steps for tens of milliseconds.

    Negative ids are beyond every vocabulary here.
    """
    group: list[TokenIds] = []
    size = 0
    for token_ids in inputs:
        group.append(token_ids)
        size += len(token_ids)
        if size >= VERIFIED_TOGETHER:
            yield np.frombuffer(b"".join(group), np.uint32)
            group, size = [], 0
    if group:
        yield np.frombuffer(b"".join(group), np.uint32)


class EmbeddingMetrics(Collector):
    """Counts of the embedders and of what scores since their start, by model name."""

    def __init__(self, embedders: Mapping[str, Embedder], scorers: Mapping[str, Embedder]) -> None:
        self._embedders = embedders
        self._scorers = scorers
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from _counts("embedding", "Requests for embeddings", "embedded", self._embedders)
        yield from _counts("scoring", "Requests for scores", "scored", self._scorers)


def _counts(kind: str, requests_are: str, done: str, embedders: Mapping[str, Embedder]) -> Iterator[Metric]:
    labels = ["model_name"]
    requests = CounterMetricFamily(f"tessera:{kind}_requests", f"{requests_are} that were answered.", labels=labels)
    tokens = CounterMetricFamily(f"tessera:{kind}_tokens", f"Tokens that were {done}.", labels=labels)
    in_hand = GaugeMetricFamily(f"tessera:num_{kind}_requests", f"{requests_are} waiting or running.", labels=labels)
    for name, embedder in embedders.items():
        requests.add_metric([name], embedder.num_requests)
        tokens.add_metric([name], embedder.num_tokens)
        in_hand.add_metric([name], embedder.num_in_hand)
    yield from (requests, tokens, in_hand)


class EmbeddingOnlyCore:
    """The core of an engine without a generating model: refuses every request for text."""

    has_work = False
    num_steps = 0

    def add_request(self, request: AddRequest, client: ClientId) -> None:
        raise InvalidRequestError("this model makes no text: use /v1/embeddings or /v1/rerank", param="model")

    def abort(self, request_ids: list[str], client: ClientId) -> None:
        pass

    def step(self) -> dict[ClientId, list[RequestOutput]]:
        return {}

    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, 0, 0, 0, 0)

    def reset_prefix_cache(self, accounts: Collection[int] | None = None) -> None:
        """There is none."""


def failed(request_id: str, error: RequestError) -> EmbeddingOutput:
    """The only output of a request that was not accepted, or could not be answered."""
    return EmbeddingOutput(request_id, refusal=refused(request_id, error))
