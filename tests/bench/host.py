"""Host time between two steps while the device waits, measured without a device: the driver's calls do nothing.

    python -m tests.bench.host --method suffix --streams 1 4 [--profile]

Microseconds from the moment at which a verified step's tokens have come to the submission of the next step's `first`
CUDA graph and of its `last`, and of a `whole` turn of the engine's thread; 5th percentile and median. The model is
small, which is all the same to the host, its tokens are random, and acceptance is held as `tests.bench.speculation`
does it. What a real driver's calls take is not in it. `--profile` prints the functions up to the first submission.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import json
import mmap
import pstats
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tessera.engine.cuda.compiler import Compiler, Program
from tessera.engine.cuda.driver import FoundDevice
from tessera.engine.cuda.events import Graph
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.turns import TimedRunner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.sampler import ResultDownload
from tests.bench.models import LLAMA_8B, write_model
from tests.bench.speculation import Held, HeldDrafting, write_head

MODEL: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 32_000,
}
GIB = 1 << 30
TENSOR_MAP = (ctypes.c_char * 256)()
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
}
WARM_UP = 20  # steps


class NullDriver:
    """Functions of the driver that succeed at once. Memory is the host's, kernels are not run but those that copy."""

    def __init__(self) -> None:
        self._memory: list[mmap.mmap] = []
        self._functions: dict[str, Callable[..., Any]] = {
            "cuMemAlloc": self._allocate,
            "cuMemHostAlloc": self._allocate,
            "cuMemGetInfo": lambda: (0, 8 * GIB, 8 * GIB),
            "cuDeviceTotalMem": lambda _: (0, 8 * GIB),
            "cuMemcpyHtoDAsync": _copy,
            "cuMemcpyDtoHAsync": _copy,
            "cuModuleGetFunction": lambda _, name: (0, name),
            "cuTensorMapEncodeTiled": lambda *_: (0, SimpleNamespace(getPtr=lambda: ctypes.addressof(TENSOR_MAP))),
            "cuDeviceGetName": lambda *_: (0, b"none\0"),
            "cuDeviceGetAttribute": _attribute,
            "cuLaunchKernel": _launch,
        }
        made = ("cuStreamCreate", "cuEventCreate", "cuGraphInstantiate", "cuStreamEndCapture", "cuModuleLoadData")
        found = ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuFuncGetAttribute", "cuOccupancyMaxActiveClusters")
        self._functions |= dict.fromkeys((*made, *found), lambda *_: (0, 1))

    def install(self) -> None:
        """For good: what is freed when the process ends calls it, too."""
        for name in dir(driver):
            if name.startswith("cu") and name[2:3].isupper() and not isinstance(getattr(driver, name), type):
                mock.patch.object(driver, name, self._functions.get(name, lambda *_: (0,))).start()
        for module in ("device", "driver"):
            found = FoundDevice(True, "none")
            mock.patch(f"tessera.engine.cuda.{module}.find_device", return_value=found).start()
        mock.patch.object(Compiler, "compile", _compile).start()

    def _allocate(self, nbytes: int, _flags: int = 0) -> tuple[int, int]:
        self._memory.append(mmap.mmap(-1, max(nbytes, 1)))
        return 0, ctypes.addressof(ctypes.c_char.from_buffer(self._memory[-1]))


def _copy(target: int, source: int, nbytes: int, _stream: Any) -> tuple[int]:
    ctypes.memmove(target, source, nbytes)
    return (0,)


def _attribute(attribute: Any, _device: Any) -> tuple[int, int]:
    return 0, ATTRIBUTES.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1 << 31)


def _launch(function: bytes, *around: Any) -> tuple[int]:
    if function == b"copy_bytes_kernel":
        source, target, size = _parameters(around[-2])
        ctypes.memmove(target.value, source.value, size.value)
    return (0,)


