"""MiniMax: `<think>...</think>`, opened by the model (M1) or by the prompt (M2); M3 calls its tags `<mm:think>`.

Templates of M1 do not mention the tags. Sources: the chat templates of MiniMaxAI/MiniMax-M1-80k and MiniMax-M2, and of
the M3 model in transformers' tests.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat

M3 = ReasoningFormat(("<mm:think>",), ("</mm:think>",))


def minimax(template: str) -> ReasoningFormat | None:
    if M3.begin in template:
        return M3
    return THINK if "]~b]ai" in template or "<beginning_of_sentence>ai name=" in template else None
