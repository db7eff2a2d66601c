"""Converts a request's grammar to llguidance's own form.

The converters have no time limit, and some are Python that would hold the GIL, so they run in the process of
`engine.grammar.probe`.
"""

from __future__ import annotations

import json
import re

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from tessera.engine.contract.errors import TesseraError
from tessera.engine.contract.sampling_params import Grammar

MAX_NESTING = 64  # of brackets, in schemas and expressions alike
MAX_MESSAGE = 300  # characters of a compiler's message that users see
# Between two parts of JSON: nothing, a space, or a line end and an indentation. JSON allows any number of them, in
# which a model at a high temperature gets lost.
WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,64}"
JSON_OPTIONS: llguidance._lib.JsonCompileOptions = {
    "lenient": False,  # what is not supported is an error, whatever the schema's own x-guidance says
    "whitespace_pattern": WHITESPACE,
}

# An unclosed string matches to the end; otherwise each of its quotes would be tried, in quadratic time.
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
ESCAPED = re.compile(r"\\.", re.DOTALL)


class GrammarError(TesseraError):
    """A grammar that cannot be used; the message says why."""


def llguidance_source(grammar: Grammar) -> str:
    """A grammar in llguidance's own form.

    Raises: GrammarError for what is no grammar of its kind, or nested too deeply.
    """
    text = grammar.text
    if grammar.kind != "choice" and (depth := nesting(grammar)) > MAX_NESTING:
        raise GrammarError(f"is nested {depth} levels deep, but at most {MAX_NESTING} are accepted")
    try:
        match grammar.kind:
            case "json_schema" | "json_object":
                schema = text or '{"type": "object"}'
                return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "choice":
                choices = msgspec.json.decode(text, type=list[str])
                return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_string, choices)))
            case "gbnf":
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
            case "lark":
                return llguidance.LLMatcher.grammar_from_lark(text)
    except GrammarError:
        raise
    except Exception as error:  # the converters raise whatever the text makes them raise
        raise GrammarError(complaint(str(error))) from error


def nesting(grammar: Grammar) -> int:
    """Nesting depth of brackets outside of strings; in an expression, of those not escaped."""
    depth = deepest = 0
    literals = ESCAPED if grammar.kind == "regex" else QUOTED
    for character in literals.sub("", grammar.text):
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def complaint(error: str) -> str:
    """A compiler's error as the end of a sentence that begins with "it"."""
    if error.startswith("panic"):
        return "is too large to compile"
    lines = [line.strip() for line in error.splitlines()]
    text = " ".join(line for line in lines if line and line != "<non-verbose/>")
    text = "".join(character for character in text if character.isprintable())
    return f"does not compile: {text[:MAX_MESSAGE]}"
