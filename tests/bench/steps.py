"""Where the time of a step goes: the whole step, what the host pays for it, and each kernel in it.

    python -m tests.bench.steps qwen3-0.6b 1 --profile

runs the model runner alone, without a server, with random weights. `--prompt TOKENS` adds a prompt, all of whose tokens
the step computes, to its decodes, of which there may be 0; of several numbers each is measured.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, get_args

from tessera.engine.contract.config import EngineConfig, PromptActivationsName, QuantizationName
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.events import Graph
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.runner.model_runner import ModelRunner
from tests.bench import serve
from tests.bench.fp8_models import FP8_MODELS
from tests.bench.gguf_models import GGUF_CONFIGS
from tests.bench.mixtures import MIXTURES
from tests.bench.models import DENSE
from tests.support.decoder_harness import Row, step_batch

BLOCK_SIZE: Final = 16
STEPS = 60
PROMPT_STEPS = 15  # of those with a prompt
WARM_UP = 5
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 50}}
QUANTISED = (*(name + serve.GGUF for name in GGUF_CONFIGS), *FP8_MODELS)
MODELS = (*DENSE, *MIXTURES, *QUANTISED)


class DecodeSteps:
    """`rows` sequences of `context` tokens (whatever they hold), one token further with each batch."""

    def __init__(
        self, runner: ModelRunner, rows: int, context: int, *, apart: bool = False, prompt: int = 0, **params: Any
    ) -> None:
        """`apart`: each row has tokens of its own, which a mixture gives to experts of their own.

        `prompt`: tokens of one that every batch computes anew.
        """
        self.runner = runner
        self._apart = apart
        settings = SamplingParams(**{"max_tokens": 1000, "temperature": 0.0, **params})
        per_row = -(-(context + STEPS + 8) // BLOCK_SIZE)
        self._rows = [
            Row(
                slot,
                list(range(slot * per_row, (slot + 1) * per_row)),
                [self._token(slot)] * context,
                settings,
                num_computed=context - 1,
            )
            for slot in range(rows)
        ]
        blocks = list(range(rows * per_row, rows * per_row - (-prompt // BLOCK_SIZE)))
        tokens = [7 + 997 * place % 30_000 for place in range(prompt)]
        self._prompts = [Row(rows, blocks, tokens, settings)] if prompt else []

    def batches(self) -> Iterator[StepBatch]:
        while True:
            for prompt in self._prompts:
                prompt.num_computed = 0
            yield step_batch([*self._rows, *self._prompts], BLOCK_SIZE)
            for slot, row in enumerate(self._rows):
                row.output.append(self._token(slot))

    def _token(self, slot: int) -> int:
        return 7 + 997 * slot % 30_000 if self._apart else 7


def engine_config(name: str, work: Path, **settings: Any) -> EngineConfig:
    """Of one of MODELS, which is written below `work`."""
    folder, arguments = serve.prepare(name, work)
    load_format: Literal["auto", "dummy"] = "dummy" if "dummy" in arguments else "auto"
    return EngineConfig(
        model=str(folder), load_format=load_format, max_model_len=9000, block_size=BLOCK_SIZE, **settings
    )


def make_runner(config: EngineConfig, device: CudaDevice) -> ModelRunner:
    """Its model, quantised while it loads if it shall be."""
    folder = Path(config.model)
    model = load_config(folder)
    if config.quantization != "none":
        model = rounded_while_loading(model, config.quantization, folder)
    return ModelRunner(config, model, device, CudaOps(device))


def measure(runner: ModelRunner, rows: int, context: int, *, prompt: int = 0, **params: Any) -> dict[str, float]:
    """Microseconds of a step one ahead, of the host's part, and of what the driver takes of that to launch graphs."""
    prepared = DecodeSteps(runner, rows, context, prompt=prompt, **params).batches()
    found = measure_batches(runner, prepared, PROMPT_STEPS if prompt else STEPS)
    return {"rows": rows, "context": context, **({"prompt": prompt} if prompt else {}), **found}


