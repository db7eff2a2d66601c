"""The families of models that reason, and the choice of one by the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tessera.app.model_settings import ReasoningParserName
from tessera.app.reasoning.deepseek_r1 import IMPLIED, deepseek_r1
from tessera.app.reasoning.format import THINK, ReasoningFormat, has_think_tags
from tessera.app.reasoning.glm import glm
from tessera.app.reasoning.granite import GRANITE_32, GRANITE_33, granite
from tessera.app.reasoning.harmony import HARMONY, harmony
from tessera.app.reasoning.magistral import BRACKETS, magistral
from tessera.app.reasoning.minimax import minimax
from tessera.app.reasoning.phi4 import phi4
from tessera.app.reasoning.qwen3 import qwen3
from tessera.app.reasoning.smollm3 import smollm3


def think(template: str) -> ReasoningFormat | None:
    """Any other family with these tags."""
    return THINK if has_think_tags(template) else None


# Each knows the templates of its family. The first that does wins: some families write in another's markup.
FAMILIES: tuple[Callable[[str], ReasoningFormat | None], ...] = (
    harmony,
    granite,
    magistral,
    minimax,
    deepseek_r1,
    glm,
    phi4,
    smollm3,
    qwen3,
    think,
)
# Formats that can be asked for by name, for templates that do not show them.
NAMED: Mapping[ReasoningParserName, ReasoningFormat] = {
    "think": THINK,
    "deepseek_r1": IMPLIED,
    "granite_3.2": GRANITE_32,
    "granite_3.3": GRANITE_33,
    "harmony": HARMONY,
    "mistral": BRACKETS,
}


def choose_reasoning(choice: ReasoningParserName, templates: Iterable[str]) -> ReasoningFormat | None:
    """The format that was asked for; with `auto` the one that the templates show, None if they show none."""
    if choice != "auto":
        return NAMED.get(choice)
    found = (family(template) for template in templates for family in FAMILIES)
    return next((format for format in found if format is not None), None)
