"""Lark grammars as terminals, which a larger grammar can embed in a JSON string or in plain text.

As one terminal, a grammar that does not refer to itself is a single expression, and its lexer never has to look ahead:
in JSON text a line end and a quote begin with the same character. Source of Lark's syntax and of its common terminals:
https://lark-parser.readthedocs.io/en/stable/grammar
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tessera.app.tools.json_text import UnsupportedGrammarError, quoted_literal, quoted_range, quoted_regex

START = "start"
IGNORED = "IGNORED"
MAX_LENGTH = 2**14
MAX_CACHED = 32
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}

_TOKEN = re.compile(
    r"""(?P<space>[^\S\n]+|(?://|\#)[^\n]*)
    |(?P<line>\n)
    |(?P<range>"(?:[^"\\\n]|\\.)*"\s*\.\.\s*"(?:[^"\\\n]|\\.)*")
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imsux]*)
    |(?P<import>%import[^\n]*)
    |(?P<ignore>%ignore\b)
    |(?P<repeat>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)
    |(?P<alias>->\s*\w+)
    |(?P<priority>\.-?[0-9]+)
    |(?P<name>[a-zA-Z_]\w*)
    |(?P<sign>[:|()\[\]*+?!])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_IMPORT = re.compile(r"%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([\w\s,]+)\))\s*(?://.*)?\Z")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


@dataclass(slots=True)
class _Parsed:
    """Definitions by name, and what may stand between the terminals of rules."""

    definitions: dict[str, list[_Token]] = field(default_factory=dict)
    ignored: list[list[_Token]] = field(default_factory=list)


@lru_cache(maxsize=MAX_CACHED)  # agents send the same grammar again and again
def lark_terminals(text: str, prefix: str, *, quoted: bool) -> tuple[str, Sequence[tuple[str, str]]]:
    """-> the name of the terminal that matches what the grammar matches, and the definitions behind it.

    A definition is a name and an expression.

    Args:
        prefix: of the names of all terminals, in capitals.
        quoted: the terminal matches the texts as they stand in a JSON string, without its quotes.

    Raises:
        UnsupportedGrammarError: the grammar refers to itself, is longer than MAX_LENGTH, or has something else than
            rules, terminals, literals, expressions and imports of common terminals.
    """
    if len(text) > MAX_LENGTH:
        raise UnsupportedGrammarError(f"more than {MAX_LENGTH} characters")
    parsed = _parse(text)
    if START not in parsed.definitions:
        raise UnsupportedGrammarError("no rule start")
    _check_no_recursion(parsed.definitions)
    writer = _TerminalWriter(parsed, prefix, quoted=quoted)
    return writer.name(START), list(writer.terminals())


def regex_grammar(pattern: str) -> str:
    """The Lark grammar of the texts that an expression matches."""
    shown = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
    return f"start: /(?:{shown})/"


class _TerminalWriter:
    def __init__(self, parsed: _Parsed, prefix: str, *, quoted: bool) -> None:
        self._parsed = parsed
        self._prefix = prefix
        self._quoted = quoted

    def name(self, given: str) -> str:
        """Rules become terminals, beside terminals of the same letters."""
        return f"{self._prefix}_R_{given.upper()}" if _is_rule(given) else f"{self._prefix}_T_{given}"

    def terminals(self) -> Iterator[tuple[str, str]]:
        if self._parsed.ignored:
            bodies = " | ".join(self._body(tokens, "") for tokens in self._parsed.ignored)
            yield f"{self._prefix}_{IGNORED}", f"({bodies})*"
        gap = f"{self._prefix}_{IGNORED}" if self._parsed.ignored else ""
        for name, tokens in self._parsed.definitions.items():
            body = self._body(tokens, gap if _is_rule(name) else "")
            yield self.name(name), f"({body}) {gap}" if gap and name == START else body

    def _body(self, tokens: list[_Token], gap: str) -> str:
        """An expression; `gap` may stand before each of its terminals."""
        return " ".join(self._piece(token, gap) for token in tokens)

    def _piece(self, token: _Token, gap: str) -> str:
        if token.kind == "sign":
            return {"[": "(", "]": ")?"}.get(token.text, token.text)
        if token.kind == "repeat":
            bounds = ",".join(re.findall("[0-9]+", token.text))
            return f"{{{bounds}}}"
        if token.kind == "name":
            written = self.name(token.text)
            return written if _is_rule(token.text) or not gap else f"({gap} {written})"
        written = self._terminal(token)
        return f"({gap} {written})" if gap else written

    def _terminal(self, token: _Token) -> str:
        if not self._quoted:
            return token.text
        if token.kind == "string":
            text = token.text.removesuffix("i")
            return quoted_literal(_decoded(text), ignores_case=text != token.text)
        if token.kind == "range":
            first, last = (_decoded(end) for end in re.findall(r'"(?:[^"\\]|\\.)*"', token.text))
            if len(first) != 1 or len(last) != 1:
                raise UnsupportedGrammarError(token.text[:40])
            return quoted_range(first, last)
        end = token.text.rindex("/")
        return quoted_regex(token.text[1:end], token.text[end + 1 :])


