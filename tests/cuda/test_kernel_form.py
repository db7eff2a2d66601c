"""Kernels can be scanned: a header comment in one form, bodies and files of bounded length, PTX in headers alone.

And lambdas are such that all supported versions of NVRTC take them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER

ROOMS = sorted(path for path in SOURCE_FOLDER.iterdir() if path.is_dir() and path.name != "include")
FILES = [path for room in ROOMS for path in sorted(room.iterdir())]
HEADERS = sorted((SOURCE_FOLDER / "include").rglob("*.cuh"))
MAX_BODY_LINES = 150
LONGER_BODIES = {"sm90_paged_attention_prefill_kernel": 190}  # one pipeline; its steps are structs
MAX_FILE_LINES = 500
LABELS = ("  in:", "  out:", "Layout:", "Grid:", "Block:", "Shared memory:", "Unit of work:")
MID_LINE = ("Block:", "Shared memory:")  # may follow another label on its line
KERNEL = re.compile(r"__global__[^;{}]*?\b(\w+_kernel)\(", re.DOTALL)
TENSOR = re.compile(r"\b\w+(?:, \w+)* \[[^\]]+\] \w+")  # name [dims] dtype
INLINE_PTX = re.compile(r"\basm\b")
LINE_COMMENT = re.compile(r"//[^\n]*")
GENERIC_LAMBDA = re.compile(r"\[[^\[\]]*\]\s*\([^(){};]*\bauto\b")  # a capture, and `auto` among the parameters


class Kernel(NamedTuple):
    """A kernel as its source has it; `comment` is without the slashes."""

    file: Path
    name: str
    comment: str
    body_lines: int


def kernels_of(file: Path) -> list[Kernel]:
    text = file.read_text()
    return [_kernel(file, text, match) for match in KERNEL.finditer(text)]


def _kernel(file: Path, text: str, match: re.Match[str]) -> Kernel:
    before = text[: match.start()].rstrip().split("\n")
    while before and before[-1].strip() and not before[-1].startswith("//"):
        before.pop()  # the template's lines
    comment: list[str] = []
    while before and before[-1].startswith("//"):
        comment.insert(0, before.pop().removeprefix("//").removeprefix(" "))
    body = text[text.index("{\n", match.end()) : text.index("\n}\n", match.end())]
    return Kernel(file, match[1], "\n".join(comment), body.count("\n"))


def lines_of_generic_lambdas(text: str) -> list[int]:
    """Numbers of the lines where they begin."""
    code = LINE_COMMENT.sub("", text)
    return [code.count("\n", 0, match.start()) + 1 for match in GENERIC_LAMBDA.finditer(code)]


KERNELS = [kernel for file in FILES for kernel in kernels_of(file)]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def test_every_kernel_is_looked_at() -> None:
    assert {kernel.file.parent for kernel in KERNELS} == set(ROOMS)
    assert len(KERNELS) == sum(path.read_text().count("__global__") for path in FILES)


@kernels
def test_header_comment_has_the_form(kernel: Kernel) -> None:
    """A formula, then every label once and in this order."""
    assert kernel.comment
    assert not kernel.comment.startswith(LABELS), "the comment begins with the formula"
    places = []
    for label in LABELS:
        begin = r"(?:^|\. )" if label in MID_LINE else "^"
        found = [match.start() for match in re.finditer(begin + label, kernel.comment, re.MULTILINE)]
        assert len(found) == 1, f"{label.strip()} stands {len(found)} times above {kernel.name}"
        places += found
    assert places == sorted(places), f"the labels above {kernel.name} are in another order than {LABELS}"


@kernels
def test_outputs_are_given_as_name_dims_dtype(kernel: Kernel) -> None:
    outputs = kernel.comment.partition("\n  out:")[2].partition("\nLayout:")[0]
    assert TENSOR.search(outputs), outputs


@kernels
def test_bodies_are_short(kernel: Kernel) -> None:
    assert kernel.body_lines <= LONGER_BODIES.get(kernel.name, MAX_BODY_LINES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_short_and_have_no_ptx(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    assert not INLINE_PTX.search(text), "PTX stands in cuda_src/include alone"


def test_generic_lambdas_are_found() -> None:
    plain, generic = "auto f = [&](int i) { return i; };", "auto g = [&, n](int i,\n    const auto& x) mutable {"
    assert lines_of_generic_lambdas(f"{plain}\n{generic}\n") == [2]
    assert lines_of_generic_lambdas("each([=](auto... x) {});\n// [&](auto x)\nauto y = a[0](b);\n") == [1]


@pytest.mark.parametrize("path", [*FILES, *HEADERS], ids=lambda path: path.name)
def test_lambdas_are_not_generic(path: Path) -> None:
    """NVRTC 13.0 does not compile them in kernels: "function without execution space annotations"."""
    places = [f"{path.relative_to(SOURCE_FOLDER)}:{line}" for line in lines_of_generic_lambdas(path.read_text())]
    assert not places, f"{', '.join(places)}: a lambda with `auto` parameters; write a function template"
