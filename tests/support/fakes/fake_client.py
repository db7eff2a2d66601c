"""A stand-in for the engine's client: scripted tokens, everything that was submitted on record."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    AdapterInfo,
    EngineInfo,
    GpuUsage,
    RequestOutput,
    SchedulerStats,
    TokenIds,
    TokenLogprobs,
)
from tessera.engine.contract.sampling_params import SamplingParams

INFO = EngineInfo(
    device="cpu",
    device_name="fake",
    device_reason="asked for",
    dtype="float32",
    architecture="FakeForCausalLM",
    vocab_size=512,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    block_size=16,
    num_kv_blocks=64,
    kv_cache_bytes=0,
    weight_bytes=0,
    num_parameters=1,
    eos_token_ids=(0,),
    load_seconds=0.0,
)


class Submission:
    """One sequence of a call of `submit_all`, and the stream it returned."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        account: AccountRef,
        adapter: str,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.account = account
        self.adapter = adapter
        self.prediction: list[int] | None = None
        self.aborted = threading.Event()


Script = Callable[[Submission], Iterable[RequestOutput | Exception]]


class FakeStream:
    """Plays a script; with `hang`, waits after it until it is aborted."""

    def __init__(self, submission: Submission, script: Iterable[RequestOutput | Exception], *, hang: bool) -> None:
        self.submission = submission
        self._outputs = iter(script)
        self._hang = hang
        self._ended = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self._ended:
            raise StopAsyncIteration
        for output in self._outputs:
            if isinstance(output, Exception):
                self._ended = True
                raise output
            self._ended = output.finish_reason is not None
            return output
        if self._hang:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    async def wait_accepted(self, seconds: float = math.inf) -> None:
        """An error at the beginning of the script is the engine's refusal."""
        await asyncio.sleep(0)
        first = next(self._outputs, None)
        if isinstance(first, Exception):
            self._ended = True
            raise first
        if first is not None:
            self._outputs = itertools.chain([first], self._outputs)

    async def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self.submission.aborted.set()


class FakeClient:
    """`script` makes each submission's outputs; the attributes say how the engine is doing."""

    def __init__(self, script: Script, *, info: EngineInfo | None = INFO, hang: bool = False) -> None:
        self.info = info
        self.adapters: dict[str, AdapterInfo] | None = None
        self.ready = True
        self.well = True
        self.script = script
        self.hang = hang
        self.gpu: GpuUsage | None = None
        self.history: deque[tuple[float, SchedulerStats]] = deque()
        self.submissions: list[Submission] = []
        self.submitted = threading.Event()
        self.num_resets = 0
        self.reset_accounts: list[int] | None = None

    def health(self) -> tuple[bool, str]:
        return self.well, "the engine is ready" if self.well else "the engine is starting"

    def submit_all(
        self,
        sequences: Sequence[tuple[TokenIds, SamplingParams]],
        *,
        priority: int = 0,
        cache_salt: str = "",
        num_choices: int = 1,
        account: AccountRef = NO_ACCOUNT,
        adapter: str = "",
        prediction: TokenIds | None = None,
    ) -> list[FakeStream]:
        if not self.well:
            raise EngineUnavailableError("the engine is starting; please try again later")
        streams = []
        for prompt, params in sequences:
            submission = Submission(prompt.tolist(), params, priority, cache_salt, account, adapter)
            submission.prediction = None if prediction is None else prediction.tolist()
            self.submissions.append(submission)
            streams.append(FakeStream(submission, self.script(submission), hang=self.hang))
        self.submitted.set()
        return streams

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False, by_server: bool = False) -> None:
        self.adapters = {**(self.adapters or {}), name: AdapterInfo(name, folder, 16, 1, b"digest")}

    async def unload_adapter(self, name: str, *, by_server: bool = False) -> None:
        self.adapters = {key: value for key, value in (self.adapters or {}).items() if key != name}

    def reset_prefix_cache(self, accounts: list[int] | None = None) -> None:
        self.num_resets += 1
        self.reset_accounts = accounts

    async def metrics(self) -> bytes:
        if not self.well:
            raise EngineUnavailableError("the engine is starting")
        return b"# HELP tessera:x X.\n# TYPE tessera:x counter\ntessera:x 1\n"


def play(
    token_ids: Sequence[int],
    *,
    finish: str | None = "stop",
    stop_token_id: int | None = None,
    per_output: int = 1,
    logprobs: bool = False,
    num_cached_tokens: int = 0,
) -> list[RequestOutput]:
    """Outputs that bring `token_ids`, `per_output` at a time, the last with the finish reason."""
    outputs = []
    for start in range(0, len(token_ids), per_output):
        piece = list(token_ids[start : start + per_output])
        rows = [TokenLogprobs(i, -0.5, 1, [i, 1], [-0.5, float("-inf")]) for i in piece] if logprobs else None
        outputs.append(RequestOutput("fake", piece, rows, num_cached_tokens=num_cached_tokens))
    outputs[-1] = msgspec.structs.replace(outputs[-1], finish_reason=finish, stop_token_id=stop_token_id)
    return outputs


def always(outputs: Sequence[Any]) -> Script:
    return lambda submission: [output if isinstance(output, Exception) else _copy(output) for output in outputs]


def _copy(output: RequestOutput) -> RequestOutput:
    return msgspec.structs.replace(output, token_ids=list(output.token_ids))
