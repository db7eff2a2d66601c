"""The cost of each kernel in a decode step: how much faster the step is without its launches.

    python -m tests.bench.costs llama-8b.fp8 16 --kv-cache-dtype fp8

In a profile the times of kernels overlap: each starts before the previous one has ended, and waits for it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tests.bench.placement import Placement, load, step_parser


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
    options = step_parser("costs", __doc__).parse_args()
    placement = Placement(load(options), options.rows, options.context)
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
