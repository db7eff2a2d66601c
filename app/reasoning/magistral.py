"""Magistral and other models of Mistral that reason: `[THINK]...[/THINK]`, opened by the model where its system prompt
asks for it. Source: mistral-common, tokens/tokenizers/instruct.py; Magistral's first version (2506) wrote `<think>`.
"""

from __future__ import annotations

from tessera.app.reasoning.format import ReasoningFormat

BRACKETS = ReasoningFormat(("[THINK]",), ("[/THINK]",))


def magistral(template: str) -> ReasoningFormat | None:
    return BRACKETS if BRACKETS.begin in template else None
