"""The formats by name, and the choice of one by the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tessera.app.model_settings import ToolParserName
from tessera.app.tools.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from tessera.app.tools.formats.gemma import GEMMA
from tessera.app.tools.formats.glm4 import GLM4
from tessera.app.tools.formats.glm45 import GLM45
from tessera.app.tools.formats.granite import GRANITE
from tessera.app.tools.formats.hermes import HERMES
from tessera.app.tools.formats.internlm import INTERNLM
from tessera.app.tools.formats.llama import LLAMA
from tessera.app.tools.formats.llama4 import LLAMA4
from tessera.app.tools.formats.mistral import ARGUMENTS, MISTRAL, MISTRAL_MARKED
from tessera.app.tools.formats.olmo3 import OLMO3
from tessera.app.tools.formats.phi4_mini import PHI4_MINI
from tessera.app.tools.formats.qwen_coder import QWEN_CODER
from tessera.app.tools.formats.xlam import XLAM
from tessera.app.tools.harmony.syntax import HARMONY_TOOLS
from tessera.app.tools.tool_format import ToolFormat
from tessera.engine.contract.errors import ConfigError

FORMATS: Mapping[ToolParserName, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN_CODER,
    "llama3_json": LLAMA,
    "llama4_pythonic": LLAMA4,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "gemma": GEMMA,
    "glm4": GLM4,
    "glm45": GLM45,
    "granite": GRANITE,
    "harmony": HARMONY_TOOLS,
    "internlm": INTERNLM,
    "olmo3": OLMO3,
    "phi4_mini": PHI4_MINI,
    "xlam": XLAM,
}

# Texts by which a template gives its format away, all of them together. The first match wins: Qwen3-Coder's template
# has <tool_call> as well, and Phi-4-mini's the marker of Granite's.
_TRAITS: tuple[tuple[ToolParserName, tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<parameter=",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("gemma", ("<start_function_call>",)),
    ("glm45", ("<arg_key>",)),
    ("glm4", ("[gMASK]", "在调用上述函数时")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("internlm", ("<|action_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("phi4_mini", ("<|/tool_call|>",)),
    ("phi4_mini", ("<|/tool|>",)),
    ("phi4_mini", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<function_call>",)),
    ("llama4_pythonic", ("[func_name1(",)),
    ("xlam", ('[{"name": "tool_call_name"',)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ',)),
)


def choose_format(choice: ToolParserName, templates: Iterable[str]) -> ToolFormat | None:
    """The format that was asked for; with `auto` the one that the templates use, None if they use none.

    Raises:
        ConfigError: a format was asked for, but the templates show no tools to the model.
    """
    sources = [source for source in templates if "tools" in source]
    if choice == "auto":
        found = (name for name, traits in _TRAITS if any(all(map(source.__contains__, traits)) for source in sources))
        choice = next(found, "none")
    elif choice != "none" and not sources:
        raise ConfigError(f"--tool-call-parser {choice}: the model has no chat template that shows tools to it")
    if choice == "mistral" and any(ARGUMENTS in source for source in sources):
        return MISTRAL_MARKED
    return FORMATS.get(choice)
