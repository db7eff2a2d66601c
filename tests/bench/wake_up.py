"""How long a model takes to fall asleep and to wake up, 20 times in a row.

    python -m tests.bench.wake_up [llama-8b]

drives the engine alone, in this process, with random weights and a KV cache that takes what memory is left. The last
line is JSON: seconds of the first and of the later times, those that the driver's calls took in the last wake-up, and
what the process and the device have grown by.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.heap import resident_bytes
from tessera.engine.ipc.load import load_engine
from tests.bench.models import CONFIGS, write_model

CYCLES = 20
MIB = 2**20


def time_calls() -> defaultdict[str, float]:
    """Seconds of the driver's calls from now on that take memory away and bring it back, by name."""
    from tessera.engine.cuda import virtual_memory

    module: Any = virtual_memory
    seconds: defaultdict[str, float] = defaultdict(float)
    check = module.check

    def timed(function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return check(function, *arguments)
        finally:
            seconds[function.__name__] += time.perf_counter() - start

    module.check = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.wake_up", description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-8b", choices=CONFIGS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cycles", type=int, default=CYCLES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = write_model(Path(root), given.model)
        config = EngineConfig(model=str(folder), device=given.device, load_format="dummy", seed=1, can_sleep=True)
        engine = load_engine(config, lambda stage, done, total: None)
    sleeper = engine.sleeper
    assert sleeper is not None, "the device cannot give memory back"
    device = None
    if given.device == "cuda":
        from tessera.engine.cuda.device import CudaDevice

        device = CudaDevice()
    calls = time_calls() if given.device == "cuda" else {}
    asleep, awake, sizes, free = [], [], [], []
    for _ in range(given.cycles):
        start = time.perf_counter()
        sleeper.sleep()
        asleep.append(time.perf_counter() - start)
        calls.clear()
        start = time.perf_counter()
        sleeper.wake_up()
        awake.append(time.perf_counter() - start)
        sizes.append(resident_bytes())
        free.append(0 if device is None else device.free_memory())
    found = {
        "model": given.model,
        "gb": round((engine.info.sleep_bytes or 0) / 1e9, 2),
        "first_sleep": round(asleep[0], 3),
        "later_sleeps": [round(min(asleep[1:]), 3), round(max(asleep[1:]), 3)],
        "wakes": [round(min(awake), 3), round(max(awake), 3)],
        "wake_calls": {name: round(each, 4) for name, each in calls.items()},
        "process_growth_mib": (sizes[-1] - sizes[1]) // MIB,
        "device_growth_mib": (free[1] - free[-1]) // MIB,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
