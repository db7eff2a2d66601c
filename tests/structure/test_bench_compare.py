"""The comparison of two checkouts: means over runs with their error, and which direction is better."""

from __future__ import annotations

import math
from typing import Any

from tests.bench.compare import beyond_error, compared
from tests.bench.serve import sharing_gpus


def row(throughput: float, ttft: float) -> dict[str, Any]:
    load = {"model": "m", "concurrency": 16, "input_len": 512, "output_len": 256, "stream": True}
    return {
        **load,
        "output_throughput": throughput,
        "median_ttft_ms": ttft,
        "median_itl_ms": None,
        "ready_seconds": 2.0,
    }


def test_more_tokens_and_earlier_tokens_are_better() -> None:
    before, after = [[row(100, 10)], [row(110, 10)]], [[row(210, 5)], [row(210, 5)]]
    found = {entry["figure"]: entry for entry in compared(before, after)}
    assert set(found) == {"output_throughput", "median_ttft_ms", "ready_seconds"}
    assert found["output_throughput"]["better"] == 100
    assert found["median_ttft_ms"]["better"] == 50
    assert round(found["output_throughput"]["spread"], 6) == 10


def test_a_change_counts_as_far_as_it_is_beyond_two_standard_errors() -> None:
    before, after = [[row(99, 10), row(101, 10)]], [[row(89, 30), row(91, 10)]]
    found = {entry["figure"]: entry for entry in compared(before, after)}
    slower, later = found["output_throughput"], found["median_ttft_ms"]
    assert round(slower["better"], 6) == -10
    assert round(slower["error"], 2) == round(100 * 0.9 * math.hypot(1 / 100, 1 / 90), 2)
    assert round(beyond_error(slower), 6) == round(-10 + 2 * slower["error"], 6)
    assert later["better"] == -100
    assert beyond_error(later) == 0, "10 and 30 ms of one commit say nothing"


def test_gpus_that_share_a_model_read_its_weights_side_by_side() -> None:
    assert sharing_gpus(("--kv-cache-dtype", "fp8")) == 1
    assert sharing_gpus(("--tensor-parallel-size", "2")) == sharing_gpus(("--tensor-parallel-size=2",)) == 2
    assert sharing_gpus(("--data-parallel-size", "2")) == 1, "each engine reads all of them"
