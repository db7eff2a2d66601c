"""GLM: `<think>...</think>`; the prompt of GLM-Z1 opens it, GLM-4.5 opens it itself unless `enable_thinking` is false.

GLM-4.1V writes its answer in tags of its own. Sources: the chat templates of THUDM/GLM-Z1-9B-0414, zai-org/GLM-4.5 and
THUDM/GLM-4.1V-9B-Thinking.
"""

from __future__ import annotations

from tessera.app.reasoning.format import THINK, ReasoningFormat

WITH_ANSWER_TAGS = ReasoningFormat(answer_tags=("<answer>", "</answer>"))


def glm(template: str) -> ReasoningFormat | None:
    if "[gMASK]" not in template or THINK.begin not in template:
        return None
    return WITH_ANSWER_TAGS if "<answer>" in template else THINK
