"""NVRTC and the cubin cache, on a machine that needs no GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda.bindings import nvrtc

from tessera.engine.contract.errors import CompileError
from tessera.engine.cuda import compiler, headers
from tessera.engine.cuda.cache import Cubin, CubinCache, default_cache_dir
from tessera.engine.cuda.compiler import SOURCE_FOLDER, Compiler, Program, group_programs
from tessera.engine.cuda.generated import HEADERS, declare_header
from tessera.engine.cuda.headers import include_folders
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InT, Int32, OutT
from tessera.engine.formats import KERNEL_FORMATS
from tessera.engine.ops.cuda import attention, fp8, sampling, training
from tessera.engine.ops.cuda.attention.drafts import PAGED_ATTENTION_DRAFTS
from tessera.engine.ops.cuda.attention.drafts import STATIC_BYTES as DRAFTS_STATIC_BYTES
from tessera.engine.ops.cuda.attention.sm90_prefill import CAPPED
from tessera.engine.ops.cuda.fp8.sm90 import SM90_FP8_MATMUL
from tessera.engine.ops.cuda.fp8.sm90_rows import SM90_FP8_ROWS, STATIC_BYTES
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.sm90_kernels import SM90_MATMUL, SM90_MATMUL_WIDE
from tessera.engine.ops.cuda.lora.kernels import SM90_ADAPTED_MATMUL
from tessera.engine.ops.cuda.moe.blocks import EXPERT_BLOCK_MATMUL
from tessera.engine.ops.cuda.quant import fixed_row
from tessera.engine.ops.cuda.quant.product import BLOCK_MATMUL, TILES
from tessera.engine.ops.cuda.quant.sm90_fragments import SM90_BLOCK_FRAGMENTS
from tessera.engine.ops.cuda.quant.sm90_product import SM90_BLOCK_MATMUL
from tessera.engine.ops.cuda.quant.sm90_row import SM90_BLOCK_ROW
from tessera.engine.ops.cuda.quant.sm90_rows import SM90_BLOCK_ROWS
from tessera.engine.ops.cuda.registry import OF_DRAFTS, all_instantiations, all_specs
from tessera.engine.ops.cuda.training.sm90 import SM90_TURNED_MATMUL
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, E4M3
from tests.support.paths import ROOT

# Compiling every kernel for every dtype and architecture takes minutes; so each architecture gets every kernel,
# bfloat16 all instantiations once, and each other dtype once any two template arguments together: those that a smaller
# architecture of its dtype has compiled are not repeated.
DTYPE_OF_ARCH = {
    "80": "__half",
    "86": "float",
    "89": "__nv_bfloat16",
    "90a": "__nv_bfloat16",
    "100a": "__half",
    "120a": "float",
}
BFLOAT16 = "__nv_bfloat16"
REPEATING = ("89", "100a", "120a")  # another architecture has their dtype
ELF_MAGIC = b"\x7fELF"
FAST = "--Ofast-compile=max"  # takes a third of the time
RESERVED_SHARED_BYTES = 1024  # of every block, sm_90 on

SOURCE = """
#include "scale.cuh"
template <typename T>
__global__ void double_kernel(DOUBLE_PARAMS(T)) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) out[i] = twice(x[i]);
}
"""
HEADER = """
#include <cuda_bf16.h>

#include "generated/double.cuh"
__device__ inline float twice(float x) { return FACTOR * x; }
"""


class DoubleParams(NamedTuple):
    x: InT
    out: OutT
    size: Int32


class NoParams(NamedTuple):
    pass


declare_header("double", __name__, {"FACTOR": 2}, (DoubleParams,))
DOUBLE = KernelSpec("double.cu", "double_kernel", ("T",), DoubleParams)
PROGRAM = Program("double.cu", ((DOUBLE, ("float",)),))
NAME = "double_kernel<float>"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache, shared by this module so that headers are unpacked once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder like `cuda_src` with one small kernel."""
    folder = tmp_path / "sources"
    (folder / "include").mkdir(parents=True)
    (folder / "double.cu").write_text(SOURCE)
    (folder / "include" / "scale.cuh").write_text(HEADER)
    (folder / "include" / "unused.cuh").write_text("// not included\n")
    return folder


@pytest.fixture
def cache(cache_dir: Path) -> Iterator[CubinCache]:
    """An empty cache."""
    yield CubinCache(cache_dir)
    shutil.rmtree(cache_dir / "cubin", ignore_errors=True)


