"""The clients of the suite: where each comes from, and the version that is installed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

HERE = Path(__file__).resolve().parent
NODE_MODULES = HERE / "node_modules"
ENVIRONMENTS = ROOT / ".venv-clients"


@dataclass(frozen=True)
class Client:
    """A client as it is called in the table.

    Attributes:
        package: its name on npm, or on PyPI where it has an `environment`.
        environment: folder of its virtual environment, and name of its file of requirements.
        left: what it does not do with a server of one's own, whatever the server does.
    """

    name: str
    package: str
    environment: str | None = None
    left: str = ""

    @property
    def python(self) -> Path:
        assert self.environment is not None
        return ENVIRONMENTS / self.environment / "bin" / "python"

    @property
    def version(self) -> str | None:
        """None where it is not installed."""
        if self.environment is None:
            manifest = NODE_MODULES / self.package / "package.json"
            return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else None
        name = re.sub(r"[-.]", "_", self.package)
        found = (ENVIRONMENTS / self.environment).glob(f"lib/python*/site-packages/{name}-*.dist-info")
        return next((path.name.removesuffix(".dist-info").rpartition("-")[2] for path in found), None)


CLIENTS = {
    client.name: client
    for client in (
        Client("Claude Code", "@anthropic-ai/claude-code"),
        Client("Codex", "@openai/codex"),
        Client("opencode", "opencode-ai"),
        Client("qwen-code", "@qwen-code/qwen-code"),
        Client("openai-python", "openai", "openai"),
        Client("openai-node", "openai"),
        Client("anthropic-python", "anthropic", "anthropic"),
        Client("@anthropic-ai/sdk", "@anthropic-ai/sdk"),
        Client("AI SDK", "ai"),
        Client("LangChain", "langchain-core", "langchain"),
        Client("LlamaIndex", "llama-index-core", "llama-index"),
        Client("litellm", "litellm", "litellm"),
        Client("instructor", "instructor", "instructor"),
        Client("pydantic-ai", "pydantic-ai-slim", "pydantic-ai"),
        Client("openai-agents", "openai-agents", "openai-agents"),
        Client("DSPy", "dspy", "dspy", "calls tools by text: it knows native calls of listed models alone"),
        Client("guidellm", "guidellm", "guidellm"),
        Client("ollama-python", "ollama", "ollama"),
        Client("ollama-js", "ollama"),
    )
}
