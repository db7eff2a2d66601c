"""The lines that a server prints when it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.app.server.start_report import StartReport
from tessera.engine.contract.messages import DraftInfo, OffloadInfo
from tests.support.fakes.fake_client import INFO
from tests.support.servers.http_fixtures import settings_for, write_model_folder


def report(tmp_path: Path, caplog: pytest.LogCaptureFixture, label: str, **facts: Any) -> list[str]:
    """What the lines of `label` say for an engine with these facts."""
    settings = settings_for(write_model_folder(tmp_path))
    info = msgspec.structs.replace(INFO, kv_cache_bytes=64 << 20, **facts)
    with caplog.at_level("INFO", "tessera.serve"):
        StartReport(as_log=True).show_ready(
            {settings.served_model_names[0]: info}, settings, "http://127.0.0.1:1", has_template=True
        )
    lines = (record.getMessage() for record in caplog.records)
    return [line.removeprefix(label).strip() for line in lines if line.startswith(label)]


def test_the_sizes_of_kv_offload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    per_block = (64 << 20) // INFO.num_kv_blocks
    assert per_block == 2**20
    (line,) = report(tmp_path, caplog, "KV offload", num_host_kv_blocks=500, num_disk_kv_blocks=2000)
    tokens = f"{500 * INFO.block_size} tokens in host memory, 524 MB, {2000 * INFO.block_size} tokens on disk, 2.1 GB"
    assert line == tokens


def test_layers_in_host_memory_and_what_they_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offload = OffloadInfo(num_layers=12, num_all_layers=80, nbytes=20_500_000_000, copy_seconds=0.41)
    (line,) = report(tmp_path, caplog, "in host", weight_offload=offload)
    assert line == "12 of 80 layers, 20.5 GB, which a step copies in 410 ms at 50 GB/s: at most 2.44 steps/s"


def test_a_draft_model_and_what_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_parameters": 600_000_000, "weight_bytes": 1_200_000_000, "kv_cache_bytes": 500_000_000}
    draft = DraftInfo(architecture="Qwen3ForCausalLM", num_tokens=5, **sizes)
    (line,) = report(tmp_path, caplog, "draft model", draft=draft)
    assert line == "Qwen3ForCausalLM, 600 M parameters, at most 5 tokens: 1.2 GB of weights, 500 MB beside the KV cache"


def test_without_them_there_are_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for label in ("KV offload", "in host", "draft model"):
        assert not report(tmp_path, caplog, label)
