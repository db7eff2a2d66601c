"""Files of KV blocks, while one thread writes and another reads what an earlier process left."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.kv_tiers.block_files import BlockFiles, BlockHeader

BLOCK = np.arange(64, dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    made = BlockFiles(tmp_path, "form")
    yield made
    made.close()


def header_of(number: int) -> BlockHeader:
    return BlockHeader(random.Random(number).randbytes(32), b"", b"", b"tokens", account=number)


def digests(files: BlockFiles) -> list[bytes]:
    return [header.digest for header in files.scan()]


def test_a_scan_leaves_what_is_being_written(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def scan_first(*paths: Any) -> None:
        assert digests(files) == []
        replace(*paths)

    monkeypatch.setattr("tessera.engine.kv_tiers.block_files.os.replace", scan_first)
    files.write(header_of(1), BLOCK)
    assert digests(files) == [header_of(1).digest]


def test_a_scan_passes_over_what_is_removed_meanwhile(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(header_of(1), BLOCK)
    iterdir = Path.iterdir

    def with_one_more(path: Path) -> list[Path]:
        return [*iterdir(path), *([path / "removed.kv"] if len(path.name) == 2 else [])]

    monkeypatch.setattr(Path, "iterdir", with_one_more)
    assert digests(files) == [header_of(1).digest]


def test_what_was_not_written_to_its_end_is_removed_at_the_next_start(
    files: BlockFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.engine.kv_tiers.block_files.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        files.write(header_of(1), BLOCK)
    files.close()
    before = {path.name for path in tmp_path.iterdir() if path.is_file()}
    BlockFiles(tmp_path, "form").close()
    assert before - {path.name for path in tmp_path.iterdir()} == {"block.new"}
