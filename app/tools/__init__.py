"""Tool calling: parsers of the formats in which models write calls, and grammars that force them.

Public: `formats.choose_format`, `choice.tool_grammar`, the parts of a completion in `parts`.
"""
