"""Kernels in scannable form: short bodies, a header comment in one order, PTX in headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER

FOLDERS = ("attention",)  # of cuda_src whose kernels have this form
MOST_BODY_LINES = 150
LONGER_BODIES = {"sm90_paged_attention_prefill_kernel": 190}  # one pipeline; its steps are structs
MOST_FILE_LINES = 500
SECTIONS = ("Inputs and outputs:", "Layout:", "Grid:", "Block:", "Shared memory:", "Unit of work:")
TENSOR = re.compile(r"^  \w+(?:, \w+)* \[[^\]]+\] \w+", re.MULTILINE)
NAME = re.compile(r"\b(\w+_kernel)\(")


class Kernel(NamedTuple):
    """A kernel of a file: the comment above it without slashes, and the lines between its braces."""

    name: str
    comment: str
    body: list[str]


def files(*suffixes: str) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (SOURCE_FOLDER / folder).iterdir() if path.suffix in suffixes)


def kernels_of(path: Path) -> list[Kernel]:
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        if not line.startswith("__global__"):
            continue
        begin = number - 1 if lines[number - 1].startswith("template") else number
        first = begin
        while first > 0 and lines[first - 1].startswith("//"):
            first -= 1
        opening = next(i for i in range(number, len(lines)) if lines[i].endswith(") {"))
        name = NAME.search(" ".join(lines[number : opening + 1]))
        assert name is not None, f"{path.name}:{number + 1}: a kernel is called <op>_kernel"
        comment = "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines[first:begin])
        found.append(Kernel(name[1], comment, lines[opening + 1 : lines.index("}", opening)]))
    return found


KERNELS = [pytest.param(kernel, id=kernel.name) for path in files(".cu") for kernel in kernels_of(path)]


def test_every_kernel_is_looked_at() -> None:
    assert len(KERNELS) == sum(path.read_text().count("__global__") for path in files(".cu"))
    assert len(KERNELS) >= len(FOLDERS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_comment_has_all_sections_in_order(kernel: Kernel) -> None:
    """A formula first, then the sections, each on a line of its own."""
    places = [re.search(rf"^{re.escape(section)}", kernel.comment, re.MULTILINE) for section in SECTIONS]
    missing = [section for section, place in zip(SECTIONS, places, strict=True) if place is None]
    assert not missing
    starts = [place.start() for place in places if place is not None]
    assert starts == sorted(starts)
    assert re.search(r"\w+ = ", kernel.comment[: starts[0]]), "no formula"


@pytest.mark.parametrize("kernel", KERNELS)
def test_comment_gives_tensors_as_name_dims_dtype(kernel: Kernel) -> None:
    _, _, rest = kernel.comment.partition(SECTIONS[0])
    tensors, _, _ = rest.partition(SECTIONS[1])
    assert len(TENSOR.findall(tensors)) >= 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_body_is_short(kernel: Kernel) -> None:
    assert len(kernel.body) <= LONGER_BODIES.get(kernel.name, MOST_BODY_LINES)


@pytest.mark.parametrize("path", files(".cu", ".cuh"), ids=lambda path: path.name)
def test_file_is_short_and_has_no_ptx(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_FILE_LINES
    assert not re.search(r"\basm\b", text), "PTX stands in cuda_src/include alone"
