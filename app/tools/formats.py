"""The formats of tool calls, and the choice of one by the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tessera.app.settings import ToolParserName
from tessera.app.tools import grammar
from tessera.app.tools.hermes import HermesParser
from tessera.app.tools.llama import LlamaParser
from tessera.app.tools.mistral import ARGUMENTS, MistralParser
from tessera.app.tools.parser import ToolParser
from tessera.app.tools.qwen_coder import QwenCoderParser
from tessera.engine.contract.errors import ConfigError


@dataclass(frozen=True)
class ToolFormat:
    """A format's parser, and the syntax of grammars that force its calls."""

    parser: type[ToolParser]
    syntax: grammar.CallSyntax

    def opener_is_token(self, token_id_of: grammar.TokenIdOf) -> bool:
        """Whether each call begins with a token of its own, which no other text has."""
        return not self.parser.reads_bare_calls and token_id_of(self.parser.openers[0]) is not None


FORMATS: Mapping[ToolParserName, ToolFormat] = {
    "hermes": ToolFormat(HermesParser, grammar.HERMES),
    "qwen3_coder": ToolFormat(QwenCoderParser, grammar.QWEN_CODER),
    "llama3_json": ToolFormat(LlamaParser, grammar.LLAMA),
    "mistral": ToolFormat(MistralParser, grammar.MISTRAL_LIST),
}
_MISTRAL_MARKED = ToolFormat(MistralParser, grammar.MISTRAL_MARKED)

# Texts by which a template gives its format away. The first match wins: Qwen3-Coder's has <tool_call> as well.
_TRAITS: tuple[tuple[str, ToolParserName], ...] = (
    ("<parameter=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def choose_format(choice: ToolParserName, templates: Iterable[str]) -> ToolFormat | None:
    """The format that was asked for; with `auto` the one that the templates use, None if they use none.

    Raises:
        ConfigError: a format was asked for, but the templates show no tools to the model.
    """
    sources = [source for source in templates if "tools" in source]
    if choice == "auto":
        choice = next((name for trait, name in _TRAITS if any(trait in source for source in sources)), "none")
    elif choice != "none" and not sources:
        raise ConfigError(f"--tool-call-parser {choice}: the model has no chat template that shows tools to it")
    if choice == "mistral" and any(ARGUMENTS in source for source in sources):
        return _MISTRAL_MARKED
    return FORMATS.get(choice)
