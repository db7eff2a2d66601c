"""The grammar of harmony's calls, each of which is a message."""

from __future__ import annotations

from tessera.app.reasoning.harmony import CHANNEL, COMMENTARY, MESSAGE, NAMESPACE
from tessera.app.tools.grammar import (
    CallableFunction,
    CallSyntax,
    GrammarWriter,
    arguments_expression,
    json_mark,
    literal,
    next_message,
)
from tessera.app.tools.harmony.parser import HarmonyParser
from tessera.app.tools.tool_format import ToolFormat


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    """The recipient stands before the channel or in it."""
    recipient, channel = f" to={NAMESPACE}{function.name}", writer.marker(CHANNEL)
    head = f"({literal(recipient)} {channel} {literal(COMMENTARY)} | {channel} {literal(COMMENTARY + recipient)})"
    arguments = writer.rule(part, arguments_expression(writer, function, part))
    return f"{head} {json_mark(writer)} {writer.marker(MESSAGE)} {arguments}"


def _around(writer: GrammarWriter) -> tuple[str, str]:
    """Nothing around the calls; between two of them one message ends and the next begins."""
    writer.rule("next_message", next_message(writer))
    return "", ""


HARMONY_TOOLS = ToolFormat(HarmonyParser, CallSyntax(_call, _around, separator="next_message"))
