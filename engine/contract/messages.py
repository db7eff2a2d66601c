"""Messages between app processes and the engine process: msgspec structs, never pickle.

A client (one per app process) is a DEALER socket, the engine a ROUTER; heartbeats go out over a PUB
socket of their own, and the start is reported over a pipe to the supervisor alone. Times are
`time.monotonic()` seconds, one clock for all processes of a machine.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tessera.engine.contract.errors import InvalidRequestError, QueueFullError, RequestError
from tessera.engine.contract.sampling_params import MAX_INT32, MAX_LOGPROBS, MAX_SEED, SamplingParams

EmbedderRole = Literal["main", "beside", "scorer"]  # the served model itself, the encoder beside it, what scores
PREFIX_KEY_BYTES = 8  # of a block's digest, for routers: a collision costs a hit
ScorerForm = Literal["pair", "yes_no"]
FinishReason = Literal["stop", "length", "abort", "error"]
if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]  # int32
else:
    TokenIds = array  # has no parameters before Python 3.12


def request_address(run_dir: str | Path) -> str:
    """The Unix socket at which the engine takes requests; `run_dir` is a folder that only this user can enter."""
    return f"{run_dir}/engine.sock"


def heartbeat_address(run_dir: str | Path) -> str:
    """The Unix socket on which the engine publishes its heartbeats."""
    return f"{run_dir}/heartbeat.sock"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client's first message; the engine answers `Ready` as soon as it is."""


class AccountRef(msgspec.Struct, frozen=True, array_like=True):
    """The account that a request is charged to: a key's, or a client address's on a server without keys.

    Attributes:
        id: from a digest of the key, never the key itself; 0: the account of all that have none.
        weight: accounts with work waiting share the engine in proportion to their weights.
        max_waiting: most of its sequences in the queue; 0: no limit of its own.
        outranks: the priorities of its requests count among all accounts, not among its own alone.
    """

    id: int = 0
    weight: float = 1.0
    max_waiting: int = 0
    outranks: bool = False


NO_ACCOUNT = AccountRef()


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A further sequence of a request: all that differs from the first.

    `prompt_token_ids` is None where the prompt is that of the sequence before.
    """

    request_id: str
    seed: int
    max_tokens: int
    min_tokens: int
    prompt_logprobs: int | None
    prompt_token_ids: TokenIds | None = None

    def verify(self) -> None:
        """Raise InvalidRequestError for a field that is out of range."""
        most_logprobs = self.prompt_logprobs or 0
        if not (
            1 <= self.max_tokens <= MAX_INT32
            and 0 <= self.min_tokens <= self.max_tokens
            and 0 <= self.seed <= MAX_SEED
            and 0 <= most_logprobs <= MAX_LOGPROBS
        ):
            raise InvalidRequestError("a sequence's max_tokens, min_tokens, seed or prompt_logprobs is out of range")


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start one sequence, or several with the same sampling parameters; all of them are queued, or none.

    Every `request_id` is unique among this client's live requests.
    `prompt_token_ids` are sent as bytes: a list would be encoded and decoded number by number.
    `cache_salt` separates prefix caches: blocks are shared only between equal salts.
    `priority`: lower runs first; equal priorities run in order of arrival.
    `num_choices`: completions of each prompt. For metrics.
    `adapter`: the name of the adapter to use; empty for the model itself.
    `prediction_token_ids`: a text that the completions are expected to repeat in large part.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    num_choices: int = 1
    account: AccountRef = NO_ACCOUNT
    siblings: list[Sibling] = []
    adapter: str = ""
    prediction_token_ids: TokenIds | None = None

    @property
    def request_ids(self) -> list[str]:
        return [self.request_id, *(sibling.request_id for sibling in self.siblings)]


class AddEmbedding(msgspec.Struct, frozen=True, tag="embed"):
    """Make a vector of each of these inputs: its embedding, or the logits of a scorer.

    `request_id` is unique among this client's live requests. `first_lengths`: tokens of the first text of each input
    that is a pair; empty where none is.
    """

    request_id: str
    inputs: list[TokenIds]
    role: EmbedderRole = "main"
    first_lengths: list[int] = []
    account: AccountRef = NO_ACCOUNT


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests now and free what they hold; unknown ids are ignored."""

    request_ids: list[str]


class GetMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Ask for the engine's metrics in Prometheus text format."""

    token: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    """Forget cached prefixes; sequences that share one go on. `accounts`: those that these have computed, else all."""

    accounts: list[int] | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Serve the adapter in a folder of this machine under a name; answered by `AdapterDone`.

    `by_server`: no client has chosen it, so --allow-lora-loading need not be given.
    """

    token: int
    name: str
    folder: str
    replace: bool = False
    by_server: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Serve an adapter no more; requests that have begun with it are finished. Answered by `AdapterDone`.

    `by_server`: see `LoadAdapter`.
    """

    token: int
    name: str
    by_server: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new requests, finish the running and waiting ones, then exit with code 0."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Take no new requests, finish those there are, then give the device's memory back; answered by `Slept`."""


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Take the memory again and bring the weights back; answered by `Woken`."""


ClientMessage = (
    Hello
    | AddRequest
    | AddEmbedding
    | AbortRequests
    | GetMetrics
    | ResetPrefixCache
    | LoadAdapter
    | UnloadAdapter
    | Drain
    | Sleep
    | WakeUp
)


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that is served. `folder` is where it was loaded from, `created` the Unix time of that.

    `digest`: SHA-256 of its files.
    """

    name: str
    folder: str
    rank: int
    created: int
    digest: bytes


class EmbeddingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model that makes embeddings; `matryoshka_dimensions` are the lengths it may be cut to, None for none."""

    role: EmbedderRole
    architecture: str
    pooling: str
    dimension: int
    vocab_size: int
    max_input_tokens: int
    matryoshka_dimensions: tuple[int, ...] | None = None


class ScorerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that scores texts or pairs of texts.

    Attributes:
        beside: it is not the served model but one beside it.
        form: a pair is encoded by the tokenizer, or made a question that is answered with yes or no.
        labels: a name for each logit.
        scores: function of the logits that makes the scores: identity, sigmoid, softmax or tanh.
    """

    beside: bool
    form: ScorerForm
    architecture: str
    labels: tuple[str, ...]
    scores: str
    vocab_size: int
    max_input_tokens: int


class OffloadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that stay in host memory: `num_layers` of `num_all_layers`, `nbytes`, which a step copies.

    `copy_seconds`: least time of a step's copies, from the rate measured at the start.
    """

    num_layers: int
    num_all_layers: int
    nbytes: int
    copy_seconds: float


class DraftInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model that drafts tokens; `kv_cache_bytes`: of its part of the KV blocks."""

    architecture: str
    num_parameters: int
    weight_bytes: int
    kv_cache_bytes: int
    num_tokens: int  # most of a draft


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts settled when the engine starts, for logs, /v1/models and request checks.

    `sleep_bytes`: host memory that the model takes while it sleeps; None: it cannot but be ended.
    `num_host_kv_blocks` and `num_disk_kv_blocks`: there is room for in the KV tiers, 0 without.
    """

    device: str
    device_name: str
    num_ranks: int = 1  # that share the model, each on a device of this name
    device_reason: str
    dtype: str
    architecture: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    kv_cache_dtype: str | None = None  # None: `dtype`
    num_host_kv_blocks: int = 0
    num_disk_kv_blocks: int = 0
    weight_bytes: int
    weight_offload: OffloadInfo | None = None
    sleep_bytes: int | None = None
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    load_seconds: float
    generates: bool = True  # False: a model that makes embeddings or scores only
    embeddings: tuple[EmbeddingInfo, ...] = ()
    scorer: ScorerInfo | None = None
    speculates: bool = False  # tokens are drafted
    draft: DraftInfo | None = None  # the model that drafts them
    stored_bytes: dict[str, int] = {}  # of a GGUF file or a quantised checkpoint, by type
    short_rope_len: int = 0  # of the RoPE tables: longer sequences share no prefixes with shorter ones


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A stage of the start: `kernels` or `weights`, with done and total in the stage's own unit."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine can take requests. `epoch` differs between engine processes."""

    epoch: str
    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start; `user_error` tells a ConfigError (do not retry) from a fault."""

    message: str
    user_error: bool


class Slept(msgspec.Struct, frozen=True, tag="slept"):
    """`Sleep` is done; or it could not be, for a reason, and all is as it was."""

    error: str | None = None


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    """`WakeUp` is done. An engine that cannot wake up ends."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the model's own distribution (before any adjustment).

    `top_token_ids` are the most probable tokens, or those that the request names.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """TokenLogprobs of consecutive tokens of a prompt as bytes: a long prompt has millions of numbers.

    `num_top`: alternatives of each token.
    """

    token_ids: bytes  # int32
    logprobs: bytes  # float32
    ranks: bytes  # int32
    num_top: int
    top_token_ids: bytes  # int32
    top_logprobs: bytes  # float32

    @classmethod
    def of(cls, rows: list[TokenLogprobs]) -> PromptScores:
        """`rows` have equal numbers of alternatives."""
        return cls(
            array("i", [row.token_id for row in rows]).tobytes(),
            array("f", [row.logprob for row in rows]).tobytes(),
            array("i", [row.rank for row in rows]).tobytes(),
            len(rows[0].top_token_ids) if rows else 0,
            array("i", [token_id for row in rows for token_id in row.top_token_ids]).tobytes(),
            array("f", [logprob for row in rows for logprob in row.top_logprobs]).tobytes(),
        )

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_bytes(self) -> int:
        return 3 * len(self.token_ids) + 2 * len(self.top_token_ids)

    def part(self, start: int, stop: int) -> PromptScores:
        one, top = slice(4 * start, 4 * stop), slice(4 * start * self.num_top, 4 * stop * self.num_top)
        return PromptScores(
            self.token_ids[one],
            self.logprobs[one],
            self.ranks[one],
            self.num_top,
            self.top_token_ids[top],
            self.top_logprobs[top],
        )

    def rows(self) -> list[TokenLogprobs]:
        """One for each token; for many in a thread, as it takes a microsecond each."""
        top_token_ids, top_logprobs = array("i", self.top_token_ids), array("f", self.top_logprobs)
        places = range(0, len(self) * self.num_top, self.num_top) if self.num_top else [0] * len(self)
        return [
            TokenLogprobs(
                token_id,
                logprob,
                rank,
                top_token_ids[place : place + self.num_top].tolist(),
                top_logprobs[place : place + self.num_top].tolist(),
            )
            for token_id, logprob, rank, place in zip(
                array("i", self.token_ids),
                array("f", self.logprobs),
                array("i", self.ranks),
                places,
                strict=True,
            )
        ]


def rows_of(scores: list[PromptScores]) -> list[TokenLogprobs]:
    return [row for piece in scores for row in piece.rows()]


