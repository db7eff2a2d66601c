"""CUDA C++ to machine code: NVRTC behind the cache on disk. Needs no device and no driver."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from tessera.engine.contract.errors import CompileError
from tessera.engine.cuda.cache import Cubin, CubinCache
from tessera.engine.cuda.headers import include_folders
from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.cuda.sources import SourceFile, Sources

SOURCE_FOLDER = Path(__file__).resolve().parents[2] / "cuda_src"
OPTIONS: tuple[str, ...] = ("--std=c++17",)
COMPILING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by key; several devices want the same
NAMES_PER_PROGRAM = 4  # more of a file's instantiations are compiled side by side


@dataclass(frozen=True)
class Program:
    """Instantiations of kernels of one file, compiled together."""

    file: str
    instantiations: tuple[Instantiation, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.instantiation(template) for spec, template in self.instantiations)


def group_programs(instantiations: Iterable[Instantiation]) -> list[Program]:
    """Split by file and into equal parts, in an order that depends on nothing but the set of names."""
    files: dict[str, list[Instantiation]] = {}
    for spec, template in sorted(instantiations, key=lambda pair: pair[0].instantiation(pair[1])):
        files.setdefault(spec.file, []).append((spec, template))
    programs = []
    for file, pairs in sorted(files.items()):
        parts = -(-len(pairs) // NAMES_PER_PROGRAM)
        programs += [Program(file, tuple(pairs[part::parts])) for part in range(parts)]
    return programs


class Compiler:
    """Compiles the files of `source_folder` for one architecture.

    Methods may be called from several threads; NVRTC does not hold the interpreter's lock.
    """

    def __init__(self, arch: str, cache: CubinCache, source_folder: Path = SOURCE_FOLDER) -> None:
        """`arch` is a compute capability without its point, and its suffix: `80`, `90a`."""
        self.arch = arch
        self.cache = cache
        self.source_folder = source_folder
        self._sources = Sources(source_folder)
        self._header_lock = threading.Lock()

    def compile(self, program: Program) -> Cubin:
        """Machine code of all of a program's kernels, from the cache if it is there.

        Raises: CompileError with the compiler's log.
        """
        files = self._sources.of(program.file)
        key = self._key(program, files)
        with COMPILING[key]:
            cubin = self.cache.load(key)
            if cubin is None:
                cubin = self._run(program, {name: file.text for name, file in files.items()})
                self.cache.store(key, cubin)
        return cubin

    def work(self, program: Program) -> int:
        """About how long it takes to compile, in no unit: the bytes of its sources for each kernel."""
        return len(program.instantiations) * sum(len(file.text) for file in self._sources.of(program.file).values())

    @cached_property
    def version(self) -> tuple[int, int]:
        """NVRTC's (major, minor)."""
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except RuntimeError as error:  # how cuda.bindings says that the library is not there
            raise CompileError(f"NVRTC was not found; install nvidia-cuda-nvrtc ({error})") from error
        _check(status, "nvrtcVersion")
        return major, minor

    @cached_property
    def _toolkit_headers(self) -> tuple[Path, ...]:
        return include_folders(self.version, self.cache.folder)

    def _options(self) -> list[str]:
        return [f"--gpu-architecture=sm_{self.arch}", *OPTIONS]

    def _key(self, program: Program, files: dict[str, SourceFile]) -> str:
        """Digest of everything that the machine code depends on."""
        digest = hashlib.sha256()
        parts = [text.encode() for text in (repr(self.version), *self._options(), *program.names)]
        for part in (*parts, *(file.digest for file in files.values())):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def _run(self, program: Program, texts: dict[str, str]) -> Cubin:
        with self._header_lock:
            folders = (self.source_folder / "include", *self._toolkit_headers)
        options = [option.encode() for option in (*self._options(), *(f"--include-path={path}" for path in folders))]
        headers = {name.encode(): text.encode() for name, text in texts.items() if name != program.file}
        status, handle = nvrtc.nvrtcCreateProgram(
            texts[program.file].encode(), program.file.encode(), len(headers), list(headers.values()), list(headers)
        )
        _check(status, "nvrtcCreateProgram")
        try:
            for name in program.names:
                _check(nvrtc.nvrtcAddNameExpression(handle, name.encode())[0], f"nvrtcAddNameExpression({name})")
            (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
            if status:
                raise CompileError(f"{program.file} does not compile for sm_{self.arch}:\n{_log(handle)}")
            return Cubin(_code(handle), {name: _lowered_name(handle, name) for name in program.names})
        finally:
            nvrtc.nvrtcDestroyProgram(handle)


def _code(handle: Any) -> bytes:
    status, size = nvrtc.nvrtcGetCUBINSize(handle)
    _check(status, "nvrtcGetCUBINSize")
    code = bytearray(size)
    _check(nvrtc.nvrtcGetCUBIN(handle, code)[0], "nvrtcGetCUBIN")
    return bytes(code)


def _lowered_name(handle: Any, name: str) -> str:
    status, lowered = nvrtc.nvrtcGetLoweredName(handle, name.encode())
    _check(status, f"nvrtcGetLoweredName({name})")
    return str(lowered.decode())


def _log(handle: Any) -> str:
    status, size = nvrtc.nvrtcGetProgramLogSize(handle)
    _check(status, "nvrtcGetProgramLogSize")
    log = bytearray(size)
    _check(nvrtc.nvrtcGetProgramLog(handle, log)[0], "nvrtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace").strip()


def _check(status: Any, called: str) -> None:
    if status:
        _, name = nvrtc.nvrtcGetErrorString(status)
        raise CompileError(f"{called} failed: {name.decode()}")
