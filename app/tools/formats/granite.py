"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, with the marker spelled `<tool_call>` at times.

The 20B model for calls writes `<function_call> {...}` for each. Granite 4 writes as Hermes does. Sources: the chat
templates of ibm-granite/granite-3.3-8b-instruct and granite-20b-functioncalling, and their model cards.
"""

from __future__ import annotations

from tessera.app.tools.call_list import CallListParser
from tessera.app.tools.grammar import CallSyntax, GrammarWriter, json_call
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<|tool_call|>"


class GraniteParser(CallListParser):
    """A closing tag may follow the spellings without bars."""

    openers = (BEGIN, "<tool_call>", "<function_call>")
    closers = ("</tool_call>", "</function_call>")
    markers = (*openers, *closers)
    end_marker = BEGIN


def _around(writer: GrammarWriter) -> tuple[str, str]:
    return f'{writer.marker(BEGIN)} "["', '"]"'


GRANITE = ToolFormat(GraniteParser, CallSyntax(json_call, _around, separator='", "'))
