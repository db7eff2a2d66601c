"""Pieces of the example bodies in /openapi.json that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HELLO: Sequence[Mapping[str, str]] = [{"role": "user", "content": "Hello!"}]
WEATHER_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER_FUNCTION: Mapping[str, Any] = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": WEATHER_PARAMETERS,
}
