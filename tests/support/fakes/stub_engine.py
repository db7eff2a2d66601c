"""An engine process without a model, run as `python -m tests.support.fakes.stub_engine`: the real process, a stub core.

A request's tokens count up from its last prompt token. Prompts that begin with one of the ids below,
and models with one of the names below, misbehave as named.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ContextLengthError, OutOfMemoryError, QueueFullError
from tessera.engine.contract.messages import AddRequest, EngineInfo, RequestOutput, SchedulerStats
from tessera.engine.ipc.loaded_engine import LoadedEngine, Progress
from tessera.engine.ipc.process import serve

HANGS, FAILS, IS_ONE_TOO_MANY, IS_TOO_LONG, FAILS_ALONE, BREAKS_ADD, WAITS = range(9001, 9008)
STEP_SECONDS = 0.001
RESTLESS, DROWSY = "cannot sleep", "cannot wake up"
SLOW_METRICS = "slow metrics"  # their text is never finished
VOCAB_SIZE = 10_000


@dataclass
class Running:
    request: AddRequest
    client: bytes
    num_output_tokens: int = 0


class StubCore:
    def __init__(self) -> None:
        self.num_steps = 0
        self.resets: list[Collection[int] | None] = []
        self._running: dict[tuple[bytes, str], Running] = {}
        self._pause = threading.Event()

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add_request(self, request: AddRequest, client: bytes) -> None:
        first = request.prompt_token_ids[0]
        if first == IS_ONE_TOO_MANY:
            raise QueueFullError("too many requests are waiting", retry_after=7)
        if first == IS_TOO_LONG:
            raise ContextLengthError("the prompt is too long", param="messages")
        if first == BREAKS_ADD:
            raise KeyError("a bug")
        self._running[client, request.request_id] = Running(request, client)

    def abort(self, request_ids: list[str], client: bytes) -> None:
        for request_id in request_ids:
            self._running.pop((client, request_id), None)

    def step(self) -> dict[bytes, list[RequestOutput]]:
        self._pause.wait(STEP_SECONDS)
        outputs: dict[bytes, list[RequestOutput]] = {}
        for key, running in list(self._running.items()):
            if running.request.prompt_token_ids[0] == WAITS:
                continue
            output = self._advance(running)
            outputs.setdefault(running.client, []).append(output)
            if output.finish_reason is not None:
                del self._running[key]
        self.num_steps += 1
        return outputs

    def _advance(self, running: Running) -> RequestOutput:
        request = running.request
        first = request.prompt_token_ids[0]
        if first == HANGS:
            self._pause.wait()
        if first == FAILS:
            raise RuntimeError("the stub device failed")
        if first == FAILS_ALONE:
            return RequestOutput(request.request_id, [], finish_reason="error", error="the logits are not finite")
        running.num_output_tokens += 1
        done = running.num_output_tokens == request.sampling_params.max_tokens
        return RequestOutput(
            request.request_id,
            [(request.prompt_token_ids[-1] + running.num_output_tokens) % VOCAB_SIZE],
            finish_reason="length" if done else None,
        )

    def reset_prefix_cache(self, accounts: Collection[int] | None = None) -> None:
        self.resets.append(accounts)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), 0, 0, 0, 0)


class StubSleeper:
    """Fails to sleep, or to wake up, where the model's name says so."""

    def __init__(self, model: str) -> None:
        self._model = model

    def sleep(self) -> None:
        if self._model == RESTLESS:
            raise MemoryError("no memory can be locked")

    def wake_up(self) -> None:
        if self._model == DROWSY:
            raise OutOfMemoryError("the stub device's memory is taken")


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    config = config.with_device_defaults("cpu")
    if config.model == "unsupported":
        raise ConfigError("the architecture Unheard-of is not supported; supported are: Llama")
    if config.model == "faulty":
        raise RuntimeError("the stub device is broken")
    if config.model == "crashing":
        sys.stderr.flush()
        sys.exit(9)
    for done in range(1, 4):
        progress("weights", done, 3)
    info = EngineInfo(
        device="cpu",
        device_name="a stub",
        device_reason="it was asked for",
        dtype="float32",
        architecture="StubForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_model_len=2048,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_kv_blocks=128,
        kv_cache_bytes=1 << 20,
        weight_bytes=3_000_000,
        num_parameters=750_000,
        eos_token_ids=(2,),
        load_seconds=0.25,
    )
    core = StubCore()

    def render_metrics() -> bytes:
        if config.model == SLOW_METRICS:
            threading.Event().wait()
        return f"stub_steps_total {core.num_steps}\n# resets {core.resets}\n".encode()

    return LoadedEngine(core, info, render_metrics, sleeper=StubSleeper(config.model) if config.can_sleep else None)


if __name__ == "__main__":
    sys.exit(serve(load))
