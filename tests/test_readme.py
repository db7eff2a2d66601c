"""README's tree names every source file, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("app", "engine", "cuda_src", "loadtest")


def files_in_tree() -> set[str]:
    tree = re.search(r"```\n(app/\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None, "README.md has no tree that begins with app/"
    found, folder = set(), ""
    for line in tree[1].splitlines():
        if not line.startswith(" "):
            folder = line
        else:
            found.add(folder + line.split()[0])
    return found


def test_the_tree_is_the_tree() -> None:
    sources = {path for room in ROOMS for pattern in ("*.py", "*.cu", "*.cuh") for path in (ROOT / room).rglob(pattern)}
    assert files_in_tree() == {str(path.relative_to(ROOT)) for path in sources if path.stat().st_size}
