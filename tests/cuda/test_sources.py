"""Every kernel in `cuda_src/` is described once in Python, by the names that its source has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER
from tessera.engine.cuda.generated import HEADERS
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.cuda.params import signature_of
from tessera.engine.cuda.sources import INCLUDE
from tessera.engine.ops.cuda.activation import silu_mul_config
from tessera.engine.ops.cuda.attention import OF_E4M3
from tessera.engine.ops.cuda.generate import write_headers
from tessera.engine.ops.cuda.registry import OF_RARE_OPS, all_instantiations, all_specs
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, CHUNK, WARP_SIZE, flat_config, row_config
from tests.support.paths import ROOT

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
KERNEL = re.compile(
    r"(?:template\s*<(?P<template>[^<>]*)>\s*)?[^;{}<>]*?__global__[^;{}]*?"
    r"\b(?P<name>\w+_kernel)\((?P<signature>[^{]*)\) \{"
)
SPECS = all_specs()
SOURCES = sorted(SOURCE_FOLDER.rglob("*.cu"))
HEADER_FILES = sorted((SOURCE_FOLDER / "include").rglob("*.cuh"))


def code_of(file: str) -> str:
    return COMMENT.sub(" ", (SOURCE_FOLDER / file).read_text())


def kernels_of(file: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Names of template parameters, and the signature, of a file's kernels by their names."""
    found = {}
    for match in KERNEL.finditer(code_of(file)):
        template = [part.split()[-1] for part in (match["template"] or "").split(",") if part.strip()]
        found[match["name"]] = (tuple(template), match["signature"])
    return found


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_description_is_the_sources(spec: KernelSpec[Any]) -> None:
    assert kernels_of(spec.file)[spec.name] == (spec.template, signature_of(spec.params))


def test_every_kernel_is_described_once() -> None:
    """Once for each architecture from which on some of its variants compile, for those of one order of sums, for those
    of few models, and for a KV cache of e4m3."""
    rare = {spec: op for op, specs in OF_RARE_OPS.items() for spec in specs}
    e4m3 = set(OF_E4M3.values())
    described = [
        (spec.file, spec.name, spec.min_arch, spec.batch_invariant, spec.on_demand, rare.get(spec), spec in e4m3)
        for spec in SPECS
    ]
    assert len(described) == len(set(described))
    in_sources = {
        (file, name) for file in (str(path.relative_to(SOURCE_FOLDER)) for path in SOURCES) for name in kernels_of(file)
    }
    assert in_sources == {(file, name) for file, name, *_ in described}
    assert sum(path.read_text().count("__global__") for path in SOURCES) == len(in_sources)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.overlaps], ids=lambda spec: spec.name)
def test_kernels_that_overlap_take_no_memory_for_constant(spec: KernelSpec[Any]) -> None:
    """Through `const T* __restrict__` the compiler loads as from memory that nothing writes (ld.global.nc): before
    the kernel has waited for the one that writes it, and from caches that do not know of the write."""
    assert not [field for field in spec.fields if "__restrict__" in field.type]
    assert "__restrict__" not in code_of(spec.file)
    headers = [f"include/{name}" for name in INCLUDE.findall(code_of(spec.file))]
    texts = [code_of(name) for name in (spec.file, *headers) if (SOURCE_FOLDER / name).is_file()]
    assert any("wait_for_earlier_kernels();" in text for text in texts)


@pytest.mark.parametrize("dtypes", [("float",), ("__nv_bfloat16",), tuple(C_TYPE_NAMES.values())], ids=str)
def test_every_description_is_instantiated(dtypes: tuple[str, ...]) -> None:
    pairs = all_instantiations(dtypes)
    assert len(pairs) == len(set(pairs))
    if len(dtypes) == len(C_TYPE_NAMES):
        assert {spec for spec, _ in pairs} == set(SPECS)
    for spec, template in pairs:
        assert spec.instantiation(template).startswith(spec.name)  # raises where the count differs


def test_headers_are_included_somewhere() -> None:
    included = {name for path in (*SOURCES, *HEADER_FILES) for name in INCLUDE.findall(path.read_text())}
    files = {str(path.relative_to(SOURCE_FOLDER / "include")) for path in HEADER_FILES}
    ours = {path for path, header in HEADERS.items() if header.source.startswith("tessera.")}
    assert included == files | ours


def test_an_editor_gets_the_headers_as_files(tmp_path: Path) -> None:
    write_headers(tmp_path)
    assert (tmp_path / "generated" / "rmsnorm.cuh").read_text() == HEADERS["generated/rmsnorm.cuh"].text


def is_launchable(config: LaunchConfig) -> bool:
    (x, y, z), (width, height, depth) = config.grid, config.block
    return (
        0 < x < 2**31
        and 0 < y < 2**16
        and 0 < z < 2**16
        and 0 < width * height * depth <= 1024
        and width % WARP_SIZE == 0
        and config.shared_bytes == 0
    )


SIZES = [1, 2, 7, 8, 9, 255, 2047, 2048, 2049, 151_936, 2**24 + 1, 2**31 - 1, 2**31, 2**33 + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("per_thread", [4, CHUNK])
def test_flat_launch_covers_the_size(size: int, per_thread: int) -> None:
    config = flat_config(size, per_thread)
    covered = config.grid[0] * config.block[0] * per_thread
    assert is_launchable(config)
    assert size <= covered < size + config.block[0] * per_thread


@pytest.mark.parametrize("width", [1, 31, 64, 257, 1024, 4096, 8200, 151_936, 2**31 - 1])
def test_row_launch_has_a_block_a_row_whose_size_is_the_widths_alone(width: int) -> None:
    configs = [row_config(rows, width) for rows in (1, 3, 65_536, 2**24, 2**31 - 1)]
    assert all(map(is_launchable, configs))
    assert [config.grid[0] for config in configs] == [1, 3, 65_536, 2**24, 2**31 - 1]
    assert len({config.block for config in configs}) == 1
    assert configs[0].block[0] >= min(-(-width // CHUNK), 1024)


@pytest.mark.parametrize("inner", [1, 5, 2048, 2049, 28_672, 100_000_000])
@pytest.mark.parametrize("rows", [1, 17, 2**24])
def test_silu_mul_launch_covers_every_row(rows: int, inner: int) -> None:
    config = silu_mul_config(rows, inner)
    assert is_launchable(config)
    assert config.grid[0] == rows
    assert inner <= config.grid[1] * config.block[0] * CHUNK < inner + config.block[0] * CHUNK


def test_sources_are_where_the_package_is() -> None:
    assert ROOT / "cuda_src" == SOURCE_FOLDER
