"""An engine core on virtual time: its steps take what they were measured to take on one H200, and compute nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.prefill_budget import DecodeReads
from tessera.engine.core.scheduler import Scheduler
from tessera.engine.core.step_batch import Int32Array, StepBatch, StepResult
from tessera.engine.runner.cuda_graphs import FULL_TOKENS, PROMPT_SEQS, PROMPT_TOKENS

CLIENT = b"client"
STEP_SECONDS = 0.25e-3  # that every step takes besides
SMALLER_SHARE = 0.15  # of the shorter of reading weights and multiplying, which the longer does not hide
MAX_GRAPH_TOKENS = FULL_TOKENS[-1]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts; one with prompts is padded to the tokens of a graph.

    Attributes:
        weights: reading them all.
        token: multiplying them by one token.
        seen: a prompt's token attending to one that it sees.
        cached: a decode attending to one token.
        prompts, mixed: more for a step with prompts, and for one with decodes beside them.
        launch: of the host, for a step of more than MAX_GRAPH_TOKENS, whose kernels it launches one by one.
        capture: of the host, for the first step with prompts of a shape, whose graph it captures.
    """

    weights: float
    token: float
    seen: float
    cached: float
    prompts: float
    mixed: float
    launch: float
    capture: float = 0.0

    def seconds(self, counts: np.ndarray[tuple[int], np.dtype[np.int64]], contexts: StepBatch) -> float:
        """Of a step with `counts` tokens of each row."""
        lens = contexts.context_lens
        is_prompt = counts > 1
        num_tokens = int(counts.sum())
        if is_prompt.any() and num_tokens <= MAX_GRAPH_TOKENS:
            num_tokens = PROMPT_TOKENS[bisect_left(PROMPT_TOKENS, num_tokens)]
        weights, products = self.weights, num_tokens * self.token
        total = STEP_SECONDS + max(weights, products) + SMALLER_SHARE * min(weights, products)
        total += (counts * (lens - counts / 2))[is_prompt].sum() * self.seen + lens[~is_prompt].sum() * self.cached
        if is_prompt.any():
            total += self.prompts + (0 if is_prompt.all() else self.mixed)
        return float(total)


# In bfloat16, fitted to the loads of docs/figures/serving.json: prompts of 128 to 32,768 tokens alone, and streams of
# 512/256, 16 to 256 of them. They give the 8 B's rates within 4 % and its first tokens within 25 %, the 0.6 B's rates
# within 12 %. 256 prompts of 512 tokens that came at once showed what launching takes.
LLAMA_8B = StepCosts(3.7e-3, 21e-6, 1.0e-9, 131072 / 4.0e12, 1.5e-3, 0.5e-3, 12.5e-3)
# In FP8 with an FP8 cache, fitted to steps of none or 28 decodes after 6,100 tokens with 0 or 64 to 6,000 tokens of a
# prompt, before which 0 or 3,000 come: 36 steps within 10 %, 3 % on average (2026-11-29, one H200).
LLAMA_8B_FP8 = StepCosts(2.2e-3, 13.4e-6, 0.8e-9, 65536 / 3.6e12, 0.7e-3, 0.0, 12.5e-3)
QWEN3_06B = StepCosts(0.45e-3, 2.0e-6, 0.46e-9, 114688 / 4.0e12, 0.3e-3, 0.4e-3, 13e-3)


@dataclass
class Submitted:
    engine: VirtualEngine
    end: float
    num_sampled: int

    def result(self) -> StepResult:
        self.engine.now = max(self.engine.now, self.end)
        return StepResult(np.full(self.num_sampled, 5, np.int32), None, [])

    def drafts(self) -> Int32Array:
        raise AssertionError("nothing is drafted")