def only_file(cache: CubinCache) -> Path:
    (path,) = (cache.folder / "cubin").iterdir()
    return path


# Of the products by quantised blocks, which are many and alike, these tokens of a variant for each type of blocks.
BLOCK_TOKENS = {"80": {"16"}, "90a": {"1", "32"}}


# Of the kernels of one order of sums, which for prompts are others but for a flag, one each.
OF_ONE_ORDER = {
    "ordered_matmul_kernel": ("16", "2", "8", "6"),
    "matmul_kernel": ("64", "16", "128", "5"),
    "paged_attention_prefill_kernel": ("128", "2", "64"),
}


# Of attention of drafts, template arguments behind the types, for each architecture.
OF_ATTENTION_OF_DRAFTS = {
    "80": {"256 4 1 1 true false"},
    "90a": {"128 4 2 2 false false", "64 4 2 2 false true"},
}
BLOCK_PRODUCTS = (
    BLOCK_MATMUL,
    SM90_BLOCK_ROW,
    SM90_BLOCK_ROWS,
    SM90_BLOCK_FRAGMENTS,
    SM90_BLOCK_MATMUL,
    EXPERT_BLOCK_MATMUL,
)
OF_FP8_SPECS = (*fp8.SPECS, *attention.OF_E4M3.values())
# Kernels of training, for each dtype on one architecture, and heads of which size there.
TRAINING_HEADS = {"80": "64", "90a": "128", "120a": "32"}
SAMPLED = (*BLOCK_PRODUCTS, *OF_FP8_SPECS, *OF_DRAFTS, *CAPPED, *training.SPECS)  # of which there are hundreds

# Of kernels of e4m3, template arguments behind the types, for each architecture.
OF_FP8 = {
    "89": {
        "quantize_rows_kernel": {"false false true 1"},
        "fp8_decode_kernel": {"8 4 3 true"},
        "fp8_matmul_kernel": {"64 128 false"},
    },
    "90a": {
        "quantize_rows_kernel": {"false true false 2", "false false false 4"},
        "fp8_decode_kernel": {"1 4 4 true", "16 4 3 false"},
        "fp8_matmul_kernel": {"32 64 true"},
        "sm90_fp8_matmul_kernel": {"2 192 2 false", "2 128 1 true", "1 32 1 false"},
        "sm90_fp8_rows_kernel": {
            *("1 2 16 false", "1 1 16 true", "2 1 16 false", "4 1 16 true", "4 1 16 false"),
            *("1 2 32 true", "1 1 32 false", "2 1 32 true"),
        },
        "fp8_dequantize_kernel": {""},
        "rope_and_store_kernel": {"2 128"},
        "whole_rope_and_store_kernel": {"64 true", "128 false"},
        "paged_attention_kernel": {"false false", "true false", "false true"},
        "paged_attention_prefill_kernel": {"64 2 64 false false false", "80 2 64 false false true"},
        "sm90_paged_attention_prefill_kernel": {
            "64 3 2 false true false false",
            "128 2 2 false false false true",
            "128 2 2 false false true false",
        },
        "paged_attention_decode_kernel": {
            "80 4 4 true false false false",
            "128 2 3 true false false false",
            "128 4 3 true true false false",
        },
        "paged_attention_drafts_kernel": {"128 4 2 1 false false"},
    },
    "120a": {
        "fp8_matmul_kernel": {"64 64 true"},
        "paged_attention_prefill_kernel": {"256 1 32 false true false"},
        "paged_attention_decode_kernel": {
            "256 4 1 true false true false",
            "64 4 4 false false false true",
            "64 4 4 true true false true",
        },
    },
}


