"""Names of models as Ollama's clients write them: with a tag, which is `latest` where it is left out."""

from __future__ import annotations

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import NotFoundError

LATEST = ":latest"


def tagged(name: str) -> str:
    """A served name with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served_name(asked: str, settings: AppSettings) -> str:
    """The served model or encoder that is asked for, by its name here. Raises NotFoundError where there is none."""
    names = (*settings.served_model_names, *settings.embedding_model_names)
    for name in (asked, asked.removesuffix(LATEST), asked + LATEST):
        if name in names:
            return name
    raise NotFoundError(f"model '{asked[:100]}' not found: see /api/tags", param="model")