@lru_cache(maxsize=1024)
def _parameters(address: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64.from_address(place or 0) for place in (ctypes.c_void_p * 3).from_address(address)]


def _compile(_: Compiler, program: Program) -> Cubin:
    return Cubin(b"", {name: name.split("<")[0] for name in program.names})


class Watch:
    """When tokens come, and how long after them graphs are launched."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.first: list[float] = []
        self.last: list[float] = []
        self._came: float | None = None
        self._launched: list[float] = []
        self._profile = profile

    @contextmanager
    def installed(self) -> Iterator[None]:
        launch, result = Graph.launch, ResultDownload.result

        def watched_launch(graph: Graph) -> None:
            launch(graph)
            self._launched.append(time.perf_counter())
            if self._profile is not None:
                self._profile.disable()

        def watched_result(download: ResultDownload) -> Any:
            download._arrived.synchronize()
            self._note()
            if self._profile is not None:
                self._profile.enable()
            self._came = time.perf_counter()
            return result(download)

        patches = (
            mock.patch.object(Graph, "launch", watched_launch),
            mock.patch.object(ResultDownload, "result", watched_result),
        )
        with patches[0], patches[1]:
            yield

    def begin(self) -> None:
        self.first.clear()
        self.last.clear()

    def _note(self) -> None:
        if self._came is not None and self._launched:
            self.first.append(self._launched[0] - self._came)
            self.last.append(self._launched[-1] - self._came)
        self._launched.clear()


def make_core(root: Path, given: argparse.Namespace) -> EngineCore:
    config = EngineConfig(
        model=str(write_model(root, "llama-8b", MODEL)),
        device="cuda",
        load_format="dummy",
        seed=1,
        max_num_seqs=max(given.streams),
        max_num_batched_tokens=2048,
        max_model_len=4096,
        num_kv_blocks=256 * max(given.streams),
        speculation=given.speculation,
        speculative_method=given.method,
        speculative_model=str(write_head(root, MODEL)) if given.method == "eagle3" else None,
    )
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def measure(core: EngineCore, watch: Watch, streams: int, num_tokens: int) -> dict[str, Any]:
    """`streams` sequences until they end."""
    assert isinstance(core._runner, TimedRunner)
    runner = core._runner._runner
    assert isinstance(runner, ModelRunner)
    assert runner._sampler is not None
    rng, chosen = np.random.default_rng(streams), runner._sampler._chosen
    tokens = np.ctypeslib.as_array((ctypes.c_int32 * chosen.size).from_address(chosen.pointer))
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number in range(streams):
        prompt = array("i", rng.integers(3, 200, 128).tolist())
        core.add_request(AddRequest(f"{streams} {number}", prompt, params, time.monotonic()), b"bench")
    turns: list[float] = []
    while core.has_work:
        tokens[:] = rng.integers(3, 1000, chosen.size)
        if len(turns) == WARM_UP:
            watch.begin()
        begin = time.perf_counter()
        core.step()
        turns.append(time.perf_counter() - begin)
    parts = {"first": watch.first, "last": watch.last, "whole": turns[WARM_UP:]}
    found = {
        f"{name} us": [round(float(us), 1) for us in np.percentile(part, (5, 50)) * 1e6] for name, part in parts.items()
    }
    return {"streams": streams, "steps": len(turns), **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.host", description=__doc__)
    parser.add_argument("--method", choices=("suffix", "ngram", "eagle3"), default="suffix")
    parser.add_argument("--speculation", choices=("on", "auto", "off"), default="on")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    profile = cProfile.Profile() if given.profile else None
    watch = Watch(profile)
    HeldDrafting.is_computed = given.method in MODEL_METHODS
    NullDriver().install()
    with tempfile.TemporaryDirectory() as root, Held(given.acceptance, 1), watch.installed():
        core = make_core(Path(root), given)
        gc.collect()
        gc.freeze()
        for streams in given.streams:
            print(json.dumps(measure(core, watch, streams, given.tokens)), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
