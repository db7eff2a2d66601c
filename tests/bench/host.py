"""What the host does between two steps that the device waits for, without a device: the driver's calls do nothing.

    python -m tests.bench.host [--method suffix] [--streams 1 16] [--profile]

Microseconds from the moment a step's tokens are on the host to the moment the next step is submitted, in steps that
verify drafts, and of the whole of the host's work per step; medians. A model of one small layer is served: the host
does the same for any. To see what it spends its time on, `--profile` prints the functions. Each line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import json
import mmap
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from cuda.bindings import driver

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.cuda.cache import Cubin
from tessera.engine.cuda.compiler import Compiler
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.driver import FoundDevice
from tessera.engine.cuda.events import Event, Graph
from tessera.engine.ipc.load import load_engine
from tessera.engine.runner.sampler import ResultDownload
from tests.bench.models import LLAMA_8B, write_model
from tests.bench.speculation import Held, HeldDrafting, write_head

SMALL = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**LLAMA_8B, **SMALL, "intermediate_size": 512, "vocab_size": 32_000}
GIB = 1 << 30
MAP = (ctypes.c_char * 256)()


class NullDriver:
    """Functions of the driver that succeed at once. Memory is the host's; small copies are made, kernels are not run."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self.patches = [mock.patch.object(driver, name, self._function(name)) for name in dir(driver) if _is_call(name)]

    def _function(self, name: str) -> Callable[..., Any]:
        found = getattr(self, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
        return lambda *_: (0, 1)

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        memory = mmap.mmap(-1, max(nbytes, 1))
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[pointer] = memory
        return 0, pointer

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        return self._allocate(nbytes)

    def cuMemHostAlloc(self, nbytes: int, _flags: int) -> tuple[int, int]:
        return self._allocate(nbytes)

    @staticmethod
    def cuMemGetInfo() -> tuple[int, int, int]:
        return 0, 8 * GIB, 8 * GIB

    @staticmethod
    def cuDeviceTotalMem(_device: Any) -> tuple[int, int]:
        return 0, 8 * GIB

    @staticmethod
    def cuMemcpyHtoDAsync(target: int, source: int, nbytes: int, _stream: Any) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    @staticmethod
    def cuMemcpyDtoHAsync(target: int, source: int, nbytes: int, _stream: Any) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    @staticmethod
    def cuModuleGetFunction(_module: Any, name: bytes) -> tuple[int, bytes]:
        return 0, name

    @staticmethod
    def cuTensorMapEncodeTiled(*_: Any) -> tuple[int, Any]:
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(MAP))

    @staticmethod
    def cuDeviceGetName(*_: Any) -> tuple[int, bytes]:
        return 0, b"nothing\0"

    @staticmethod
    def cuDeviceGetAttribute(attribute: Any, _device: Any) -> tuple[int, int]:
        known = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
        known["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 227 << 10
        return 0, known.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1 << 31)

    @staticmethod
    def cuLaunchKernel(function: Any, *given: Any) -> tuple[int]:
        if function == b"copy_bytes_kernel":
            source, target, size = _parameters(given[-2])
            ctypes.memmove(target.value, source.value, size.value)
        return (0,)


@lru_cache(maxsize=1024)
def _parameters(address: int) -> list[ctypes.c_int64]:
    places = (ctypes.c_void_p * 3).from_address(address)
    return [ctypes.c_int64.from_address(place) for place in places]


def _is_call(name: str) -> bool:
    return name.startswith("cu") and name[2:3].isupper() and callable(getattr(driver, name)) and not isinstance(getattr(driver, name), type)


for _name in ("cuLaunchKernelEx", "cuGraphLaunch", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize",
    "cuCtxSetCurrent", "cuFuncSetAttribute", "cuMemFree", "cuMemFreeHost", "cuMemsetD8Async", "cuMemcpyDtoDAsync",
    "cuStreamBeginCapture", "cuGraphDestroy", "cuGraphExecDestroy", "cuEventDestroy", "cuStreamWaitEvent", "cuCtxPushCurrent"):
    setattr(NullDriver, _name, staticmethod(lambda *_: (0,)))


