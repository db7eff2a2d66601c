"""Files of KV blocks, while one thread writes and another reads what an earlier process left."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.kv_tiers.block_files import BlockFiles, BlockHeader
from tessera.engine.kv_tiers.disk_tier import DiskTier
from tessera.engine.kv_tiers.make import form_of
from tessera.engine.kv_tiers.metrics import TierMetrics
from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.tensor import CPU

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


@pytest.mark.parametrize("number", [1, 2])
def test_every_file_of_a_split_model_counts(tmp_path: Path, number: int) -> None:
    parts = [tmp_path / f"m-0000{each}-of-00002.gguf" for each in (1, 2)]
    for part in parts:
        part.write_bytes(b"weights")
    config = EngineConfig(model=str(parts[0]))
    before = form_of(config, CPU, 1, "float32")
    assert form_of(config, CPU, 1, "float32") == before
    parts[number - 1].write_bytes(b"other weights")
    assert form_of(config, CPU, 1, "float32") != before


# -- what is wiped --------------------------------------------------------------------------------


@pytest.mark.parametrize(("accounts", "left"), [([1], {2}), (None, set())])
def test_what_is_wiped_at_the_start_goes_without_a_request(
    files: BlockFiles, accounts: list[int] | None, left: set[int]
) -> None:
    for number in (1, 2):
        files.write(header_of(number), BLOCK)
    disk = DiskTier(files, 10, metrics=TierMetrics())
    list(disk.wipe_left(accounts))
    disk.close()
    assert {header.account for header in files.scan()} == left


def test_what_is_wiped_while_it_is_written_goes_without_a_request(files: BlockFiles) -> None:
    disk = DiskTier(files, 10, metrics=TierMetrics())
    published = PublishedBlock(header_of(1).digest, None, b"tokens", b"", 1)
    assert disk.write(published, BLOCK)
    disk.remove(published)
    disk.close()
    assert digests(files) == []
    assert disk.settle() == [published]
    assert not published.on_disk
    assert not disk.entries


class SeenLate(Future[Any]):
    """Its end is seen at the second look."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_result(None)
        return was_done


class WriterAtOnce:
    """Does its work at once; the end of the first write is seen late."""

    def __init__(self, files: BlockFiles) -> None:
        self._late = [files.write]

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        value = function(*arguments)
        if function in self._late:
            self._late.clear()
            return SeenLate()
        job: Future[Any] = Future()
        job.set_result(value)
        return job

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        pass


def test_a_block_that_is_written_again_is_found_whichever_write_is_seen_to_end_first(files: BlockFiles) -> None:
    disk = DiskTier(files, 10, metrics=TierMetrics(), writer=WriterAtOnce(files))
    first, second = (PublishedBlock(header_of(1).digest, None, b"tokens", b"", 1) for _ in range(2))
    assert disk.write(first, BLOCK)
    disk.remove(first)
    assert disk.write(second, BLOCK)
    assert [*disk.settle(), *disk.settle()] == [first, second]
    assert disk.find(second.digest, b"tokens", None, b"") is second
    disk.close()
