"""Qwen3: `<think>...</think>`, opened by the model, or by the prompt of the models that always reason.

`enable_thinking=False` lets the prompt end with an empty pair of tags. Source: the chat templates of Qwen/Qwen3-8B and
Qwen/Qwen3-30B-A3B-Thinking-2507.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat, has_think_tags


def qwen3(template: str) -> ReasoningFormat | None:
    return THINK if "<|im_start|>" in template and has_think_tags(template) else None
