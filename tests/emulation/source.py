"""A kernel's source as C++ for `ptx.h`: asm statements become calls of functions named after their instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

from tessera.engine.cuda.compiler import SOURCE_FOLDER
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.sources import Sources

MAIN = "launch.cc"
Edit = Callable[[dict[str, str]], dict[str, str]]  # of a kernel's file and its headers, by name
ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
TOOLKIT_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<cuda[_.].*$", re.MULTILINE)
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+__align__\((\d+)\)\s+([\w ]+?)\s+(\w+)\[\];")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
LABEL = re.compile(r"(\w+):(?!:)\s*")
PREDICATE = re.compile(r"@(!?)(\w+)\s+")
REGISTER_TYPES = {"pred": "bool", "b16": "unsigned short", "b32": "unsigned", "b64": "unsigned long long"}
SPECIAL = re.compile(r"%%(\w+)")
REGISTER = re.compile(r"(?<!%)\b[a-z]\w*")
VECTOR_OR_ONE = re.compile(r"\{[^}]*\}|[^,{}\s]+")
OPERAND = re.compile(r"%(\d+)")
NOWHERE = "_"  # where a result goes that nobody wants


def cpu_sources(instantiation: Instantiation, edit: Edit) -> dict[str, str]:
    """The kernel's file and its headers, changed by `edit`, for the preprocessor: texts by name."""
    spec = instantiation[0]
    texts = edit({name: file.text for name, file in Sources(SOURCE_FOLDER).of(spec.file).items()})
    return {name: TOOLKIT_INCLUDE.sub("", text) for name, text in texts.items()}


def main_source(instantiation: Instantiation, preprocessed: str) -> str:
    """MAIN: the kernel, whose macros are expanded already, and a function `launch`."""
    spec, template = instantiation
    aligned = DYNAMIC_SHARED.search(preprocessed)
    launch = (
        'extern "C" __attribute__((visibility("default"))) const char* launch(const unsigned* grid, '
        "const unsigned* block, unsigned shared_bytes, unsigned cluster, void** arguments) {\n"
        f"  cluster = std::max<unsigned>(cluster, {cluster_size(spec, template)});\n"
        f"  emulated::dynamic_begin = {aligned[1] if aligned else 0} % emulated::MOST_ALIGNED;\n"
        f"  return emulated::launch(&{spec.instantiation(template)}, grid, block, shared_bytes, cluster, arguments);\n"
        "}\n"
    )
    return f'#include "ptx.h"\n{translated(preprocessed)}\n{launch}'


def cluster_size(spec: KernelSpec[Any], template: tuple[str, ...]) -> str:
    """What the source says of it before the kernel's name, as C++."""
    text = (SOURCE_FOLDER / spec.file).read_text()
    found = re.search(rf"(?:__cluster_dims__|BLOCKS_OF_A_CLUSTER)\((\w+)[^;{{}}]*?\b{spec.name}\(", text)
    return "1" if found is None else dict(zip(spec.template, template, strict=True)).get(found[1], found[1])


def translated(text: str) -> str:
    text = DYNAMIC_SHARED.sub(
        r"\2* const \3 = reinterpret_cast<\2*>(emulated::shared_bytes + emulated::dynamic_begin);", text
    )
    parts, end = [], 0
    statements = count()
    for match in ASM.finditer(text):
        close = _closing(text, match.end())
        statement = text[match.end() : close]
        parts += [text[end : match.start()], _calls(statement, next(statements)), "\n" * statement.count("\n")]
        end = close + 1
    return "".join([*parts, text[end:]])


def _calls(statement: str, number: int) -> str:
    """What stands between the parentheses of an asm statement, as one C++ statement without its semicolon."""
    code, *groups = _split(statement, ":")
    values = [_value(operand) for group in groups[:2] for operand in _split(group, ",") if operand.strip()]
    code = "".join(STRING.findall(code)).replace("\\n", " ")
    lines = [line for part in code.split(";") for line in _instructions(part, number, values)]
    return f"do {{ {' '.join(lines)} }} while (false)"


def _instructions(text: str, number: int, values: list[str]) -> Iterator[str]:
    """What stands before a semicolon: an instruction, after labels and the braces of a scope if there are any.

    Registers and labels get `number` in their names, which operands may have in C++.
    """

    def numbered(names: str) -> str:
        return REGISTER.sub(rf"\g<0>_{number}", names)

    text = text.strip().lstrip("{").strip().removesuffix("}" if text.strip() == "}" else "").strip()
    while label := LABEL.match(text):
        yield f"{label[1]}_{number}:"
        text = text[label.end() :]
    if not text:
        return
    condition = ""
    if predicate := PREDICATE.match(text):
        condition = f"if ({predicate[1]}{predicate[2]}_{number}) "
        text = text[predicate.end() :]
    mnemonic, _, rest = text.partition(" ")
    if mnemonic == ".reg":
        kind, names = rest.strip().split(None, 1)
        yield f"{REGISTER_TYPES[kind.lstrip('.')]} {numbered(names)};"
    elif mnemonic == "bra":
        yield f"{condition}goto {rest.strip()}_{number};"
    else:
        name = "_".join([re.sub(r"[.:]", "_", mnemonic), *SPECIAL.findall(rest)])
        parts = _operands(numbered(SPECIAL.sub("", rest)), in_use=mnemonic.startswith("wgmma.mma"))
        operands = [OPERAND.sub(lambda found: f"({values[int(found[1])]})", part) for part in parts]
        yield f"{condition}ptx_{name}({', '.join(operands)});"


def _operands(text: str, *, in_use: bool) -> list[str]:
    """Of an instruction, without brackets; of one that goes on to use its registers the vectors of their addresses."""
    if not in_use:
        parts = [part.strip() for part in re.sub(r"[\[\]{}]", "", text).split(",")]
        return [part for part in parts if part and not part.startswith(NOWHERE)]
    kinds = iter(("emulated::Sums", "emulated::Fragment"))
    parts = VECTOR_OR_ONE.findall(text)
    return [f"{next(kinds)}{part.replace('%', '&%')}" if part.startswith("{") else part for part in parts]


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
