"""A device that runs the kernels' own sources on the CPU: slow, and the same on every machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tessera.engine.cuda.kernel import Instantiation, Kernel, KernelSpec, LaunchConfig, P
from tessera.engine.cuda.memory import Transfers
from tessera.engine.tensor import CpuDevice, Tensor
from tests.emulation.source import MAIN, Edit, cpu_sources, main_source
from tests.emulation.tensor_maps import memory_of

COMPILER = "g++"
HERE = Path(__file__).parent
WATCHING = ("order.cc", "races.cc")
OPTIONS = (
    *("-std=c++20", "-O1", "-w", "-fPIC", "-pthread"),
    *("-fvisibility=hidden", "-fno-gnu-unique"),  # each kernel has shared memory of its own
    *("-g1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"),  # for messages: where a thread waits
    "-U_FORTIFY_SOURCE",  # some systems' default, for which a jump to another stack is an attack
)
WATCHED = ("-DEMULATED_RACES",)
WATCHED_KERNEL = ("-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
WEIGHTS = (
    "weight",
    "weight_map",
    "weight_scales",
    "codes",
    "headers",
    "codes_map",
    "headers_map",
    "norm",
    "bias",
    "groups",
)  # parameters
PLACE = re.compile(r"\{((?:0x[0-9a-f]+ ?)*)\}")  # in a message: a call, and those that led there


class EmulationError(RuntimeError):
    """A kernel did what a GPU does not allow."""


class EmulatedDevice(CpuDevice):
    """A GPU as far as `CudaOps` and the kernels know: of sm_90a, or of sm_100a without what only that has.

    Attributes:
        launched: every kernel so far.
    """

    def __init__(
        self,
        folder: Path,
        edit: Edit = dict,
        multiprocessors: int = 132,
        arch: str = "100a",
    ) -> None:
        """Compiled kernels are kept in `folder`; `edit` changes a kernel's file and headers, texts by name.

        With EMULATED_RACES=1 they are watched for races in shared memory (`races.cc`).
        """
        self.name = "cuda:0"
        self.device_name = "emulated"
        self.asynchronous = False
        self.compute_capability = divmod(int(arch.rstrip("a")), 10)
        self.arch = arch
        self.multiprocessors = multiprocessors
        self.max_shared_bytes = 227 << 10
        self._captured: list[EmulatedLaunch] | None = None
        self._overlaps = False
        self.transfers = Transfers()
        self._folder = folder
        self._edit = edit
        self._races = os.environ.get("EMULATED_RACES") == "1"
        self._kernels: dict[Instantiation, tuple[Kernel, Any]] = {}
        self.launched: set[Instantiation] = set()

    def see_memory_of(self, other: EmulatedDevice) -> None:
        """All memory is the host's."""

    def compile(
        self, instantiations: Sequence[Instantiation], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Nothing: a kernel is compiled when it is first launched."""

    @contextmanager
    def capture(self, *, overlaps: bool = True) -> Iterator[Callable[[], EmulatedGraph]]:
        launches: list[EmulatedLaunch] = []
        self._captured, self._overlaps = launches, overlaps
        try:
            yield lambda: EmulatedGraph(self, launches)
        finally:
            self._captured = None

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return self.multiprocessors // config.cluster

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        if self._captured is not None:
            weights_written = bool(self._captured) and self._captured[-1].spec.writes_weights
            overlaps = self._overlaps and spec.overlaps and self.compute_capability >= (9, 0) and not weights_written
            self._captured.append(EmulatedLaunch(spec, template, config, params, overlaps))
            return
        if (spec, template) not in self._kernels:
            loaded = library(self._folder, spec, template, self._edit, arch=self.arch, races=self._races)
            self._kernels[spec, template] = Kernel(spec, None), loaded
        self.launched.add((spec, template))
        kernel, loaded = self._kernels[spec, template]
        kernel.set_params(params)
        grid, block = ((ctypes.c_uint * 3)(*sizes) for sizes in (config.grid, config.block))
        error = loaded.launch(
            grid, block, config.shared_bytes, config.cluster, ctypes.c_void_p(kernel.arguments_address)
        )
        if error is not None:
            message = PLACE.sub(lambda found: source_lines(loaded._name, found[1]), error.decode())
            seed = os.environ.get("EMULATED_SEED", "0")
            raise EmulationError(f"{spec.instantiation(template)}, {config}, EMULATED_SEED={seed}: {message}")


class EmulatedLaunch(NamedTuple):
    """Attributes: overlaps: on a GPU it may start before those in front of it have ended."""

    spec: KernelSpec[Any]
    template: tuple[str, ...]
    config: LaunchConfig
    params: Any
    overlaps: bool

    def weights(self) -> list[bytes]:
        """What is in the memory that it may read as soon as it starts."""
        found = []
        for name, value in zip(self.params._fields, self.params, strict=True):
            if name in WEIGHTS and isinstance(value, Tensor | bytes):
                place = (value.pointer, value.nbytes) if isinstance(value, Tensor) else memory_of(value)
                found.append(hashlib.sha256(ctypes.string_at(*place)).digest())
        return found


@dataclass(frozen=True)
class EmulatedGraph:
    """What was launched while it was captured, parameters as they were."""

    device: EmulatedDevice
    launches: list[EmulatedLaunch]

    def launch(self) -> None:
        """One after the other. Raises: EmulationError where a kernel may read weights before they are written."""
        early: list[list[bytes]] = []  # weights of kernels that may start beside the last that does not, as that starts
        for place, launch in enumerate(self.launches):
            if not (early and launch.overlaps):
                beside = takewhile(lambda each: each.overlaps, self.launches[place + 1 :])
                early = [each.weights() for each in beside]
            elif launch.weights() != early.pop(0):
                kernel = launch.spec.instantiation(launch.template)
                raise EmulationError(f"{kernel} takes for a weight what a kernel writes that it does not wait for")
            self.device.launch(*launch[:4])


def kernel_folder(config: pytest.Config) -> Path:
    """A cache of the tests' own: what did not change since the last run is not compiled again."""
    assert config.cache is not None
    return Path(config.cache.mkdir("emulation"))


def library(
    folder: Path,
    spec: KernelSpec[Any],
    template: tuple[str, ...],
    edit: Edit,
    *,
    arch: str = "100a",
    races: bool,
) -> ctypes.CDLL:
    """The kernel compiled, from `folder` if it is there. Raises: RuntimeError with the compiler's complaints."""
    sources = cpu_sources((spec, template), edit)
    kernel = spec.instantiation(template)
    options = (*OPTIONS, *WATCHED) if races else OPTIONS
    architecture = f"-D__CUDA_ARCH__={arch.rstrip('a')}0"
    here = [path.read_text() for path in sorted(HERE.iterdir()) if path.suffix in (".h", ".cc", ".py")]
    found = folder / f"{digest([kernel, architecture, *options, *here, *sources, *sources.values()])}.so"
    if not found.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as name:  # another process may be at the same
            work = Path(name)
            for file, text in sources.items():
                (work / file).parent.mkdir(parents=True, exist_ok=True)
                (work / file).write_text(text)
            expand = [*options, architecture, f"-I{HERE}", f"-I{work}", "-E", "-x", "c++", work / spec.file]
            (work / MAIN).write_text(main_source((spec, template), run(expand, kernel)))
            # Apart, because what watches must not be watched.
            kernel_options = (*options, *WATCHED_KERNEL) if races else options
            headers = precompiled_headers(folder, kernel_options)
            run([*kernel_options, f"-I{headers}", f"-I{HERE}", "-c", work / MAIN, "-o", work / "kernel.o"], kernel)
            emulation = compiled_emulation(folder, options, races=races)
            run([*options, "-shared", work / "kernel.o", emulation, "-o", work / "kernel.so"], kernel)
            (work / "kernel.so").replace(found)
    loaded = ctypes.CDLL(str(found))
    loaded.launch.restype = ctypes.c_char_p
    return loaded


def precompiled_headers(folder: Path, options: Sequence[str]) -> Path:
    """A folder with what all kernels include; reading the C++ library's headers is most of a kernel's compilation."""
    texts = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    found = folder / f"headers-{digest([*options, *texts])}"
    if not found.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            made = Path(name) / "headers"
            made.mkdir()
            run([*options, "-x", "c++-header", HERE / "ptx.h", "-o", made / "ptx.h.gch"], "ptx.h")
            with suppress(OSError):  # another process was first
                made.replace(found)
    return found


def compiled_emulation(folder: Path, options: Sequence[str], *, races: bool) -> Path:
    """What is the same for all kernels, as one object."""
    sources = [path for path in sorted(HERE.glob("*.cc")) if races or path.name not in WATCHING]
    texts = [path.read_text() for path in (*sorted(HERE.glob("*.h")), *sources)]
    found = folder / f"{digest([*options, *texts])}.o"
    if not found.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            together, made = Path(name) / "emulation.cc", Path(name) / found.name
            together.write_text("".join(f'#include "{path}"\n' for path in sources))
            run([*options, "-O3", f"-I{HERE}", "-c", together, "-o", made], together.name)
            made.replace(found)
    return found


def digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def run(arguments: Sequence[str | Path], kernel: str) -> str:
    """The compiler; returns what it prints. Raises: RuntimeError with what it complains of."""
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kernel} does not compile for the CPU:\n{done.stderr[:4000]}")
    return done.stdout


def source_lines(library: str, addresses: str) -> str:
    """Of code in a library, the innermost call first: of a kernel's files if any are; addresses without `addr2line`."""
    if shutil.which("addr2line") is None:
        return addresses
    command = ["addr2line", "--exe", library, "--inlines", *addresses.split()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    places = [Path(line.split(" (")[0]).name for line in lines if ":" in line and not line.startswith("??")]
    kernels = [place for place in places if Path(place.split(":")[0]).suffix in (".cu", ".cuh")]
    return ", called at ".join(dict.fromkeys(kernels or places[:1])) or addresses