def is_compiled_here(pair: Instantiation, arch: str) -> bool:
    spec, template = pair
    if spec in OF_FP8_SPECS:
        if spec.batch_invariant:  # another only by a flag
            return False
        if template[0] != "__nv_bfloat16" or {"float", "__half"} & set(template):
            return False
        arguments = " ".join(part for part in template if part not in ("__nv_bfloat16", E4M3))
        return arguments in OF_FP8.get(arch, {}).get(spec.name, ())
    if spec.batch_invariant and not (arch == "90a" and template[0] == DTYPE_OF_ARCH[arch]):
        sizes = OF_ONE_ORDER.get(spec.name)
        return sizes is not None and all(size in template for size in sizes)
    if spec not in SAMPLED:
        return True
    if spec in CAPPED:
        return template[0] == "__nv_bfloat16" and not spec.batch_invariant
    if spec in OF_DRAFTS:
        return " ".join(template[2:]) in OF_ATTENTION_OF_DRAFTS.get(arch, ())
    values = dict(zip(spec.template, template, strict=True))
    if spec in training.SPECS:
        return arch in TRAINING_HEADS and values.get("HEAD_DIM", TRAINING_HEADS[arch]) == TRAINING_HEADS[arch]
    if spec is SM90_BLOCK_MATMUL:  # each type by one tile, and one type by all
        smallest = (values["T"], values["Out"], values["WARPGROUPS_M"]) == ("__nv_bfloat16", "__nv_bfloat16", "1")
        return smallest or values["F"] == "Q4_K"
    if spec is SM90_BLOCK_FRAGMENTS:  # likewise
        smallest = (values["T"], values["Out"], values["TOKENS"]) == ("__nv_bfloat16", "__nv_bfloat16", "64")
        return (smallest and values["WARPGROUPS"] == "2") or values["F"] == "Q4_K"
    if spec in (SM90_BLOCK_ROW, SM90_BLOCK_ROWS):  # each type once on one architecture, and one type everywhere
        largest = values["Out"] == values["T"] and values.get("TOKENS", "16") == "16"
        return values["F"] == "Q4_K" or (largest and arch == "90a")
    if spec is EXPERT_BLOCK_MATMUL:  # each type by one tile on one or two architectures, and one type by all
        archs = ("80",) if "Group" in values["F"] else ("80", "90a")
        of_all = arch in archs and (values["TOKENS"], values["UNITS"]) == ("16", "4")
        return of_all or values["F"] == "MXFP4"
    if "Group" in values["F"] and arch == "90a":  # which differ in their headers alone
        return values["F"].endswith("Group128") and template[3:] == ("1", "4", "3") and values["Out"] != "float"
    tile = TILES[int(values["TOKENS"])][0]
    if values["STAGES"] != str(tile.stages) and values["F"] != "Q4_K":  # how deep the ring is concerns no type
        return False
    return (
        values["TOKENS"] in BLOCK_TOKENS.get(arch, ())
        and values["UNITS"] == str(tile.units)
        and values["Out"] != "float"
    )


def two_arguments(pair: Instantiation) -> set[tuple[Any, ...]]:
    """Any two template arguments of a kernel, with their places."""
    spec, template = pair
    return {(spec,), *((spec, *two) for two in combinations_with_replacement(enumerate(template), 2))}


@functools.cache
def few_with_any_two(dtype: str) -> frozenset[Instantiation]:
    """Instantiations for a dtype that have any two arguments together, which are about half of them."""
    kept = set()
    for _, group in groupby(all_instantiations((dtype,)), key=itemgetter(0)):
        left = {pair: two_arguments(pair) for pair in group}
        while left and (most := max(left, key=lambda pair: len(left[pair]))) and (found := left[most]):
            kept.add(most)
            left = {pair: arguments - found for pair, arguments in left.items()}
    return frozenset(kept)


def adds_to_others(pair: Instantiation, arch: str) -> bool:
    """Not so what combines three and more arguments anew, but on the architectures of bfloat16."""
    if pair[0] in SAMPLED or pair[0].batch_invariant or (DTYPE_OF_ARCH[arch] == BFLOAT16 and pair in all_of(BFLOAT16)):
        return True
    return any(pair in few_with_any_two(dtype) for dtype in C_TYPE_NAMES.values())


@functools.cache
def all_of(dtype: str) -> frozenset[Instantiation]:
    return frozenset(all_instantiations((dtype,)))


@functools.cache
def pairs_for(arch: str) -> list[Instantiation]:
    """Every kernel once, all that an architecture of the same dtype has not compiled, and all for this one alone."""
    if arch not in REPEATING:
        return all_pairs_for(arch)
    other = next(other for other, dtype in DTYPE_OF_ARCH.items() if other != arch and dtype == DTYPE_OF_ARCH[arch])
    compiled = set(all_pairs_for(other))
    kept, seen = [], set()
    for pair in all_pairs_for(arch):
        if pair not in compiled or pair[0] not in seen:
            kept.append(pair)
            seen.add(pair[0])
    return kept


