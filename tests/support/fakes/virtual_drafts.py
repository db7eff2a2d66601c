"""An engine core that verifies drafts on virtual time, whose acceptance is held."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import SpeculationMode
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import Int32Array, StepBatch, StepResult
from tessera.engine.runner.cuda_graphs import FULL_TOKENS
from tests.support.fakes.virtual_engine import CLIENT

# Milliseconds of a step of so many rows of Llama 8 B in bfloat16 on one H200, and of the host in front of a step and
# behind it, in any case and for each sequence.
ROWS = (1, 8, 16, 64, 128, 256, 320, 512, 1024, 2048)
STEP_MS = (3.75, 4.0, 4.11, 5.1, 5.7, 9.4, 10.0, 14.0, 22.0, 44.0)
HOST_MS = (0.15, 0.005)
HOST_MS_OF_DRAFTS = (0.18, 0.03)
PROMPT_LEN = 64


@dataclass
class Submitted:
    engine: DraftedEngine
    end: float
    num_sampled: int
    host_seconds: float

    def result(self) -> StepResult:
        self.engine.now = max(self.engine.now, self.end) + self.host_seconds / 2
        return StepResult(np.full(self.num_sampled, 5, np.int32), None, [])

    def drafts(self) -> Int32Array:
        raise AssertionError("no model drafts")


class DraftedEngine:
    """`more`: seconds that a step takes besides, by its batch."""

    asynchronous = True
    full_sizes = FULL_TOKENS
    num_awaited_graphs = 0

    def __init__(self, mode: SpeculationMode, more: Callable[[StepBatch], float] = lambda batch: 0.0) -> None:
        self.now = 100.0
        self._more = more
        self._free = 0.0  # when the device has done what was submitted
        self._num_sent = 0
        config = EngineConfig(
            model="virtual",
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            prefix_caching=False,
            speculation=mode,
        )
        self.core = EngineCore(
            config,
            self,
            vocab_size=1000,
            max_model_len=4000,
            num_kv_blocks=20_000,
            eos_token_ids=(0,),
            clock=lambda: self.now,
        )

    def start(self, batch: StepBatch) -> Submitted:
        num_seqs = len(batch.context_lens)
        fixed, each = HOST_MS_OF_DRAFTS if batch.num_sampled > num_seqs else HOST_MS
        host_seconds = (fixed + each * num_seqs) * 1e-3
        self.now += host_seconds / 2
        seconds = float(np.interp(batch.num_tokens, ROWS, STEP_MS)) * 1e-3 + self._more(batch)
        self._free = max(self._free, self.now) + seconds
        return Submitted(self, self._free, batch.num_sampled, host_seconds)

    def sample(self, running: object, mask: object) -> None:
        raise AssertionError("nothing is constrained")

    def serve(self, streams: int, num_tokens: int) -> float:
        """-> tokens a second from the step on after which each of `streams` sequences has its first."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for number in range(self._num_sent, self._num_sent + streams):
            prompt = array("i", [3 + number % 200, *range(3, 2 + PROMPT_LEN)])
            self.core.add_request(AddRequest(str(number), prompt, params, self.now), CLIENT)
        self._num_sent += streams
        counts: dict[str, int] = {}
        begun = first = 0.0
        while self.core.has_work:
            for output in self.core.step().get(CLIENT, []):
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
            if not begun and len(counts) == streams:
                begun, first = self.now, sum(counts.values())
        return (sum(counts.values()) - first) / (self.now - begun)
