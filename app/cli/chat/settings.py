"""Fields of requests that the user sets, as NAME=VALUE."""

from __future__ import annotations

import json
from typing import Any

from tessera.options.errors import OptionError
from tessera.options.suggestions import did_you_mean

KNOWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "response_format",
    "chat_template_kwargs",
)
OWN = ("model", "messages", "stream", "stream_options")  # of the chat itself


def parse_setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE -> name and value. Raises OptionError."""
    name, separator, value = text.partition("=")
    if not separator:
        raise OptionError(f"must be NAME=VALUE, such as temperature=0.6, not {text!r}")
    return setting(name, value)


def setting(name: str, text: str) -> tuple[str, Any]:
    """The value is JSON where it can be read as such, else the text itself.

    Raises: OptionError: the name is no field, or one that the chat sets itself.
    """
    name, text = name.strip().replace("-", "_"), text.strip()
    if not name.isidentifier() or name in OWN:
        raise OptionError(f"{name!r} cannot be set; such fields can: {', '.join(KNOWN[:6])}")
    hint = did_you_mean(name, KNOWN)
    if name not in KNOWN and hint:
        raise OptionError(f"there is no field {name!r}{hint}")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
