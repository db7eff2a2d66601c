"""Python imports this as it starts. An engine's process gets a device that computes nothing: see
`tests.bench.first_token`.
"""

import os
import sys

STEP_SECONDS = "TESSERA_NULL_STEP_SECONDS"


def install(package: str, step_seconds: float) -> None:
    """Each graph takes `step_seconds`, one after the other; an event is passed when those before it are."""
    import importlib
    import time
    from typing import Any

    from null_driver import NullDriver  # type: ignore[import-not-found]  # of this folder: `tests` may be another's

    NullDriver().install(package)
    events = importlib.import_module(f"{package}.cuda.events")
    end = 0.0  # of the last graph
    passed: dict[int, float] = {}

    def launch(graph: Any) -> None:
        nonlocal end
        end = max(end, time.perf_counter()) + step_seconds

    def record(event: Any, *_: Any) -> None:
        passed[id(event)] = end

    def query(event: Any) -> bool:
        return passed.get(id(event), 0.0) <= time.perf_counter()

    def synchronize(event: Any) -> None:
        time.sleep(max(passed.get(id(event), 0.0) - time.perf_counter(), 0.0))

    events.Graph.launch = launch
    events.Event.record, events.Event.query, events.Event.synchronize = record, query, synchronize
    if package.startswith("tessera"):
        from tessera.engine.contract import machine

        machine.num_cores = lambda *_: 16  # as beside a GPU


for module in ("tessera.engine.ipc.process", "engine.process"):  # the second one: before the rooms were one package
    if module in sys.orig_argv and STEP_SECONDS in os.environ:
        install(module.partition("engine")[0] + "engine", float(os.environ[STEP_SECONDS]))
