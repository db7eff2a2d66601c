"""The benchmark of placements finds what makes a step faster, by a clock that is made up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

HALF = "116224 B"  # and a bit more, of an H200's multiprocessor


@pytest.mark.parametrize(
    ("model", "rows", "expected"),
    [
        (
            "llama-8b",
            3,
            {
                "matmul_decode_kernel 28672 x 512": "<__nv_bfloat16, 8, 2, 3, 2>",
                "matmul_decode_kernel 512 x 512": HALF,
            },
        ),
        ("llama-8b.fp8", 1, {"fp8_decode_kernel 28672 x 512": "<__nv_bfloat16, 1, 2,"}),
        (
            "llama-8b.gguf",
            1,
            {
                "block_matmul_kernel Q4_K 28672 x 512": "Q4_K, 1, 2,",
                "block_matmul_kernel Q4_K 512 x 512": HALF,
                "sm90_block_row_kernel Q6_K 512 x 14336": "2 stages",
            },
        ),
        ("llama-8b.gguf", 16, {"sm90_block_rows_kernel Q4_K 512 x 14336": "2 stages, 3 slices"}),
    ],
)
def test_what_makes_a_step_faster_is_found(model: str, rows: int, expected: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.support.processes.placement_child", model, str(rows), "--seconds", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    gains, table = done.stdout.split("\nnow ")
    assert "us instead of" in gains
    summary, *lines = table.splitlines()
    assert "(-" in summary
    assert "not all" not in summary
    best = dict(zip(lines[::3], lines[2::3], strict=True))
    for product, launched in expected.items():
        assert launched in best[product]


COSTS = """
from tests.bench import costs
from tests.bench.models import LLAMA_8B
from tests.bench.null_device.null_driver import NullDriver
from tests.support.processes.placement_child import SMALL

NullDriver().install()
LLAMA_8B.update(SMALL)
costs.main()
"""


def test_each_kernel_of_a_step_is_left_out_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COSTS, "llama-8b", "3"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    step, *kernels, together = done.stdout.splitlines()
    assert step.endswith("a step")
    assert together.endswith("the step again")
    names = [line.partition(" x ")[2] for line in kernels]
    assert len(set(names)) == len(names)
    for name in ("matmul_decode_kernel<", "paged_attention_decode_kernel<", "embedding_kernel<"):
        assert any(found.startswith(name) for found in names), done.stdout
