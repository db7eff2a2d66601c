"""The requests that the tests make, apart from what each of them is about."""

from __future__ import annotations

from typing import Any

from tests.support.servers.surface_fixtures import WEATHER_PARAMETERS

ASK: Any = {"model": "tiny", "prompt": "hi"}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
WEATHER: Any = {"name": "weather", "description": "Tells the weather", "parameters": WEATHER_PARAMETERS}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
