"""What the tests of /v1/responses and /v1/messages share: a model that calls tools and thinks, played from a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.servers.http_fixtures import TOKENIZER, ids, settings_for, write_model_folder

PATIENCE = 30  # seconds until a test gives up waiting for what must happen
ROOMY = msgspec.structs.replace(INFO, max_model_len=2048)

WEATHER_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = CALL.replace("Köln", "Bonn")
TOOL_TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool.function.name }}: {{ tool.function.description }}</tool>{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tool_settings(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder, template=TOOL_TEMPLATE), **changes)


def says(text: str, **changes: Any) -> FakeClient:
    """A client whose model writes `text` and ends."""
    return FakeClient(always(play([*ids(text), 0], stop_token_id=0, **changes)), info=ROOMY)


def cut_after(text: str) -> FakeClient:
    """A client whose model writes `text` and is cut by the token limit."""
    return FakeClient(always(play(ids(text), finish="length")), info=ROOMY)


def prompt_of(client: FakeClient, index: int = -1) -> str:
    return TOKENIZER.decode(client.submissions[index].prompt, skip_special_tokens=False)
