"""`python -m docs.generate`: writes the committed tables and pictures; with `--check` only compares them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.generate.blocks import filled, markdown_files
from docs.generate.paths import ROOT
from docs.generate.pictures import pictures


def generated_files() -> dict[Path, str]:
    """Every file that holds something generated, as it should be."""
    files = {path: filled(path.read_text()) for path in markdown_files()}
    files.update(pictures())
    return files


def outdated(files: dict[Path, str]) -> list[Path]:
    return [path for path, content in files.items() if not path.is_file() or path.read_text() != content]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args()
    files = generated_files()
    changed = outdated(files)
    for path in changed:
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
        print(f"{'out of date' if options.check else 'written'}: {path.relative_to(ROOT)}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
