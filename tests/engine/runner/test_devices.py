"""Which device is taken, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.driver import FoundDevice
from tessera.engine.runner import devices
from tessera.engine.runner.devices import select_device
from tessera.engine.tensor import CPU


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> str:
    reason = "the NVIDIA driver sees no CUDA device"
    monkeypatch.setattr("tessera.engine.cuda.driver.find_device", lambda: FoundDevice(False, reason))
    return reason


def test_auto_takes_the_cpu_and_says_why(no_cuda: str) -> None:
    device, reason = select_device("auto")
    assert device is CPU
    assert no_cuda in reason


def test_cuda_without_a_device_is_an_error_with_the_reason(no_cuda: str) -> None:
    with pytest.raises(ConfigError, match=f"--device cuda cannot be used: {no_cuda}"):
        select_device("cuda")


def test_the_cpu_is_never_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.engine.cuda.driver.find_device", lambda: FoundDevice(True, "a GPU"))
    assert select_device("cpu") == (CPU, "the CPU was asked for")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_usable_device_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    monkeypatch.setattr("tessera.engine.cuda.driver.find_device", lambda: FoundDevice(True, "NVIDIA H200 (141 GiB)"))
    monkeypatch.setattr("tessera.engine.cuda.device.CudaDevice", lambda: made)
    device, reason = select_device(name)  # type: ignore[arg-type]
    assert device is made
    assert "NVIDIA H200" in reason


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_the_packages_for_a_gpu_the_cpu_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_gpu: bool
) -> None:
    """As after `pip install tessera-llm`, without the extra: loud where a GPU lies idle for that."""
    monkeypatch.setattr(devices, "has_cuda_packages", lambda: False)
    monkeypatch.setattr(devices, "DRIVER_DEVICE", tmp_path if has_gpu else tmp_path / "missing")
    device, reason = devices.select_device("auto")
    assert (device, "tessera-llm[cuda]" in reason) == (CPU, True)
    assert ("this machine has an NVIDIA GPU, which is not used" in caplog.text) == has_gpu
    with pytest.raises(ConfigError, match=r"pip install 'tessera-llm\[cuda\]'"):
        devices.select_device("cuda")
    assert devices.select_device("cpu") == (CPU, "the CPU was asked for")