def all_pairs_for(arch: str) -> list[Instantiation]:
    """All of the architecture's dtype, and of the others what that does not reach."""
    pairs = all_instantiations((DTYPE_OF_ARCH[arch],))
    reached = {spec for spec, _ in pairs}
    for other in ("__nv_bfloat16", "float"):
        pairs += [pair for pair in all_instantiations((other,)) if pair[0] not in reached]
        reached |= {spec for spec, _ in pairs}
    for dtype in C_TYPE_NAMES.values():  # of a kernel for one architecture all, since no other compiles them
        there = set(pairs)
        pairs += [pair for pair in all_instantiations((dtype,)) if pair[0].arch_specific and pair not in there]
    pairs = [pair for pair in pairs if pair[0].supports(arch) and is_compiled_here(pair, arch)]
    return [pair for pair in pairs if adds_to_others(pair, arch)]


def test_all_instantiations_are_compiled_for_some_architecture() -> None:
    compiled = {pair for arch in DTYPE_OF_ARCH for pair in pairs_for(arch)}
    for dtype in C_TYPE_NAMES.values():
        pairs = {pair for pair in all_instantiations((dtype,)) if pair[0] not in SAMPLED}
        if dtype == BFLOAT16:
            assert pairs <= compiled
        portable = [pair for pair in pairs if not pair[0].batch_invariant]
        wanted = set().union(*map(two_arguments, portable))
        assert wanted <= set().union(*map(two_arguments, pairs & compiled))
    of_fp8 = {spec for spec in OF_FP8_SPECS if not spec.batch_invariant} - set(OF_DRAFTS)
    assert {spec for spec, _ in compiled if spec in OF_FP8_SPECS} - set(OF_DRAFTS) == of_fp8
    for arch in TRAINING_HEADS:
        assert {spec for spec in training.SPECS if spec.supports(arch)} <= {spec for spec, _ in pairs_for(arch)}
    for sampled in BLOCK_PRODUCTS:
        place = sampled.template.index("F")
        without = fixed_row.NO_INTEGERS if sampled is SM90_BLOCK_ROW else ()
        formats = {name for name in KERNEL_FORMATS if not name.startswith(without)}
        assert {template[place] for spec, template in compiled if spec is sampled} == formats
    for arch in DTYPE_OF_ARCH:
        expected = {spec for spec in all_specs() if spec.supports(arch)} - set(SAMPLED)
        assert {spec for spec, _ in pairs_for(arch)} - set(SAMPLED) == expected


def shown_by(pair: Instantiation) -> set[tuple[Any, ...]]:
    """Template arguments that machine code covers: any two together of a kernel for one architecture."""
    found = two_arguments(pair)
    return found if pair[0].arch_specific else {each for each in found if len(set(each)) <= 2}


@functools.cache
def machine_code_and_ptx() -> dict[str, tuple[list[Instantiation], list[Instantiation]]]:
    """By architecture: every kernel once, and whatever shows more than those before; then, as PTX, what is left.

    The assembler is three quarters of the time, and what it refuses, such as instructions that an architecture
    lacks, comes with a template argument, not with how arguments combine.
    """
    machine_code: dict[str, list[Instantiation]] = {}
    shown: set[tuple[Any, ...]] = set()
    for arch in DTYPE_OF_ARCH:
        kept, specs = [], set()
        for pair in pairs_for(arch):
            if pair[0] not in specs or not shown_by(pair) <= shown:
                kept.append(pair)
                specs.add(pair[0])
                shown |= shown_by(pair)
        machine_code[arch] = kept
    compiled = {pair for pairs in machine_code.values() for pair in pairs}
    found = {}
    for arch, pairs in machine_code.items():
        left = [pair for pair in pairs_for(arch) if pair not in compiled]
        compiled |= set(left)
        found[arch] = (pairs, left)
    return found


# Whose instantiations are all compiled to machine code.
WITHOUT_PTX = ("89",)


class PtxCompiler(Compiler):
    """Stops before the assembler."""

    def _options(self) -> list[str]:
        return [f"--gpu-architecture=compute_{self.arch}", *compiler.OPTIONS]


def ptx_of(handle: Any) -> bytes:
    """In the place of `compiler._code`."""
    status, size = nvrtc.nvrtcGetPTXSize(handle)
    compiler._check(status, "nvrtcGetPTXSize")
    ptx = bytearray(size)
    compiler._check(nvrtc.nvrtcGetPTX(handle, ptx)[0], "nvrtcGetPTX")
    return bytes(ptx)


