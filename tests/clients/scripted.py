"""A server whose model says what a test tells it to, request by request, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.support.fake_client import INFO, FakeClient, Submission, play
from tests.support.http_fixtures import TOKENIZER, ids, serve, settings_for, write_model_folder

MODEL = "tiny"
TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Model:
    """Plays its replies in turn, then the last one for ever; `prompts` are those that it was given, as text."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies = list(replies)
        self.prompts: list[str] = []
        self.num_prompt_tokens: list[int] = []

    def __call__(self, submission: Submission) -> list[Any]:
        self.prompts.append(TOKENIZER.decode(submission.prompt, skip_special_tokens=False))
        self.num_prompt_tokens.append(len(submission.prompt))
        reply = self._replies[min(len(self.prompts), len(self._replies)) - 1]
        return play([*ids(reply), 0], stop_token_id=0, per_output=4)


@contextmanager
def scripted(
    folder: Path, replies: Sequence[str], *, max_model_len: int = 2**19, **settings: Any
) -> Iterator[tuple[str, Model]]:
    """-> base URL without /v1, and the model."""
    model = Model(replies)
    info = msgspec.structs.replace(INFO, max_model_len=max_model_len)
    client = FakeClient(model, info=info)
    with serve(client, settings_for(write_model_folder(folder, template=TEMPLATE), **settings)) as url:
        yield url, model
