"""The comparison of two checkouts: means over runs with their error, and which direction is better."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.compare import beyond_error, compared
from tests.bench.serve import floor_seconds
from tests.support.paths import ROOT

TWO_GPUS = (("--tensor-parallel-size", "2"), ("--tensor-parallel-size=2",))


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


def test_the_floor_is_of_the_weights_that_a_server_reads() -> None:
    whole = floor_seconds("llama-8b", 1, ("--kv-cache-dtype", "fp8"))
    shared = [floor_seconds("llama-8b", 1, arguments) for arguments in TWO_GPUS]
    assert shared == [whole / 2] * 2
    assert floor_seconds("llama-8b", 1, ("--data-parallel-size", "2")) == whole, "each engine reads all of them"
    rates = [1 / floor_seconds("llama-8b", 1, ("--quantization", scheme)) for scheme in ("fp8", "int4")]
    assert 1 / whole < 300 < rates[0] < 600 < rates[1] < 1000


STEPS = """
def engine_config(model, work, **settings):
    assert settings["kv_cache_dtype"] == "fp8", settings
    return model

def make_runner(config, device):
    if {broken}:
        raise MemoryError("no room for the model")
    return config

def measure(runner, rows, context, *, prompt):
    return {{"step us": {microseconds} * (rows + prompt)}}
"""


def write_checkout(folder: Path, microseconds: float, *, broken: bool = False) -> str:
    """One whose steps take so many microseconds for each row and token of a prompt."""
    files = {
        "tests/bench/steps.py": STEPS.format(microseconds=microseconds, broken=broken),
        "tessera/engine/cuda/device.py": "class CudaDevice: pass",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True)
        for package in (folder / name).relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        (folder / name).write_text(text)
    return str(folder)


def compare_steps(*checkouts: str) -> subprocess.CompletedProcess[str]:
    steps = ("llama-8b.fp8", "0", "4", "--prompt", "100", "--kv-cache-dtype", "fp8")
    command = [sys.executable, "-m", "tests.bench.compare_steps", *checkouts, "--rounds", "2", "--", *steps]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_steps_of_checkouts_are_measured_by_their_own_code(tmp_path: Path) -> None:
    done = compare_steps(write_checkout(tmp_path / "a", 20), write_checkout(tmp_path / "b", 19))
    assert "round 2, (4, 100): [2080, 1976]" in done.stdout, done.stderr
    assert [line.split("│")[-2].strip() for line in done.stdout.splitlines() if "│" in line] == [
        *("+0.00", "+5.00"),
        *("+0.00", "+5.00"),
    ]


def test_a_checkout_that_does_not_run_says_why(tmp_path: Path) -> None:
    done = compare_steps(write_checkout(tmp_path / "a", 20, broken=True))
    assert done.returncode == 1
    assert "no room for the model" in done.stderr
