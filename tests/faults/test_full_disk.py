"""A full or read-only disk: what the server keeps there fails alone."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.http.counts import HttpCounts
from tessera.app.limits.shared_memory import make_shared_memory
from tests.support.processes.disks import small_disk
from tests.support.servers.http_fixtures import serve
from tests.support.servers.server_fixture import running_server
from tests.support.servers.surface_fixtures import PATIENCE, says, tool_settings

ASK = {"model": "tiny", "input": "hi"}
HELLO = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": HELLO}


def test_fault_full_disk_shared_counts_have_their_memory_from_the_start() -> None:
    fd = make_shared_memory("counts")
    assert fd is not None
    HttpCounts(["/a", "/b"], fd=fd, num_rows=64, row=3)
    found = os.stat(fd)
    assert found.st_size > 2**14
    assert found.st_blocks * 512 >= found.st_size, "a page that is not there yet may not be there later"


def test_fault_full_disk_without_shared_memory_each_process_counts_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fd = make_shared_memory("counts")
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "memfd_create", full)
    assert make_shared_memory("counts") is None
    counts = HttpCounts(["/a"], fd=fd, num_rows=2, row=1)
    counts.count_response("/a", 200)
    (requests, *_) = counts.collect("x")
    assert [sample.value for sample in requests.samples] == [1]
    assert caplog.text.count("No space left on device") == 2


def test_fault_full_disk_a_server_of_two_processes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk() as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        with running_server(None, tmp_path / "log", "--api-workers", "2") as server:
            server.until(lambda: server.children("tessera.app.server.worker"), "the worker")
            with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as filling:
                while filling.write(b"x" * 4096):
                    pass
            body = {"model": server.model, "input": "hi", "max_output_tokens": 4}
            for _ in range(8):  # each on a connection of its own, to either process
                assert httpx.get(f"{server.url}/metrics", timeout=PATIENCE).status_code == 200
                answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE)
                assert answer.status_code == 200
                kept = httpx.get(f"{server.url}/v1/responses/{answer.json()['id']}", timeout=PATIENCE)
                assert kept.status_code in (200, 404, 503, 507)
            assert "is not stored" in server.log
            assert "Traceback" not in server.log
            assert server.process.poll() is None


def test_fault_full_disk_files_and_batches_are_refused_and_nothing_else(tmp_path: Path) -> None:
    lines = b'{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": "tiny", "input": "hi"}}'
    batch = {"endpoint": "/v1/responses", "completion_window": "24h"}
    purpose = {"purpose": "batch"}
    with small_disk() as disk, serve(says("one"), tool_settings(tmp_path, data_dir=str(disk / "data"))) as url:
        small = httpx.post(f"{url}/v1/files", files={"file": lines}, data=purpose).json()
        large = httpx.post(f"{url}/v1/files", files={"file": b"x" * 2**20}, data=purpose)
        assert (large.status_code, large.json()["error"]["code"]) == (507, "store_full")
        assert large.json()["error"]["type"] == "server_error"
        with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as filling:
            while filling.write(b"x" * 512):
                pass
        assert httpx.post(f"{url}/v1/files", files={"file": b"x" * 2**16}, data=purpose).status_code == 507
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
        assert httpx.get(f"{url}/v1/files/{small['id']}/content").content == lines
        (disk / "filling").unlink()
        created = httpx.post(f"{url}/v1/batches", json={**batch, "input_file_id": small["id"]})
        assert created.status_code == 200, created.text


def test_fault_full_disk_an_answer_that_cannot_be_kept_is_still_given(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = tool_settings(tmp_path, data_dir=str(tmp_path / "file" / "data"))
    with serve(says("one"), settings) as url:
        for stream in (False, True):
            for path, body in (
                ("responses", {"input": "hi"}),
                ("chat/completions", {"messages": HELLO, "store": True}),
            ):
                answer = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", "stream": stream, **body})
                assert answer.status_code == 200
        refused = [
            httpx.post(f"{url}/v1/responses", json={**ASK, "previous_response_id": "resp_0"}),
            httpx.post(f"{url}/v1/responses", json={**ASK, "background": True}),
            httpx.get(f"{url}/v1/responses/resp_0"),
            httpx.delete(f"{url}/v1/responses/resp_0"),
            httpx.post(f"{url}/v1/conversations", json={}),
            httpx.get(f"{url}/v1/chat/completions"),
        ]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
            (503, "store_unavailable")
        }
