"""`tessera doctor` on machines of several kinds; the driver's answer is that of a program in its place."""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.command import main
from tessera.app.cli.doctor import gpu
from tests.support.fakes.stub_ports import taken_port

Doctor = Callable[..., tuple[int, dict[str, Any]]]

DEVICE = {
    "name": "NVIDIA H200",
    "compute_capability": [9, 0],
    "memory": 150_000_000_000,
    "memory_free": 149_000_000_000,
    "usable": True,
    "reason": "",
}
GOOD = {
    "driver": "580.65.06",
    "cuda": "13.0",
    "usable": True,
    "reason": "NVIDIA H200",
    "devices": [DEVICE],
    "nvrtc": "13.3",
    "nvrtc_problem": None,
}
NONE = {**GOOD, "driver": None, "cuda": None, "usable": False, "reason": "no NVIDIA driver is installed", "devices": []}
OLD = {
    **GOOD,
    "cuda": "12.4",
    "usable": False,
    "reason": "the NVIDIA driver supports CUDA 12.4, but CUDA 13.0 is needed",
}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """(source of the program that asks the driver, further options) -> exit code, JSON."""

    def run(source: str, *options: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "driver_stub.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(gpu, "SURVEY", "driver_stub")
        code = main(["doctor", "--json", "--no-network", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, found

    return run


def answer(survey: dict[str, Any]) -> str:
    return f"print({json.dumps(json.dumps(survey))})"


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    (only,) = [each for each in found["checks"] if each["name"] == name]
    return only


def test_a_machine_with_a_gpu(doctor: Doctor) -> None:
    code, found = doctor(answer(GOOD))
    assert (code, found["ok"], found["works"]["serving on the GPU"]["works"]) == (0, True, True)
    assert check(found, "device 0")["value"] == "NVIDIA H200, compute capability 9.0, 150 GB, 149 GB free"
    assert check(found, "driver")["value"] == "580.65.06, CUDA 13.0"


def test_a_machine_without_a_gpu_serves_on_the_cpu(doctor: Doctor) -> None:
    code, found = doctor(answer(NONE))
    assert code == 0
    assert check(found, "driver")["status"] == "warning"
    assert found["works"]["serving on the GPU"] == {"works": False, "reason": "no NVIDIA driver is installed"}
    assert found["works"]["serving on the CPU"]["works"] is True


def test_an_old_driver_is_broken(doctor: Doctor) -> None:
    code, found = doctor(answer(OLD))
    assert code == 1
    assert check(found, "driver")["advice"] == "install driver 580 or newer"
    assert found["works"]["serving on the GPU"]["reason"] == OLD["reason"]


def test_memory_that_others_use_is_a_warning(doctor: Doctor) -> None:
    code, found = doctor(answer({**GOOD, "devices": [{**DEVICE, "memory_free": 10**9}]}))
    assert (code, check(found, "device 0")["status"]) == (0, "warning")


def test_a_driver_that_hangs_is_given_up(doctor: Doctor) -> None:
    code, found = doctor("import threading\nthreading.Event().wait(60)", "--timeout", "0.3")
    assert code == 1
    assert check(found, "driver")["value"] == "the driver does not answer within 0.3 s"
    assert found["works"]["serving on the CPU"]["works"] is True


def test_a_driver_that_crashes_is_reported(doctor: Doctor) -> None:
    code, found = doctor("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert code == 1
    assert check(found, "driver")["value"] == "looking for devices ends with signal 11"


def test_ports_limits_and_folders(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with taken_port() as port:
        _, found = doctor(answer(GOOD), "--port", str(port))
        assert check(found, f"port {port}")["status"] == "warning"
    assert "cannot be written" in check(found, "kernel cache")["value"]
    assert check(found, "descriptors")["status"] == "warning"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/x" * 50)
    code, found = doctor(answer(GOOD))
    assert code == 1
    assert check(found, "temporary files")["value"].endswith("has too long a path for sockets")
    assert found["works"]["serving on the CPU"]["works"] is False


def test_what_is_found_is_shown_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real driver of the machine, or none."""
    monkeypatch.setenv("COLUMNS", "80")
    main(["doctor", "--no-network"])
    rows = capsys.readouterr().out.splitlines()
    assert max(map(len, rows)) <= 80
    assert [row for row in rows if row in ("GPU", "Machine", "Packages", "Models")] == [
        "GPU",
        "Machine",
        "Packages",
        "Models",
    ]
    assert any(row.startswith("Serving on the CPU:") for row in rows)
    assert not any(row.startswith("Downloading models: yes") for row in rows), "the hub was not asked"
