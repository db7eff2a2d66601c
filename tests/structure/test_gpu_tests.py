"""`make test` does not even collect the tests of the room `gpu`, which all need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "tests/gpu").rglob("test_*.py")), ids=lambda path: path.stem)
def test_all_are_marked(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert any(line.startswith("pytestmark = ") and "pytest.mark.gpu" in line for line in lines)


def test_a_lost_device_fails_no_more_than_two_tests(tmp_path: Path) -> None:
    """The one that has cost it, and the one in front of which its process ends."""
    (tmp_path / "test_cases.py").write_text(
        "from tests.gpu import lost_device\n"
        "lost_device.device_is_lost = lambda: True\n"
        "def test_1(): pass\n"
        "def test_2(): raise RuntimeError\n"
        "def test_3(): pass\n"
        "def test_4(): pass\n"
    )
    options = ["-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "tests.gpu.lost_device", "-n", "1", "-rA"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    passed = [line.rpartition("::")[2] for line in run.stdout.splitlines() if line.startswith("PASSED")]
    assert sorted(passed) == ["test_1", "test_4"], run.stdout