def measure_batches(runner: ModelRunner, prepared: Iterator[StepBatch], steps: int = STEPS) -> dict[str, float]:
    """The same of these steps."""
    batches = [next(prepared) for _ in range(steps)]
    running = runner.start(batches[0])
    host: list[float] = []
    launching: list[float] = []
    gaps: list[float] = []
    last = time.perf_counter()
    with _timed_launches() as launches:
        for batch in batches[1:]:
            launches.clear()
            begin = time.perf_counter()
            following = runner.start(batch)
            host.append(time.perf_counter() - begin)
            launching.append(sum(launches))
            running.result()
            now = time.perf_counter()
            gaps.append(now - last)
            last, running = now, following
        running.result()
    return {
        "step us": statistics.median(gaps[WARM_UP:]) * 1e6,
        "host us": statistics.median(host[WARM_UP:]) * 1e6,
        "launches us": statistics.median(launching[WARM_UP:]) * 1e6,
    }


@contextmanager
def _timed_launches() -> Iterator[list[float]]:
    """Seconds that each launch of a graph takes the host."""
    found: list[float] = []
    launch = Graph.launch

    def timed(graph: Graph) -> None:
        begin = time.perf_counter()
        launch(graph)
        found.append(time.perf_counter() - begin)

    Graph.launch = timed  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Graph.launch = launch  # type: ignore[method-assign]


def profile(runner: ModelRunner, rows: int, context: int, **around: Any) -> list[tuple[str, int, float]]:
    """As `profile_batches`, of a step as `measure` has it."""
    prepared = DecodeSteps(runner, rows, context, **around).batches()
    return profile_batches(runner, [next(prepared) for _ in range(8)])


def profile_batches(runner: ModelRunner, batches: list[StepBatch]) -> list[tuple[str, int, float]]:
    """Kernel name, calls and microseconds of one of eight steps, longest first; through PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.init()
    for batch in batches[:4]:
        runner.execute(batch)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        for batch in batches[4:8]:
            runner.execute(batch)
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    total: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        total[event.name].append(event.device_time)
    table = [(name, len(times) // 4, sum(times) / 4) for name, times in total.items()]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy = sum(end - start for start, end in spans)
    table.append(("(all, added up)", len(events) // 4, busy / 4))
    return sorted(table, key=lambda row: -row[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that choose the steps to measure."""
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("rows", type=int, nargs="+", help="sequences in a step")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[0], metavar="TOKENS", help="of a prompt beside the decodes"
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--quantization", choices=get_args(QuantizationName), default="none")
    parser.add_argument("--prompt-activations", choices=get_args(PromptActivationsName), default="16bit")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of the engine, by these arguments."""
    most_rows = max(256, max(options.rows) + any(options.prompt))
    same = ("kv_cache_dtype", "quantization", "prompt_activations")
    return {name: getattr(options, name) for name in same} | {"max_num_seqs": most_rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.steps", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--apart", action="store_true", help="rows of different tokens, and so of different experts")
    parser.add_argument("--profile", action="store_true", help="each kernel of a step (needs PyTorch)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        config = engine_config(options.model, Path(work), **settings_of(options))
        begin = time.perf_counter()
        runner = make_runner(config, CudaDevice())
        print(f"{options.model}: ready in {time.perf_counter() - begin:.2f} s")
    for rows, prompt in product(options.rows, options.prompt):
        around = {"apart": options.apart, "prompt": prompt}
        for name, params in SAMPLING.items():
            found = measure(runner, rows, options.context, **around, **params)
            print(name, " ".join(f"{key} {value:.0f}" for key, value in found.items()), flush=True)
        if options.profile:
            for kernel, calls, us in profile(runner, rows, options.context, **around)[:24]:
                print(f"  {us:9.1f} us {calls:5d} x {kernel[:90]}", flush=True)


if __name__ == "__main__":
    main()
