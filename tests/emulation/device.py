"""A device that runs the kernels' own sources on the CPU: slow, and the same on every machine."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.cuda.kernel import Argument, Instantiation, Kernel, KernelSpec, LaunchConfig
from engine.cuda.memory import Transfers
from engine.tensor import CpuDevice
from tests.emulation.source import MAIN, cpu_sources

COMPILER = "g++"
HERE = Path(__file__).parent
OPTIONS = (
    *("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-fno-gnu-unique"),  # each kernel has shared memory of its own
    "-U_FORTIFY_SOURCE",  # some systems' default, for which a jump to another stack is an attack
)


class EmulationError(RuntimeError):
    """A kernel did what a GPU does not allow."""


class EmulatedDevice(CpuDevice):
    """A GPU of sm_100 as far as `CudaOps` and the kernels know: with clusters, without what only sm_90a has.

    Attributes:
        launched: every kernel so far.
    """

    def __init__(self, folder: Path, edit: Callable[[str], str] = str, multiprocessors: int = 132) -> None:
        """Compiled kernels are kept in `folder`; `edit` makes another text of a kernel's file."""
        self.name = "cuda:0"
        self.device_name = "emulated"
        self.asynchronous = False
        self.compute_capability = (10, 0)
        self.arch = "100a"
        self.multiprocessors = multiprocessors
        self.max_shared_bytes = 227 << 10
        self._captured: list[tuple[Any, ...]] | None = None
        self.transfers = Transfers()
        self._folder = folder
        self._edit = edit
        self._kernels: dict[Instantiation, tuple[Kernel, Any]] = {}
        self.launched: set[Instantiation] = set()

    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None:
        ctypes.memset(pointer, value, nbytes)

    def compile(
        self, instantiations: Sequence[Instantiation], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Nothing: a kernel is compiled when it is first launched."""

    @contextmanager
    def capture(self) -> Iterator[Callable[[], EmulatedGraph]]:
        self._captured = launches = []
        try:
            yield lambda: EmulatedGraph(self, launches)
        finally:
            self._captured = None

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def clusters_at_once(self, spec: KernelSpec, template: tuple[str, ...], config: LaunchConfig) -> int:
        return self.multiprocessors // config.cluster

    def launch(self, spec: KernelSpec, template: tuple[str, ...], config: LaunchConfig, *arguments: Argument) -> None:
        if self._captured is not None:
            self._captured.append((spec, template, config, *arguments))
            return
        if (spec, template) not in self._kernels:
            self._kernels[spec, template] = Kernel(spec, None), library(self._folder, spec, template, self._edit).launch
        self.launched.add((spec, template))
        kernel, function = self._kernels[spec, template]
        kernel.set_arguments(arguments)
        grid, block = ((ctypes.c_uint * 3)(*sizes) for sizes in (config.grid, config.block))
        error = function(grid, block, config.shared_bytes, config.cluster, ctypes.c_void_p(kernel.arguments_address))
        if error is not None:
            raise EmulationError(f"{spec.instantiation(template)}, {config}: {error.decode()}")


@dataclass(frozen=True)
class EmulatedGraph:
    """What was launched while it was captured, arguments as they were."""

    device: EmulatedDevice
    launches: list[tuple[Any, ...]]

    def launch(self) -> None:
        for launch in self.launches:
            self.device.launch(*launch)


def kernel_folder(config: pytest.Config) -> Path:
    """A cache of the tests' own: what did not change since the last run is not compiled again."""
    assert config.cache is not None
    return Path(config.cache.mkdir("emulation"))


def library(folder: Path, spec: KernelSpec, template: tuple[str, ...], edit: Callable[[str], str]) -> ctypes.CDLL:
    """The kernel compiled, from `folder` if it is there. Raises: RuntimeError with the compiler's complaints."""
    sources = cpu_sources((spec, template), edit)
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    parts = [*OPTIONS, *headers, *sources, *sources.values()]
    found = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    if not found.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as name:  # another process may be at the same
            work = Path(name)
            for file, text in sources.items():
                (work / file).write_text(text)
            command = [COMPILER, *OPTIONS, f"-I{work}", f"-I{HERE}", work / MAIN, "-o", work / "kernel.so"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                kernel = spec.instantiation(template)
                raise RuntimeError(f"{kernel} does not compile for the CPU:\n{done.stderr[:4000]}")
            (work / "kernel.so").replace(found)
    loaded = ctypes.CDLL(str(found))
    loaded.launch.restype = ctypes.c_char_p
    return loaded