class Times:
    """When results came and what was submitted after them."""

    def __init__(self) -> None:
        self.came = 0.0
        self.first: list[float] = []
        self.last: list[float] = []
        self.graphs = 0
        self.on = False
        self.profile: cProfile.Profile | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.host", description=__doc__)
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--spy", action="store_true")
    parser.add_argument("--sort", default="tottime")
    given = parser.parse_args()
    null = NullDriver()
    for patch in null.patches:
        patch.start()
    mock.patch("tessera.engine.cuda.device.find_device", lambda index: FoundDevice(True, "nothing")).start()
    mock.patch("tessera.engine.cuda.driver.find_device", lambda index=0: FoundDevice(True, "nothing")).start()
    mock.patch.object(Compiler, "compile", lambda self, program: Cubin(b"", {n: n.split("<")[0] for n in program.names})).start()
    times = Times()
    launch, result, start = Graph.launch, ResultDownload.result, None

    def noted_launch(self: Graph) -> None:
        launch(self)
        if times.on and times.came:
            now = time.perf_counter()
            times.graphs += 1
            if times.graphs == 1:
                times.first.append(now - times.came)
            times.latest = now

    def noted_result(self: ResultDownload) -> Any:
        self._arrived.synchronize()
        if times.on:
            if times.graphs:
                times.last.append(times.latest - times.came)
            times.graphs = 0
            times.came = time.perf_counter()
            if times.profile:
                times.profile.enable()
        return result(self)

    with tempfile.TemporaryDirectory() as root, Held(0.8, 1):
        HeldDrafting.is_computed = given.method in MODEL_METHODS
        folder = write_model(Path(root), "llama-8b", SMALL)
        model = {}
        if given.method == "eagle3":
            model["speculative_model"] = str(write_head(Path(root), SMALL))
        config = EngineConfig(model=str(folder), device="cuda", load_format="dummy", max_num_seqs=max(given.streams),
            max_num_batched_tokens=2048, max_model_len=4096, num_kv_blocks=20000, speculation="on",
            speculative_method=given.method, seed=1, **model)
        core = load_engine(config, lambda *_: None).core
        assert isinstance(core, EngineCore)
        gc.collect(); gc.freeze()
        runner = core._runner._runner
        chosen = runner._sampler._chosen
        tokens = (ctypes.c_int32 * chosen.size).from_address(chosen.pointer)
        tokens = np.ctypeslib.as_array(tokens)
        rng = np.random.default_rng(0)
        draws = rng.integers(3, 1000, (512, chosen.size)).astype(np.int32)
        Graph.launch, ResultDownload.result = noted_launch, noted_result
        marks = {}
        def spy(owner, name, label=None):
            label = label or name
            inner = getattr(owner, name)
            def outer(*a, **k):
                b = time.perf_counter()
                r = inner(*a, **k)
                e = time.perf_counter()
                if times.on and times.came and times.graphs == 0 or label in ("launch",):
                    marks.setdefault(label, []).append((e - b, b - times.came))
                return r
            setattr(owner, name, outer)
        if given.spy:
            from tessera.engine.speculation.speculator import Speculator
            from tessera.engine.core.scheduler import Scheduler
            from tessera.engine.core.slot_table import SlotTable, DrafterSteps
            from tessera.engine.runner.step_inputs import StepInputs
            from tessera.engine.runner.upload import StepUpload
            from tessera.engine.speculation.suffixes import SuffixDrafter
            from tessera.engine.runner.cuda_graphs import StepGraphs
            from tessera.engine.runner.draft_runner import DraftDownload
            spy(EngineCore, "postprocess"); spy(EngineCore, "_settle_drafts"); spy(EngineCore, "_append_tokens"); spy(EngineCore, "_append_accepted")
            spy(Speculator, "draft"); spy(Speculator, "record_step"); spy(Scheduler, "schedule"); spy(SlotTable, "gather"); spy(SlotTable, "_gather_verified")
            spy(SuffixDrafter, "propose"); spy(SuffixDrafter, "_read"); spy(StepGraphs, "find"); spy(StepInputs, "write"); spy(StepUpload, "submit", "upload")
            spy(type(runner), "start", "start"); spy(type(runner), "_submit"); spy(EngineCore, "schedule", "core.schedule"); spy(EngineCore, "_publish")
            spy(DrafterSteps, "gather_first"); spy(DrafterSteps, "gather_later"); spy(DrafterSteps, "_first_of_few"); spy(EngineCore, "_learn_drafts")
            spy(Scheduler, "record_duration")
            spy(CudaDevice, "copy_small")
            spy(Scheduler, "_schedule_running")
            spy(HeldDrafting, "propose", "drafting.propose")
        if given.profile:
            runner_start = type(runner).start
            times.profile = cProfile.Profile()
            def profiled(self, batch):
                found = runner_start(self, batch)
                times.profile.disable()
                return found
            type(runner).start = profiled
        for streams in given.streams:
            params = SamplingParams(max_tokens=given.tokens, temperature=0.0, ignore_eos=True)
            from array import array
            for n in range(streams):
                prompt = rng.integers(3, 200, 128).tolist()
                core.add_request(AddRequest(f"{streams}-{n}", array("i", prompt), params, time.monotonic()), b"c")
            step = 0
            whole = []
            times.first.clear(); times.last.clear()
            while core.has_work:
                tokens[:] = draws[step % 512]
                step += 1
                times.on = step > 20
                begin = time.perf_counter()
                core.step()
                whole.append(time.perf_counter() - begin)
            def q(values): 
                values = sorted(values); return [round(values[int(len(values) * p)] * 1e6, 1) for p in (0.05, 0.25, 0.5)]
            print(json.dumps({"streams": streams, "steps": step, "first": q(times.first), "last": q(times.last), "whole": q(whole)}), flush=True)
        for label, found in sorted(marks.items(), key=lambda kv: statistics.median(f[1] for f in kv[1])):
            print(f"{label:24s} n {len(found):5d}  at {sorted(f[1] for f in found)[len(found)//10]*1e6:7.1f}  takes {sorted(f[0] for f in found)[len(found)//10]*1e6:7.1f}")
        if times.profile:
            stats = pstats.Stats(times.profile)
            n = len(times.first)
            print("n", n)
            stats.sort_stats(given.sort).print_stats(45)


if __name__ == "__main__":
    main()
