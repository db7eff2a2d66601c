"""DeepSeek: `<think>...</think>`, where templates of R1 may leave the first tag to the model, which may leave it out.

Such a template only takes the reasoning of earlier turns away, by its closing tag; completions then begin within the
reasoning. Those of V3.1 end the prompt with one of the tags, by `thinking`. Sources: the chat templates of
deepseek-ai/DeepSeek-R1 and DeepSeek-V3.1; the note on `<think>` in the model card of DeepSeek-R1.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat

IMPLIED = ReasoningFormat(is_implied=True)


def deepseek_r1(template: str) -> ReasoningFormat | None:
    if "<｜Assistant｜>" not in template or THINK.end not in template:
        return None
    return THINK if THINK.begin in template else IMPLIED
