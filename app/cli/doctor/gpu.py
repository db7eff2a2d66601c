"""Checks of driver, GPU and compiler, made in another process: a broken driver may hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera.app.cli.cache.units import size
from tessera.app.cli.doctor.check import Check, Status
from tessera.app.cli.doctor.folders import folder_check, folder_size

GROUP = "GPU"
SURVEY = "tessera.engine.cuda.inspection.survey"
KILL_SECONDS = 2.0


def gpu_checks(timeout: float) -> tuple[list[Check], str]:
    """The checks, and why the GPU cannot be used; empty if it can."""
    survey, problem = _survey(timeout)
    if survey is None:
        return [Check(GROUP, "driver", "error", problem, "restart the machine or reinstall the driver")], problem
    checks = [*_driver(survey), *_devices(survey), _nvrtc(survey), _kernel_cache()]
    if survey["nvrtc"] is None and survey["usable"]:
        return checks, f"NVRTC: {survey['nvrtc_problem']}"
    return checks, "" if survey["usable"] else survey["reason"]


def _survey(timeout: float) -> tuple[dict[str, Any] | None, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", SURVEY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, complaint = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, where no signal reaches it
            process.communicate(timeout=KILL_SECONDS)
        return None, f"the driver does not answer within {timeout:g} s"
    if process.returncode == 0:
        found: dict[str, Any] = json.loads(output)
        return found, ""
    last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return None, f"looking for devices ends with {ended}{f': {last}' if last else ''}"


def _driver(survey: dict[str, Any]) -> list[Check]:
    if survey["cuda"] is None:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            advice = "the devices are there, but not libcuda: in a container run it with --gpus all, else install it"
            return [Check(GROUP, "driver", "error", survey["reason"], advice)]
        return [Check(GROUP, "driver", "warning", "none", "a GPU needs NVIDIA driver 580 or newer")]
    own = survey["driver"] or "of unknown version"
    status: Status = "ok" if survey["usable"] else "error"
    if survey["usable"]:
        return [Check(GROUP, "driver", status, f"{own}, CUDA {survey['cuda']}")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    advice = "install driver 580 or newer" if "is needed" in survey["reason"] else "see nvidia-smi"
    if visible is not None and not survey["devices"]:
        advice = f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it"
    return [Check(GROUP, "driver", status, f"{own}, CUDA {survey['cuda']}: {survey['reason']}", advice)]


def _devices(survey: dict[str, Any]) -> list[Check]:
    checks = []
    for index, device in enumerate(survey["devices"]):
        major, minor = device["compute_capability"]
        free = "" if device["memory_free"] is None else f", {size(device['memory_free'])} free"
        value = f"{device['name']}, compute capability {major}.{minor}, {size(device['memory'])}{free}"
        status: Status = "ok" if device["usable"] else "warning"
        checks.append(Check(GROUP, f"device {index}", status, value, "" if device["usable"] else device["reason"]))
        if device["memory_free"] is not None and device["memory_free"] < 0.5 * device["memory"]:
            checks[-1] = Check(
                GROUP, f"device {index}", "warning", value, "other programs use its memory (nvidia-smi lists them)"
            )
    return checks


def _nvrtc(survey: dict[str, Any]) -> Check:
    if survey["nvrtc"] is not None:
        return Check(GROUP, "NVRTC", "ok", f"{survey['nvrtc']}, compiles kernels")
    status: Status = "error" if survey["usable"] else "warning"
    return Check(GROUP, "NVRTC", status, survey["nvrtc_problem"], "pip install nvidia-cuda-nvrtc")


def _kernel_cache() -> Check:
    """Where `engine/cuda/cache.py` keeps compiled kernels."""
    from tessera.engine.cuda.cache import default_cache_dir

    folder = default_cache_dir()
    found = folder_check(GROUP, "kernel cache", folder, "set TESSERA_CACHE_DIR; kernels are compiled at every start")
    if found.status == "ok":
        return Check(GROUP, "kernel cache", "ok", f"{folder}, {size(folder_size(folder))}")
    return found