def compile_all(with_compiler: Compiler, pairs: list[Instantiation], monkeypatch: pytest.MonkeyPatch) -> list[Cubin]:
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, FAST))
    monkeypatch.setattr(compiler, "NAMES_PER_PROGRAM", 16)  # headers are read once for each program
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        cubins = list(workers.map(with_compiler.compile, group_programs(pairs)))
    names = [name for cubin in cubins for name in cubin.lowered_names]
    assert sorted(names) == sorted(spec.instantiation(template) for spec, template in pairs)
    return cubins


@pytest.fixture
def kept_cache(pytestconfig: pytest.Config) -> CubinCache:
    """A cache of the tests' own: what did not change since the last run is not compiled again."""
    assert pytestconfig.cache is not None
    return CubinCache(Path(pytestconfig.cache.mkdir("cuda")))


@pytest.mark.timeout(280)  # seconds, and many more where others use the cores
@pytest.mark.parametrize("arch", DTYPE_OF_ARCH)
def test_every_kernel_compiles(arch: str, kept_cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, _ = machine_code_and_ptx()[arch]
    cubins = compile_all(Compiler(arch, kept_cache), pairs, monkeypatch)
    assert all(cubin.code.startswith(ELF_MAGIC) for cubin in cubins)
    for cubin in cubins:
        assert all(lowered.encode() in cubin.code for lowered in cubin.lowered_names.values())


@pytest.mark.timeout(280)
@pytest.mark.parametrize("arch", [arch for arch in DTYPE_OF_ARCH if arch not in WITHOUT_PTX])
def test_every_other_instantiation_compiles_to_ptx(
    arch: str, kept_cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pairs = machine_code_and_ptx()[arch]
    monkeypatch.setattr(compiler, "_code", ptx_of)
    for cubin in compile_all(PtxCompiler(arch, kept_cache), pairs, monkeypatch):
        assert all(f".entry {lowered}(".encode() in cubin.code for lowered in cubin.lowered_names.values())


def test_machine_code_and_ptx_are_all_that_is_to_be_compiled() -> None:
    parts = machine_code_and_ptx()
    compiled = {pair for both in parts.values() for pairs in both for pair in pairs}
    assert compiled == {pair for arch in DTYPE_OF_ARCH for pair in pairs_for(arch)}
    for arch, (pairs, left) in parts.items():
        assert {spec for spec, _ in pairs} == {spec for spec, _ in pairs_for(arch)}
        assert bool(left) == (arch not in WITHOUT_PTX)
    machine_code = {pair for pairs, _ in parts.values() for pair in pairs}
    assert set().union(*map(shown_by, machine_code)) == set().union(*map(shown_by, compiled))


def shared_bytes(cubin: Cubin, name: str) -> int:
    """Static shared memory of a kernel for sm_90 and later, without what every block has reserved: an ELF section."""
    code, wanted = cubin.code, f".nv.shared.{cubin.lowered_names[name]}".encode()
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names_at = struct.unpack_from("<3H", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + index * size) for index in range(count)]
    names = sections[names_at][4]
    for start, _, _, _, _, nbytes in sections:
        if code[names + start : code.index(b"\0", names + start)] == wanted:
            return nbytes - RESERVED_SHARED_BYTES
    return 0


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (SM90_MATMUL, sm90.BARRIER_BYTES),
        (SM90_MATMUL_WIDE, sm90.BARRIER_BYTES),
        (SM90_FP8_MATMUL, sm90.BARRIER_BYTES),
        (SM90_FP8_ROWS, STATIC_BYTES),
        (SM90_ADAPTED_MATMUL, sm90.BARRIER_BYTES),
        (SM90_TURNED_MATMUL, sm90.BARRIER_BYTES),
        (sampling.SAMPLE_CLUSTER, sampling.SAMPLE_STATIC_BYTES),
        (sampling.TOP_LOGPROBS_CLUSTER, sampling.LOGPROBS_STATIC_BYTES),
        (PAGED_ATTENTION_DRAFTS, DRAFTS_STATIC_BYTES),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_kernels_have_no_more_static_shared_memory_than_launches_leave_them(
    spec: KernelSpec[Any], most: int, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, FAST))
    pairs = [pair for pair in all_instantiations(("__nv_bfloat16",)) if pair[0] is spec]
    pair = pairs[-1]
    cubin = Compiler("90a", cache).compile(Program(spec.file, (pair,)))
    assert 0 < shared_bytes(cubin, spec.instantiation(pair[1])) <= most


