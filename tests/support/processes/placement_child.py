"""`tests.bench.placement` without a device, in a process of its own, with the same arguments.

Llama 8B is small here, and a step takes longer the more units its products' blocks take at a time, the deeper their
rings and the more slices of k there are, and where two blocks of one product that follows no norm have room on a
multiprocessor.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from tessera.engine.runner.cuda_graphs import StepGraph
from tests.bench import placement
from tests.bench.models import LLAMA_8B
from tests.bench.null_device.null_driver import NullDriver
from tests.bench.product_changes import COUNTS, HALF, Changes, Launch, share_bytes

SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 14336,
    "vocab_size": 1280,
}


class CountedPlacement(placement.Placement):
    """Takes what `_cost` says."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._times: dict[int, tuple[StepGraph, float]] = {}

    def record(self, changes: Changes) -> StepGraph:
        step = super().record(changes)
        self._times[id(step)] = step, 100.0 + sum(map(self._cost, self.launches(changes)))
        return step

    def measure(self, step: StepGraph) -> float:
        super().measure(step)
        return self._times[id(step)][1]

    def _cost(self, launch: Launch) -> float:
        if launch.product is None:
            return 0.0
        arguments = dict(zip(launch.spec.template, launch.template, strict=True))
        counts = int(arguments.get("UNITS", 0)) + sum(getattr(launch.params, name, 0) for name in COUNTS)
        room_for_two = launch.config.shared_bytes < share_bytes(self.device, HALF)
        return counts + 10.0 * (room_for_two and not launch.normed)


def main() -> None:
    NullDriver().install()
    LLAMA_8B.update(SMALL)
    with mock.patch.object(placement, "Placement", CountedPlacement):
        placement.main()


if __name__ == "__main__":
    main()
