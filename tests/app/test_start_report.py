"""The lines that a server prints when it is ready."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tessera.app.server.start_report import StartReport
from tests.support.fake_client import INFO
from tests.support.http_fixtures import settings_for, write_model_folder


def report(tmp_path: Path, caplog: pytest.LogCaptureFixture, num_host: int, num_disk: int) -> list[str]:
    settings = settings_for(write_model_folder(tmp_path))
    info = msgspec.structs.replace(
        INFO, kv_cache_bytes=64 << 20, num_host_kv_blocks=num_host, num_disk_kv_blocks=num_disk
    )
    with caplog.at_level("INFO", "tessera.serve"):
        StartReport(as_log=True).show_ready(
            {settings.served_model_names[0]: info}, settings, "http://127.0.0.1:1", has_template=True
        )
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("KV offload")]


def test_the_sizes_of_kv_offload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    per_block = (64 << 20) // INFO.num_kv_blocks
    assert per_block == 2**20
    (line,) = report(tmp_path, caplog, 500, 2000)
    tokens = f"{500 * INFO.block_size} tokens in host memory, 524 MB, {2000 * INFO.block_size} tokens on disk, 2.1 GB"
    assert line.split(None, 2)[2] == tokens


def test_without_it_there_is_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not report(tmp_path, caplog, 0, 0)
