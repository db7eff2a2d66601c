"""Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`, or `functools[...]`.

Sources: the model card of microsoft/Phi-4-mini-instruct and Microsoft's Phi cookbook.
"""

from __future__ import annotations

from tessera.app.tools.call_list import CallListParser
from tessera.app.tools.grammar import CallSyntax, GrammarWriter, json_call
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<|tool_call|>"
END = "<|/tool_call|>"


class Phi4MiniParser(CallListParser):
    """The closing marker may be missing."""

    openers = (BEGIN, "functools")
    closers = (END,)
    markers = (BEGIN, END)
    end_marker = END


def _around(writer: GrammarWriter) -> tuple[str, str]:
    return f'{writer.marker(BEGIN)} "["', f'"]" {writer.marker(END)}'


PHI4_MINI = ToolFormat(Phi4MiniParser, CallSyntax(json_call, _around, separator='", "'))
