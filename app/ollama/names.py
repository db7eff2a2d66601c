"""Names of models as Ollama's clients write them: with a tag, which is `latest` where it is left out."""

from __future__ import annotations

from collections.abc import Collection

from tessera.engine.contract.errors import NotFoundError

LATEST = ":latest"


def tagged(name: str) -> str:
    """A served name with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served_name(asked: str, names: Collection[str]) -> str:
    """The one of the served names that is asked for. Raises NotFoundError where there is none."""
    for name in (asked, asked.removesuffix(LATEST), asked + LATEST):
        if name in names:
            return name
    raise NotFoundError(f"model '{asked[:100]}' not found: see /api/tags", param="model")
