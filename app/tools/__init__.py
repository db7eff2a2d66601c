"""Tool calling: parsers of the formats in which models write calls, and grammars that force them.

Public: `choice.tool_grammar`, `tool_format.ToolFormat`, the parts of a completion in `parts`. The formats themselves
are in `formats`.
"""
