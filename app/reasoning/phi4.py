"""Phi-4 reasoning: `<think> thought </think> solution`, which the template's own system message asks for.

Source: the model card and chat template of microsoft/Phi-4-reasoning.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat, has_think_tags


def phi4(template: str) -> ReasoningFormat | None:
    return THINK if "<|im_sep|>" in template and has_think_tags(template) else None
