"""A kernel's source as C++ for `ptx.h`: asm statements become calls of functions named after the instruction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from tessera.engine.cuda.compiler import SOURCE_FOLDER, sources
from tessera.engine.cuda.kernel import Instantiation, KernelSpec

MAIN = "launch.cc"
ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
TOOLKIT_INCLUDE = re.compile(r"^\s*#\s*include\s*<cuda_.*$", re.MULTILINE)
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+__align__\(\d+\)\s+([\w ]+?)\s+(\w+)\[\];")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def cpu_sources(instantiation: Instantiation, edit: Callable[[str], str]) -> dict[str, str]:
    """The kernel's file, changed by `edit`, its headers, and MAIN with a function `launch`: texts by name."""
    spec, template = instantiation
    texts = sources(spec.file)
    texts[spec.file] = edit(texts[spec.file])
    launch = (
        'extern "C" __attribute__((visibility("default"))) const char* launch(const unsigned* grid, '
        "const unsigned* block, unsigned shared_bytes, unsigned cluster, void** arguments) {\n"
        f"  cluster = std::max<unsigned>(cluster, {cluster_size(spec, template)});\n"
        f"  return emulated::launch(&{spec.instantiation(template)}, grid, block, shared_bytes, cluster, arguments);\n"
        "}\n"
    )
    main = f'#include "ptx.h"\n#include "{spec.file}"\n{launch}'
    return {name: translated(text) for name, text in texts.items()} | {MAIN: main}


def cluster_size(spec: KernelSpec[Any], template: tuple[str, ...]) -> str:
    """What the source says of it before the kernel's name, as C++."""
    text = (SOURCE_FOLDER / spec.file).read_text()
    found = re.search(rf"(?:__cluster_dims__|BLOCKS_OF_A_CLUSTER)\((\w+)[^;{{}}]*?\b{spec.name}\(", text)
    return "1" if found is None else dict(zip(spec.template, template, strict=True)).get(found[1], found[1])


def translated(text: str) -> str:
    text = TOOLKIT_INCLUDE.sub("", text)
    text = DYNAMIC_SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulated::shared_bytes);", text)
    parts, end = [], 0
    for match in ASM.finditer(text):
        close = _closing(text, match.end())
        parts += [text[end : match.start()], _call(text[match.end() : close])]
        end = close + 1
    return "".join([*parts, text[end:]])


def _call(statement: str) -> str:
    """What stands between the parentheses of an asm statement, as calls."""
    code, *operands = _split(statement, ":")
    instructions = [line.strip() for line in "".join(STRING.findall(code)).replace("\\n", "").split(";")]
    names = [_name(instruction) for instruction in instructions if instruction]
    values = [_value(operand) for group in operands[:2] for operand in _split(group, ",") if operand.strip()]
    if len(names) > 1 and values:
        raise ValueError(f"several instructions that share operands: {statement}")
    return "; ".join(f"ptx_{name}({', '.join(values)})" for name in names)


def _name(instruction: str) -> str:
    """Of `mov.u32 %0, %%cluster_ctarank` mov_u32_cluster_ctarank."""
    special = re.search(r"%%(\w+)", instruction)
    name = instruction.split()[0].replace(".", "_").replace(":", "_")
    return name + (f"_{special[1]}" if special else "")


def _value(operand: str) -> str:
    """Of `"=r"(x)` x."""
    return operand[operand.index("(") + 1 : operand.rindex(")")]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis is closed that is open at `start`."""
    return next(place for place, depth in _outside_strings(text, start) if depth < 0)


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of strings and parentheses."""
    places = [place for place, depth in _outside_strings(text) if depth == 0 and text[place] == separator]
    return [text[begin + 1 : end] for begin, end in pairwise([-1, *places, len(text)])]


def _outside_strings(text: str, start: int = 0) -> Iterator[tuple[int, int]]:
    """Places of characters that are not of a string, each with how many brackets are open after it."""
    place, depth = start, 0
    while place < len(text):
        if string := STRING.match(text, place):
            place = string.end()
            continue
        depth += (text[place] in "([{") - (text[place] in ")]}")
        yield place, depth
        place += 1
