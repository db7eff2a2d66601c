"""A server whose model says what a test tells it to, and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tessera.engine.contract.messages import EmbeddingInfo
from tests.clients.replies import by_prompt
from tests.support.fakes.fake_client import INFO, FakeClient, Submission, play
from tests.support.servers.http_fixtures import TOKENIZER, ids, serve, settings_for, write_model_folder

MODEL = "tiny"
DIMENSION = 4
EMBEDDINGS = EmbeddingInfo(
    role="main", architecture="Fake", pooling="last", dimension=DIMENSION, vocab_size=512, max_input_tokens=512
)
TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Model:
    """Writes what `reply` makes of a prompt; `prompts` are those that it was given, as text."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self._reply = reply
        self.prompts: list[str] = []
        self.num_prompt_tokens: list[int] = []

    def __call__(self, submission: Submission) -> list[Any]:
        prompt = TOKENIZER.decode(submission.prompt, skip_special_tokens=False)
        self.prompts.append(prompt)
        self.num_prompt_tokens.append(len(submission.prompt))
        token_ids = [*ids(self._reply(prompt)), 0][: submission.params.max_tokens]
        finish = "stop" if token_ids[-1] == 0 else "length"
        scored = submission.params.logprobs is not None
        return play(token_ids, finish=finish, stop_token_id=0, per_output=4, logprobs=scored)


class ScriptedClient(FakeClient):
    """Embeds as well: every text as the same vector."""

    async def embed(self, inputs: list[list[int]], *, role: str = "main", account: Any = None) -> Any:
        return np.full((len(inputs), DIMENSION), 0.5, np.float32)


@contextmanager
def scripted(
    folder: Path, reply: Callable[[str], str] = by_prompt, *, max_model_len: int = 2**19, **settings: Any
) -> Iterator[tuple[str, Model]]:
    """-> base URL without /v1, and the model."""
    model = Model(reply)
    info = msgspec.structs.replace(INFO, max_model_len=max_model_len, embeddings=(EMBEDDINGS,))
    client = ScriptedClient(model, info=info)
    with serve(client, settings_for(write_model_folder(folder, template=TEMPLATE), **settings)) as url:
        yield url, model