class RequestOutput(msgspec.Struct, array_like=True):
    """One step's output for one request.

    `finish_reason` is set on the last output only. `stop_token_id` names the id that ended it.
    `prompt_logprobs` comes with the first token, where asked for: one for each prompt token but the first. The first of
    many come ahead, in outputs without a token.
    `queue_time` and `prefill_time` come with it too: seconds from the request's arrival to its first step, and on to
    the first token. `decode_time` comes with the last token: seconds from the first.
    `error` (message) comes with finish_reason "error"; the other `error_*` fields and `retry_after`
    (seconds) go with it and carry a `RequestError` across. The numbers of draft tokens are those up to now.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    error_status: int = 500
    error_param: str | None = None
    error_type: str | None = None
    retry_after: int | None = None
    prompt_logprobs: list[PromptScores] | None = None
    queue_time: float | None = None
    prefill_time: float | None = None
    decode_time: float | None = None
    num_accepted_draft_tokens: int = 0
    num_rejected_draft_tokens: int = 0


class EmbeddingOutput(msgspec.Struct, frozen=True, tag="embedding"):
    """The result of AddEmbedding: little-endian float32 [inputs, dimension], or why there is none.

    `num_bytes_left`: so much of it follows, in further messages of the same request.
    """

    request_id: str
    vectors: memoryview = memoryview(b"")
    refusal: RequestOutput | None = None
    num_bytes_left: int = 0


class EngineTotals(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Counts since the engine's start. Latencies are counts by the buckets of `engine.contract.histogram`."""

    num_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    num_finished: dict[FinishReason, int]
    time_to_first_token: list[int]
    inter_token_latency: list[int]
    e2e_latency: list[int]
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class SchedulerStats(msgspec.Struct, array_like=True):
    """Current gauges, and the engine's totals where it keeps any."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    totals: EngineTotals | None = None


class GpuUsage(msgspec.Struct, frozen=True, array_like=True):
    """Use of the whole device by all processes: bytes, and the share of time a kernel ran (0 to 1) if known."""

    memory_used: int
    memory_total: int
    utilization: float | None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """These sequences are in the queue. Sent for those that have had no output half a second after they came.

    Not sent where a grammar is compiled first.
    """

    request_ids: list[str]


class StepOutputs(msgspec.Struct, tag="outputs"):
    """All of one step's outputs for one client."""

    epoch: str
    outputs: list[RequestOutput]


class PrefixChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the prefix cache: the first PREFIX_KEY_BYTES bytes of blocks' digests, one after the other."""

    stored: bytes = b""
    evicted: bytes = b""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Published twice a second. `num_steps` stands still while a step hangs.

    `has_work`: a step is running or more are to follow. `ready`: requests are taken (false while loading and while
    draining). `draining`: no more will be, for as long as this process lives. `stats_time`: when `stats` were
    true, as a step may take longer than the time between heartbeats. `gpu`: a few seconds old at most; None
    without a GPU, and where nothing is known of it. `prefixes`: since the heartbeat before; None from an engine
    that reports none.
    """

    epoch: str
    num_steps: int
    has_work: bool
    ready: bool
    stats: SchedulerStats | None
    draining: bool = False
    stats_time: float = 0.0
    gpu: GpuUsage | None = None
    prefixes: PrefixChanges | None = None


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """All adapters that are served; sent after `Ready`, and to all clients whenever there are others."""

    adapters: list[AdapterInfo]


class AdapterDone(msgspec.Struct, frozen=True, tag="adapter_done"):
    """Answer to LoadAdapter and UnloadAdapter, after `Adapters`; `refusal` says why nothing has changed."""

    token: int
    refusal: RequestOutput | None = None


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Answer to GetMetrics."""

    token: int
    text: bytes


EngineReport = LoadProgress | Ready | StartFailed | Slept | Woken
EngineMessage = Ready | Accepted | StepOutputs | EmbeddingOutput | Adapters | AdapterDone | Metrics


def client_encoder() -> msgspec.msgpack.Encoder:
    """Encodes a ClientMessage."""
    return msgspec.msgpack.Encoder(enc_hook=array.tobytes)


def client_decoder() -> msgspec.msgpack.Decoder[ClientMessage]:
    """Decodes a ClientMessage; raises MsgspecError for what is none."""
    return msgspec.msgpack.Decoder(ClientMessage, dec_hook=_token_ids)


def _token_ids(kind: type, value: Any) -> TokenIds:
    assert kind is array, f"nothing else than token ids is decoded by a hook, but {kind} was asked for"
    try:
        return array("i", value)
    except OverflowError as error:  # which msgspec would let through
        raise ValueError(str(error)) from None


def refused(request_id: str, error: RequestError) -> RequestOutput:
    """The only output of a request that was not accepted."""
    return RequestOutput(
        request_id=request_id,
        token_ids=[],
        finish_reason="error",
        error=error.message,
        error_code=error.code,
        error_status=error.status,
        error_param=error.param,
        error_type=error.type,
        retry_after=error.retry_after if isinstance(error, QueueFullError) else None,
    )