def _parse(text: str) -> _Parsed:
    parsed = _Parsed()
    body: list[_Token] | None = None
    tokens = [_Token(found.lastgroup or "", found[0]) for found in _TOKEN.finditer(text)]
    tokens = [token for token in tokens if token.kind not in ("space", "alias", "priority")]
    for index, token in enumerate(tokens):
        if token.kind == "import":
            parsed.definitions.update(_imported(token.text))
            body = None
        elif token.kind == "ignore":
            body = []
            parsed.ignored.append(body)
        elif token.kind == "other":
            raise UnsupportedGrammarError(repr(token.text))
        elif token.text == ":":
            continue
        elif token.kind == "name" and index + 1 < len(tokens) and tokens[index + 1].text == ":":
            body = parsed.definitions[token.text] = []
        elif token.kind == "line":
            if body is not None and any(body is each for each in parsed.ignored):
                body = None
        elif _begins_definition(tokens, index):
            continue  # ? or ! before a name
        elif body is None:
            raise UnsupportedGrammarError(repr(token.text[:40]))
        else:
            body.append(token)
    return parsed


def _begins_definition(tokens: list[_Token], index: int) -> bool:
    """Whether a sign stands before the name of a definition."""
    rest = [token.text for token in tokens[index : index + 4]]
    if rest[0] not in ("?", "!"):
        return False
    after = rest[1:] if rest[1:2] not in (["?"], ["!"]) else rest[2:]
    return len(after) >= 2 and tokens[index + len(rest) - len(after)].kind == "name" and after[1] == ":"


def _imported(line: str) -> Iterator[tuple[str, list[_Token]]]:
    found = _IMPORT.match(line.strip())
    if found is None:
        raise UnsupportedGrammarError(line.strip()[:60])
    single, alias, several = found.groups()
    for name in [single] if single else [each.strip() for each in several.split(",")]:
        if name not in COMMON:
            raise UnsupportedGrammarError(f"common.{name}")
        yield alias or name, [_Token("regex", f"/{COMMON[name]}/")]


def _check_no_recursion(definitions: dict[str, list[_Token]]) -> None:
    """Iterative, because a grammar may be a chain of thousands of rules."""
    done: set[str] = set()
    path = {START: _names_in(definitions, START)}
    while path:
        name = next(reversed(path))
        following = next(path[name], None)
        if following is None:
            del path[name]
            done.add(name)
        elif following in path:
            raise UnsupportedGrammarError(f"{following}, which refers to itself")
        elif following not in done:
            path[following] = _names_in(definitions, following)


def _names_in(definitions: dict[str, list[_Token]], name: str) -> Iterator[str]:
    if name not in definitions:
        raise UnsupportedGrammarError(f"{name[:60]}, which is not defined")
    return (token.text for token in definitions[name] if token.kind == "name")


def _is_rule(name: str) -> bool:
    return name.lstrip("_")[:1].islower()


def _decoded(literal: str) -> str:
    try:
        decoded: str = json.loads(literal, strict=False)
    except json.JSONDecodeError:
        raise UnsupportedGrammarError(literal[:40]) from None
    return decoded
