"""A format of tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.app.tools import grammar
from tessera.app.tools.parser import ToolParser


@dataclass(frozen=True)
class ToolFormat:
    """A format's parser, and the syntax of grammars that force its calls."""

    parser: type[ToolParser]
    syntax: grammar.CallSyntax

    def opener_is_token(self, token_id_of: grammar.TokenIdOf) -> bool:
        """Whether each call begins with a token of its own, which no other text has."""
        return not self.parser.reads_bare_calls and token_id_of(self.parser.openers[0]) is not None
