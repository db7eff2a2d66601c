"""What each kernel costs in a decode step: how much shorter it is without its launches, whatever it computes then.

    python -m tests.bench.costs llama-8b.fp8 16 --kv-cache-dtype fp8

A profile's times of kernels overlap, as each begins before the one in front has ended, and waits for it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from tessera.engine.contract.config import QuantizationName
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tests.bench.placement import Placement
from tests.bench.steps import MODELS, engine_config, make_runner


def name_of(spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> str:
    return f"{spec.name}<{', '.join(template)}>, {config.grid[0]} x {config.grid[1]} blocks"


def measure_without(placement: Placement, name: str) -> float:
    """Microseconds of the step without the launches of this name."""
    launch = CudaDevice.launch

    def launched(device: CudaDevice, spec: Any, template: tuple[str, ...], config: LaunchConfig, params: Any) -> None:
        if name_of(spec, template, config) != name:
            launch(device, spec, template, config, params)

    with mock.patch.object(CudaDevice, "launch", launched):
        step = placement.record({})
    return placement.measure(step)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.costs", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("rows", type=int, help="sequences in a step")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--quantization", choices=get_args(QuantizationName), default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        settings = {"kv_cache_dtype": options.kv_cache_dtype, "quantization": options.quantization}
        runner = make_runner(engine_config(options.model, Path(work), max_num_seqs=256, **settings), CudaDevice())
    placement = Placement(runner, options.rows, options.context)
    counts = Counter(name_of(launch.spec, launch.template, launch.config) for launch in placement.launches({}))
    step = placement.record({})
    whole = min(placement.measure(step) for _ in range(3))
    print(f"{whole:9.1f} us  a step", flush=True)
    costs = {name: whole - measure_without(placement, name) for name in counts}
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        print(f"{cost:9.1f} us {counts[name]:4} x {name}")
    print(f"{sum(costs.values()):9.1f} us  together, {placement.measure(step):.1f} the step again")


if __name__ == "__main__":
    main()
