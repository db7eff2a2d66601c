"""SmolLM3: `<think>...</think>`, switched by `enable_thinking` or by /think and /no_think in the system message.

Source: the model card and chat template of HuggingFaceTB/SmolLM3-3B.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat


def smollm3(template: str) -> ReasoningFormat | None:
    return THINK if "/no_think" in template and THINK.begin in template else None
