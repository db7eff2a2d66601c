"""The launches of whole steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig, P
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Buffer, Device, HostMemory, Mark, Tensor
from tests.cuda.launches.sm90_device import H200, SHARED_BYTES
from tests.cuda.launches.written import Launch, check_launch
from tests.support.decoder_harness import Row, step_batch

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
BLOCKS_PER_SEQ = MAX_MODEL_LEN // BLOCK_SIZE


class Written:
    """A recording: its launches, written down again with each replay."""

    def __init__(self, device: StepDevice) -> None:
        self.device = device
        self.launches: list[Launch] = []

    def launch(self) -> None:
        self.device.launches += self.launches


class StepDevice(Device):
    """Memory is addresses; what is read from it is 0."""

    name = "cuda:0"
    device_name = "written"
    asynchronous = True
    is_capturing = is_serving = False
    arch, compute_capability, multiprocessors = "90a", (9, 0), H200[0]
    max_shared_bytes = SHARED_BYTES

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.allocated: list[int] = []
        self.compiled: set[tuple[KernelSpec[Any], tuple[str, ...]]] = set()
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._next = 1 << 30

    def allocate(self, nbytes: int) -> Buffer:
        self.allocated.append(nbytes)
        begin, self._next = self._next, self._next + -(-max(nbytes, 1) // 512) * 512
        self._begins.append(begin)
        self._ends.append(begin + nbytes)
        return Buffer(self, begin, nbytes, None)

    def check(self, tensor: Tensor) -> None:
        index = bisect_right(self._begins, tensor.pointer) - 1
        assert index >= 0, f"{tensor} is nowhere"
        assert tensor.pointer + tensor.nbytes <= self._ends[index], f"{tensor} reaches beyond its memory"

    def pinned(self, nbytes: int) -> HostMemory:
        return CPU.pinned(nbytes)

    def event(self) -> Mark:
        return CPU.event()

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None: ...
    def upload_async(self, pointer: int, array: np.ndarray[Any, Any]) -> None: ...
    def copy(self, destination: int, source: int, nbytes: int) -> None: ...
    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...

    def download(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        array[...] = 0

    def download_async(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        array[...] = 0

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return H200[config.cluster - 1]

    def compile(self, pairs: Sequence[tuple[KernelSpec[Any], tuple[str, ...]]], progress: Any = None) -> None:
        self.compiled.update(pairs)

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        launch = Launch(spec, template, config, params)
        if not self.is_serving and not self.is_capturing:
            self.compiled.add((spec, template))  # by the warm-up
        check_launch(launch, self.compiled, self.max_shared_bytes)
        assert spec.supports(self.arch)
        for value in params:
            if isinstance(value, Tensor):
                self.check(value)
        self.launches.append(launch)

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Written]]:
        before, written = self.launches, Written(self)
        self.launches, self.is_capturing = written.launches, True
        yield lambda: written
        self.launches, self.is_capturing = before, False


def batch_of(counts: list[int], contexts: list[int]) -> StepBatch:
    """Rows of `counts` new tokens after `contexts`; decodes and the ends of prompts."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    rows = []
    for slot, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        blocks = list(range(slot * BLOCKS_PER_SEQ, (slot + 1) * BLOCKS_PER_SEQ))
        rows.append(Row(slot, blocks, [5] * (context + count), params, num_computed=context))
    return step_batch(rows, BLOCK_SIZE)


def launches_of(runner: ModelRunner, batch: StepBatch) -> list[Launch]:
    device: Any = runner.device
    device.launches.clear()
    device.allocated.clear()
    runner.start(batch).result()
    assert device.allocated == [], "a step allocates nothing"
    return list(device.launches)
