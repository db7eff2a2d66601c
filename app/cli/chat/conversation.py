"""A conversation: system prompt, messages, settings; saved to a file and loaded from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.engine.contract.errors import ConfigError

ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """Messages in turns of the user and the assistant.

    Attributes:
        system: system prompt; None without.
        messages: all others, as Chat Completions takes them.
        settings: further fields of each request.
    """

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_send(self) -> list[dict[str, str]]:
        """All messages of a request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def take_back(self) -> str | None:
        """Drop the last question and its answer; -> the question, None where there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def save(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        content = {"messages": self.to_send(), "settings": self.settings}
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Become the conversation that `save` wrote, or a JSON list of messages; its settings are added to its own.

        Raises: ConfigError where the file cannot be read or has something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"{path} is not JSON: /save writes such files") from None
        fields = content if isinstance(content, dict) else {"messages": content}
        messages, settings = fields.get("messages"), fields.get("settings", {})
        if not isinstance(messages, list) or not all(map(_is_message, messages)) or not isinstance(settings, dict):
            raise ConfigError(f'{path} must have "messages" of the roles system, user and assistant with texts')
        systems = [message["content"] for message in messages if message["role"] == "system"]
        self.system = "\n\n".join(systems) or None
        self.messages = [
            {"role": message["role"], "content": message["content"]} for message in messages if message["role"] in ROLES
        ]
        self.settings |= settings


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ("system", *ROLES) and isinstance(value.get("content"), str)
