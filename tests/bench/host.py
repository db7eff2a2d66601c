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
import pstats
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.cuda.events import Graph
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.turns import TimedRunner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.sampler import ResultDownload
from tests.bench.models import LLAMA_8B, write_model
from tests.bench.null_device.null_driver import NullDriver
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
WARM_UP = 20  # steps


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