@dataclass
class VirtualEngine:
    """A core and the clock that its steps move on; `patch` may change its scheduler."""

    costs: StepCosts
    patch: Callable[[Scheduler], None] | None = None
    now: float = 100.0
    asynchronous: bool = True
    full_sizes: tuple[int, ...] = FULL_TOKENS
    sent: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # of each request's tokens
    _captured: set[tuple[int, int]] = field(default_factory=set)
    _free: float = 0.0  # when the device has done what was submitted

    def __post_init__(self) -> None:
        config = EngineConfig(model="virtual", max_num_seqs=256, max_num_batched_tokens=8192, prefix_caching=False)
        self.core = EngineCore(
            config,
            self,
            vocab_size=1000,
            max_model_len=40_000,
            num_kv_blocks=60_000,
            eos_token_ids=(0,),
            clock=lambda: self.now,
            reads=DecodeReads(self.costs.cached / self.costs.weights),
        )
        if self.patch is not None:
            self.patch(self.core.scheduler)

    def start(self, batch: StepBatch) -> Submitted:
        begin = max(self._free, self.now)
        if batch.num_tokens > MAX_GRAPH_TOKENS:
            self.now += self.costs.launch
        elif batch.num_tokens > batch.num_seqs:
            shape = bisect_left(PROMPT_TOKENS, batch.num_tokens), bisect_left(PROMPT_SEQS, batch.num_seqs + 1)
            if shape not in self._captured:
                self._captured.add(shape)
                self.now += self.costs.capture
        self._free = max(begin + self.costs.seconds(np.diff(batch.cu_seqlens_q), batch), self.now)
        return Submitted(self, self._free, batch.num_sampled)

    @property
    def num_awaited_graphs(self) -> int:
        return len(self._captured)

    def sample(self, running: object, mask: object) -> None:
        raise AssertionError("nothing is constrained")

    def submit(self, name: str, input_len: int, output_len: int) -> None:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        self.core.add_request(AddRequest(name, array("i", [7] * input_len), params, self.now), CLIENT)
        self.sent[name], self.times[name] = self.now, []

    def step(self) -> int:
        """-> requests that have ended."""
        num_done = 0
        for output in self.core.step().get(CLIENT, []):
            self.times[output.request_id] += [self.now] * len(output.token_ids)
            num_done += output.finish_reason is not None
        return num_done


def fill_steps(scheduler: Scheduler) -> None:
    """As a `patch`: each step takes as much of the prompts as it holds, as vLLM's do."""
    scheduler._prompt_token_budget = lambda: scheduler.max_num_batched_tokens  # type: ignore[method-assign]


@dataclass(frozen=True)
class Latencies:
    """Of a load, in seconds; each an array over requests, or over all gaps between tokens."""

    throughput: float  # output tokens a second
    ttft: np.ndarray[tuple[int], np.dtype[np.float64]]
    tpot: np.ndarray[tuple[int], np.dtype[np.float64]]
    itl: np.ndarray[tuple[int], np.dtype[np.float64]]


def run_load(
    costs: StepCosts,
    streams: int,
    input_len: int,
    output_len: int,
    num_prompts: int,
    patch: Callable[[Scheduler], None] | None = None,
) -> Latencies:
    """Streams that each send the next prompt when the last one has been answered."""
    engine = VirtualEngine(costs, patch)
    for length in (input_len, 512, 512):  # what steps cost is learnt from these
        engine.submit("lesson", length, 16)
        while engine.core.has_work:
            engine.step()
    engine.sent.clear()
    engine.times.clear()
    begin, num_sent = engine.now, 0
    for _ in range(min(streams, num_prompts)):
        engine.submit(f"prompt{num_sent}", input_len, output_len)
        num_sent += 1
    while engine.core.has_work:
        for _ in range(min(engine.step(), num_prompts - num_sent)):
            engine.submit(f"prompt{num_sent}", input_len, output_len)
            num_sent += 1
    times = list(engine.times.values())
    return Latencies(
        throughput=sum(map(len, times)) / (engine.now - begin),
        ttft=np.array([engine.times[name][0] - sent for name, sent in engine.sent.items()]),
        tpot=np.array([(each[-1] - each[0]) / (len(each) - 1) for each in times]),
        itl=np.concatenate([np.diff(each) for each in times]),
    )
