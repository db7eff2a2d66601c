"""Kernels can be scanned: a header comment in one form, bodies of bounded length, PTX in headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tessera.engine.cuda.compiler import SOURCE_FOLDER

ROOMS = ("elementwise", "linear", "norm", "sampling")  # rooms of kernels that keep the form
MAX_BODY_LINES = 150
LABELS = ("  in:", "  out:", "Layout:", "Grid:", "Block:", "Shared memory:", "Unit of work:")
MID_LINE = ("Block:", "Shared memory:")  # may follow another label on its line
KERNEL = re.compile(r"__global__[^;{}]*?\b(\w+_kernel)\(", re.DOTALL)
INLINE_PTX = re.compile(r"\basm\b")


class Kernel(NamedTuple):
    """A kernel as its source has it; `comment` is without the slashes."""

    file: Path
    name: str
    comment: list[str]
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
    return Kernel(file, match[1], comment, body.count("\n"))


KERNELS = [
    kernel for room in ROOMS for file in sorted((SOURCE_FOLDER / room).glob("*.cu")) for kernel in kernels_of(file)
]


def test_every_room_has_kernels() -> None:
    assert {kernel.file.parent.name for kernel in KERNELS} == set(ROOMS)
    assert len(KERNELS) == sum(
        path.read_text().count("__global__") for room in ROOMS for path in (SOURCE_FOLDER / room).glob("*.cu")
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_header_comment_has_the_form(kernel: Kernel) -> None:
    """A formula, then every label once and in this order."""
    text = "\n".join(kernel.comment)
    assert text
    assert not text.startswith(LABELS), "the comment begins with the formula"
    places = []
    for label in LABELS:
        begin = r"(?:^|\. )" if label in MID_LINE else "^"
        found = [match.start() for match in re.finditer(begin + label, text, re.MULTILINE)]
        assert len(found) == 1, f"{label.strip()} stands {len(found)} times above {kernel.name}"
        places += found
    assert places == sorted(places), f"the labels above {kernel.name} are in another order than {LABELS}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_bodies_are_short(kernel: Kernel) -> None:
    assert kernel.body_lines <= MAX_BODY_LINES


@pytest.mark.parametrize("room", ROOMS)
def test_ptx_stands_in_headers(room: str) -> None:
    assert not [path.name for path in (SOURCE_FOLDER / room).glob("*.cu") if INLINE_PTX.search(path.read_text())]
