"""`make test` does not even collect the tests of the room `gpu`, which all need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "tests/gpu").rglob("test_*.py")), ids=lambda path: path.stem)
def test_all_are_marked(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert any(line.startswith("pytestmark = ") and "pytest.mark.gpu" in line for line in lines)
