"""Models as Anthropic's API lists them, for requests with its header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

HEADER = "anthropic-version"


def model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All models, given as OpenAI's objects, on one page."""
    data = [model_info(model) for model in models]
    return {"data": data, "first_id": data[0]["id"], "has_more": False, "last_id": data[-1]["id"]}


def model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model, given as OpenAI's object."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }
