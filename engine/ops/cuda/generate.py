"""Writes the generated headers to a folder, for an editor: `python -m tessera.engine.ops.cuda.generate FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tessera.engine.cuda.generated import HEADERS
from tessera.engine.ops.cuda.registry import all_specs


def write_headers(folder: Path) -> None:
    """Write every header that the kernels of `all_specs` may include."""
    assert all_specs()
    for path, header in HEADERS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(header.text)


if __name__ == "__main__":
    write_headers(Path(sys.argv[1]))
