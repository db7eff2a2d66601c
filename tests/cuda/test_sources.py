"""Every kernel in `cuda_src/` against its description in Python: a drifted argument corrupts silently."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.ops.cuda.activation import silu_mul_config
from tessera.engine.ops.cuda.registry import all_instantiations, all_specs
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, CHUNK, WARP_SIZE, flat_config, row_config
from tests.support.paths import ROOT

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
NESTED = r"\((?:[^()]|\([^()]*\))*\)"
KERNEL = re.compile(
    rf"(?:template\s*<(?P<template>[^<>]*)>\s*)?(?:__cluster_dims__\s*{NESTED}\s*)?__global__\s+(?:void\s+)?"
    rf"(?:BLOCKS_OF_A_CLUSTER\s*{NESTED}\s*)?(?:__launch_bounds__\s*{NESTED}\s*)?"
    rf"(?:void\s+)?(?P<name>\w+)\s*(?P<parameters>{NESTED})"
)
KINDS = {
    "int": "int32",
    "long long": "int64",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "unsigned long long": "uint64",
    "float": "float32",
    "TensorMap": "tensor_map",
}
QUALIFIERS = re.compile(r"\b(?:const|__restrict__|__grid_constant__)\b")


@dataclass(frozen=True)
class Signature:
    """A `__global__` function as the source has it, in the terms of `KernelSpec`."""

    file: str
    name: str
    template: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]


def split_parameter(text: str) -> tuple[str, str]:
    """(name, kind) of one parameter such as `const T* __restrict__ x` or `long long size`."""
    words = QUALIFIERS.sub(" ", text)
    match = re.fullmatch(r"\s*(?P<type>.*?[\s*])(?P<name>\w+)\s*", words, re.DOTALL)
    assert match, f"cannot read the parameter {text!r}"
    kind = " ".join(match["type"].split())
    if kind.endswith("*"):
        return match["name"], "pointer"
    assert kind in KINDS, f"parameters of type {kind!r} have no description: {text!r}"
    return match["name"], KINDS[kind]


def signatures(source: str, file: str) -> list[Signature]:
    code = COMMENT.sub(" ", source)
    found = []
    for match in KERNEL.finditer(code):
        template = [part.split("=")[0].split()[-1] for part in (match["template"] or "").split(",") if part.strip()]
        parameters = [split_parameter(part) for part in match["parameters"][1:-1].split(",") if part.strip()]
        found.append(Signature(file, match["name"], tuple(template), tuple(parameters)))
    assert len(found) == code.count("__global__"), f"{file}: a kernel's signature was not understood"
    return found


def of_spec(spec: KernelSpec) -> Signature:
    return Signature(spec.file, spec.name, spec.template, spec.parameters)


SPECS = all_specs()
SOURCES = sorted(SOURCE_FOLDER.rglob("*.cu"))
IN_SOURCE = {
    (s.file, s.name): s for path in SOURCES for s in signatures(path.read_text(), str(path.relative_to(SOURCE_FOLDER)))
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_description_is_the_sources(spec: KernelSpec) -> None:
    assert (spec.file, spec.name) in IN_SOURCE, f"{spec.name} is not in cuda_src/{spec.file}"
    assert of_spec(spec) == IN_SOURCE[spec.file, spec.name]


def test_every_kernel_is_described_once() -> None:
    """Once for each architecture from which on some of its variants compile."""
    described = [(spec.file, spec.name, spec.min_arch) for spec in SPECS]
    assert len(described) == len(set(described))
    assert set(IN_SOURCE) == {(file, name) for file, name, _ in described}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.overlaps], ids=lambda spec: spec.name)
def test_kernels_that_overlap_take_no_memory_for_constant(spec: KernelSpec) -> None:
    """Through `const T* __restrict__` the compiler loads as from memory that nobody writes (ld.global.nc): before
    the kernel has waited for those who write it, and from caches that have not heard of it."""
    code = COMMENT.sub(" ", (SOURCE_FOLDER / spec.file).read_text())
    (match,) = [match for match in KERNEL.finditer(code) if match["name"] == spec.name]
    assert "__restrict__" not in match["parameters"]
    assert "wait_for_earlier_kernels()" in code


def test_kernels_are_named_as_such() -> None:
    assert [name for _, name in IN_SOURCE if not name.endswith("_kernel")] == []


@pytest.mark.parametrize("dtypes", [("float",), ("__nv_bfloat16",), tuple(C_TYPE_NAMES.values())], ids=str)
def test_every_description_is_instantiated(dtypes: tuple[str, ...]) -> None:
    pairs = all_instantiations(dtypes)
    assert len(pairs) == len(set(pairs))
    if len(dtypes) == len(C_TYPE_NAMES):
        assert {spec for spec, _ in pairs} == set(SPECS)
    for spec, template in pairs:
        assert spec.instantiation(template).startswith(spec.name)  # raises where the count differs


def test_headers_are_included_somewhere() -> None:
    files = [*SOURCES, *(SOURCE_FOLDER / "include").glob("*.cuh")]
    included = {name for path in files for name in re.findall(r'#include "([^"]+)"', path.read_text())}
    generated = {header.name for spec in SPECS for header in spec.headers}
    assert included - generated == {path.name for path in (SOURCE_FOLDER / "include").iterdir()}


def test_constants_are_the_headers() -> None:
    header = (SOURCE_FOLDER / "include" / "common.cuh").read_text()
    values = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", header)}
    assert (values["WARP_SIZE"], values["CHUNK"]) == (WARP_SIZE, CHUNK)


class TestParser:
    """The parser itself, so that what it lets through is known."""

    SOURCE = """
    // __global__ in a comment is none
    template <typename T, int WIDTH = 4, bool LOG>
    __global__ void __launch_bounds__(WARPS * (32)) some_kernel(const T* __restrict__ x, int* out, long long size,
        unsigned flags, const unsigned long long seed, float eps) {}
    __global__ void plain_kernel(float **rows, const int count) { f(1); }
    """

    def test_reads_templates_and_kinds(self) -> None:
        some, plain = signatures(self.SOURCE, "a.cu")
        assert some == Signature(
            "a.cu",
            "some_kernel",
            ("T", "WIDTH", "LOG"),
            (
                ("x", "pointer"),
                ("out", "pointer"),
                ("size", "int64"),
                ("flags", "uint32"),
                ("seed", "uint64"),
                ("eps", "float32"),
            ),
        )
        assert plain == Signature("a.cu", "plain_kernel", (), (("rows", "pointer"), ("count", "int32")))

    @pytest.mark.parametrize("parameter", ["short x", "Params params", "double x", "bool x"])
    def test_refuses_what_cannot_be_described(self, parameter: str) -> None:
        with pytest.raises(AssertionError, match="have no description"):
            signatures(f"__global__ void k_kernel({parameter}) {{}}", "a.cu")

    def test_notices_a_signature_it_cannot_read(self) -> None:
        with pytest.raises(AssertionError, match="not understood"):
            signatures("template <typename A, class B = X<int>> __global__ auto k() -> void {}", "a.cu")


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
