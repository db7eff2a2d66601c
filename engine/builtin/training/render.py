"""A conversation as text, by the model's own chat template, split into what is trained on and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tessera.engine.builtin.training.conversation import Conversation

FOLDER = Path(__file__).resolve().parents[1]
_TURN = "<|im_start|>assistant\n"
END_OF_TURN = "<|im_end|>"


def _template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    # As chat templates expect it: plain JSON, not escaped for HTML.
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((FOLDER / "chat_template.jinja").read_text())


_TEMPLATE = _template()


def render(conversation: Conversation) -> list[tuple[str, bool]]:
    """Pieces of text with whether the loss counts them: the assistant's turns with their end mark."""
    text: str = _TEMPLATE.render(messages=conversation.messages, tools=conversation.tools or None)
    head, *turns = text.split(_TURN)
    pieces = [(head, False)]
    for turn in turns:
        answer, _, rest = turn.partition(END_OF_TURN + "\n")
        pieces += [(_TURN, False), (answer + END_OF_TURN, True), ("\n" + rest, False)]
    return pieces