class TestErrors:
    def test_a_broken_source_carries_the_log(self, sources: Path, cache: CubinCache) -> None:
        (sources / "double.cu").write_text(SOURCE.replace("twice(x[i])", "thrice(x[i])"))
        with pytest.raises(
            CompileError, match=r"double\.cu does not compile for sm_80(.|\n)*\(6\): error(.|\n)*thrice"
        ):
            Compiler("80", cache, sources).compile(PROGRAM)
        assert not (cache.folder / "cubin").exists()

    def test_a_kernel_that_is_not_there(self, sources: Path, cache: CubinCache) -> None:
        ghost = KernelSpec("double.cu", "ghost_kernel", (), NoParams)
        with pytest.raises(CompileError, match="ghost_kernel"):
            Compiler("80", cache, sources).compile(Program("double.cu", ((ghost, ()),)))

    def test_a_file_that_is_not_there(self, sources: Path, cache: CubinCache) -> None:
        (sources / "double.cu").unlink()
        with pytest.raises(CompileError, match=r"double\.cu cannot be read"):
            Compiler("80", cache, sources).compile(PROGRAM)

    def test_an_unknown_architecture(self, sources: Path, cache: CubinCache) -> None:
        with pytest.raises(CompileError, match="sm_12345"):
            Compiler("12345", cache, sources).compile(PROGRAM)


