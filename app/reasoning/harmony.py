"""Harmony, gpt-oss's form: a completion is messages, and those of the channel `analysis` are reasoning.

`tools.harmony` reads them. Source: docs/format.md of openai/harmony.
"""

from __future__ import annotations

from tessera.app.reasoning.format import ReasoningFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
ASSISTANT = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
NAMESPACE = "functions."

HARMONY = ReasoningFormat((f"{CHANNEL}{ANALYSIS}{MESSAGE}",), (END,), has_channels=True, budget_begin=ANALYSIS)


def harmony(template: str) -> ReasoningFormat | None:
    return HARMONY if all(mark in template for mark in (START, CHANNEL, MESSAGE)) else None
