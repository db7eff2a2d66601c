"""Where the compiler finds `cuda_bf16.h` and its kind.

NVRTC from 13.3 on carries them and unpacks them into a folder; before that they come with the
wheels or with a toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cuda.bindings import nvrtc

from tessera.engine.contract.errors import CompileError

FIRST_VERSION_WITH_HEADERS = (13, 3)
WITNESS = "cuda_bf16.h"


def include_folders(version: tuple[int, int], cache_dir: Path) -> tuple[Path, ...]:
    """Folders to search, for an NVRTC of this version.

    Raises: CompileError if the headers are nowhere.
    """
    folder = _bundled_headers(version, cache_dir) if version >= FIRST_VERSION_WITH_HEADERS else None
    folder = folder or next((place for place in toolkit_include_folders() if (place / WITNESS).is_file()), None)
    if folder is None:
        raise CompileError(
            f"CUDA's headers ({WITNESS}) were not found: NVRTC {version[0]}.{version[1]} does not bring them, and no "
            "toolkit is in CUDA_HOME, CUDA_PATH or /usr/local/cuda; install nvidia-cuda-nvrtc 13.3 or newer"
        )
    return tuple(place for place in (folder, folder / "cccl") if place.is_dir())


def toolkit_include_folders() -> Iterator[Path]:
    """Where headers may be without NVRTC's own: beside the wheels, then in a toolkit."""
    wheels = importlib.util.find_spec("nvidia")
    for place in (wheels.submodule_search_locations or []) if wheels else []:
        yield Path(place) / "cu13" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "include"
    for home_path in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        yield home_path / "include"


def _bundled_headers(version: tuple[int, int], cache_dir: Path) -> Path | None:
    """Unpack once into the cache, whole or not at all; into a folder of this process if it cannot be written."""
    target = cache_dir / f"headers-{version[0]}.{version[1]}"
    if (target / WITNESS).is_file():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        unpacked = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache_dir))
    except OSError:
        return _unpack(_folder_of_this_process())
    if not _unpack(unpacked):
        shutil.rmtree(unpacked, ignore_errors=True)
        return _unpack(_folder_of_this_process())
    with suppress(OSError):  # another process was first: its copy is as good
        unpacked.rename(target)
        return target
    if (target / WITNESS).is_file():
        shutil.rmtree(unpacked, ignore_errors=True)
        return target
    return unpacked


def _unpack(folder: Path) -> Path | None:
    status, *_ = nvrtc.nvrtcInstallBundledHeaders(os.fsencode(folder), 0)
    return None if status else folder


_temporary: list[tempfile.TemporaryDirectory[str]] = []


def _folder_of_this_process() -> Path:
    """A folder that goes when the process does."""
    if not _temporary:
        _temporary.append(tempfile.TemporaryDirectory(prefix="tessera-headers-"))
    return Path(_temporary[0].name)