class TestCache:
    def test_second_time_is_a_hit(self, sources: Path, cache: CubinCache) -> None:
        first = Compiler("80", cache, sources).compile(PROGRAM)
        assert (cache.hits, cache.misses) == (0, 1)
        assert Compiler("80", cache, sources).compile(PROGRAM) == first
        assert (cache.hits, cache.misses) == (1, 1)

    @pytest.mark.parametrize("changed", ["double.cu", "include/scale.cuh"])
    def test_a_changed_source_is_a_miss(self, changed: str, sources: Path, cache: CubinCache) -> None:
        Compiler("80", cache, sources).compile(PROGRAM)
        with (sources / changed).open("a") as file:
            file.write("// changed\n")
        Compiler("80", cache, sources).compile(PROGRAM)
        assert (cache.hits, cache.misses) == (0, 2)

    def test_a_changed_constant_is_a_miss(
        self, sources: Path, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        double = Compiler("80", cache, sources).compile(PROGRAM)
        header = HEADERS["generated/double.cuh"]
        tripled = header._replace(text=header.text.replace("FACTOR = 2", "FACTOR = 3"))
        monkeypatch.setitem(HEADERS, "generated/double.cuh", tripled)
        assert Compiler("80", cache, sources).compile(PROGRAM).code != double.code
        assert (cache.hits, cache.misses) == (0, 2)

    def test_a_header_that_is_not_included_does_not_matter(self, sources: Path, cache: CubinCache) -> None:
        Compiler("80", cache, sources).compile(PROGRAM)
        (sources / "include" / "unused.cuh").write_text("// changed\n")
        Compiler("80", cache, sources).compile(PROGRAM)
        assert (cache.hits, cache.misses) == (1, 1)

    def test_architecture_and_options_are_in_the_key(
        self, sources: Path, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codes = [Compiler(arch, cache, sources).compile(PROGRAM).code for arch in ("80", "90a")]
        monkeypatch.setattr(compiler, "OPTIONS", ("--std=c++17", "--use_fast_math"))
        Compiler("80", cache, sources).compile(PROGRAM)
        assert codes[0] != codes[1]
        assert (cache.hits, cache.misses) == (0, 3)

    @pytest.mark.parametrize("length", [0, 10, 35, 36, 200, -1])
    def test_a_file_cut_short_is_compiled_anew(self, length: int, sources: Path, cache: CubinCache) -> None:
        nvrtc = Compiler("80", cache, sources)
        good = nvrtc.compile(PROGRAM)
        path = only_file(cache)
        path.write_bytes(path.read_bytes()[:length])
        assert nvrtc.compile(PROGRAM) == good
        assert nvrtc.compile(PROGRAM) == good
        assert (cache.hits, cache.misses) == (1, 2)

    @pytest.mark.parametrize("position", [0, 33, 40, -1])
    def test_a_damaged_byte_is_noticed(self, position: int, sources: Path, cache: CubinCache) -> None:
        good = Compiler("80", cache, sources).compile(PROGRAM)
        path = only_file(cache)
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)
        assert Compiler("80", cache, sources).compile(PROGRAM) == good
        assert (cache.hits, cache.misses) == (0, 2)

    def test_a_file_under_another_name_is_noticed(self, cache: CubinCache) -> None:
        cache.store("aa", Cubin(b"code", {"f": "_f"}))
        only_file(cache).rename(cache.folder / "cubin" / "bb.cubin")
        assert cache.load("bb") is None

    def test_a_folder_that_cannot_be_written_is_no_error(self, sources: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("where a folder should be")
        cache = CubinCache(tmp_path / "file" / "cache")
        assert Compiler("80", cache, sources).compile(PROGRAM).code.startswith(ELF_MAGIC)
        assert (cache.hits, cache.misses) == (0, 1)

    def test_threads_and_processes_may_share_it(self, sources: Path, tmp_path: Path) -> None:
        """All start on an empty folder, headers included, and leave nothing half done."""
        folder = tmp_path / "shared"
        script = (
            "import sys; from pathlib import Path\n"
            "from tests.cuda.test_compile import CubinCache, Compiler, PROGRAM, NAME\n"
            "cubin = Compiler('80', CubinCache(Path(sys.argv[1])), Path(sys.argv[2])).compile(PROGRAM)\n"
            "print(cubin.lowered_names[NAME])"
        )
        others = [
            subprocess.Popen([sys.executable, "-c", script, folder, sources], cwd=ROOT, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        with ThreadPoolExecutor(4) as workers:
            jobs = [workers.submit(Compiler("80", CubinCache(folder), sources).compile, PROGRAM) for _ in range(4)]
            cubins = [job.result() for job in jobs]
        outputs = [other.communicate(timeout=60)[0].decode().strip() for other in others]
        assert outputs == [cubins[0].lowered_names[NAME]] * 2
        assert all(cubin == cubins[0] for cubin in cubins)
        assert only_file(CubinCache(folder)).suffix == ".cubin"
        assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["cubin", "headers"]
        assert CubinCache(folder).load(only_file(CubinCache(folder)).stem) == cubins[0]

    def test_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("TESSERA_CACHE_DIR", raising=False)
        assert default_cache_dir() == Path("/home/someone/.cache/tessera")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert default_cache_dir() == Path("/xdg/tessera")
        monkeypatch.setenv("TESSERA_CACHE_DIR", "/own")
        assert default_cache_dir() == Path("/own")


class TestHeaders:
    """An NVRTC before 13.3 brings no headers."""

    def test_from_a_toolkit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        include = tmp_path / "toolkit" / "include"
        (include / "cccl").mkdir(parents=True)
        (include / "cuda_bf16.h").touch()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
        monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
        assert include_folders((13, 0), tmp_path) == (include, include / "cccl")

    def test_from_wheels_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = importlib.util.spec_from_loader("nvidia", loader=None, is_package=True)
        assert package is not None
        package.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
        include = tmp_path / "cu13" / "include"
        include.mkdir(parents=True)
        (include / "cuda_bf16.h").touch()
        assert include_folders((13, 2), tmp_path) == (include,)

    def test_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(headers, "toolkit_include_folders", lambda: iter([tmp_path]))
        with pytest.raises(CompileError, match=r"headers \(cuda_bf16\.h\) were not found: NVRTC 13\.0"):
            include_folders((13, 0), tmp_path)


class TestGrouping:
    def test_by_file_and_independent_of_order(self) -> None:
        pairs = all_instantiations(tuple(C_TYPE_NAMES.values()))
        programs = group_programs(pairs)
        assert programs == group_programs(reversed(pairs))
        assert all(len(program.names) <= compiler.NAMES_PER_PROGRAM for program in programs)
        assert all(spec.file == program.file for program in programs for spec, _ in program.instantiations)
        assert sorted(name for program in programs for name in program.names) == sorted(
            spec.instantiation(template) for spec, template in pairs
        )


@pytest.mark.parametrize("path", sorted(SOURCE_FOLDER.rglob("*.cu*")), ids=lambda path: path.name)
def test_no_lambda_is_generic(path: Path) -> None:
    """NVRTC 13.0 takes one for a function of the host, later ones do not."""
    assert not re.search(r"\]\s*\([^)]*\bauto\b", path.read_text())
