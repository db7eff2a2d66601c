"""The weights of the language model in a multimodal checkpoint, by the names that it has alone."""

from __future__ import annotations

from pathlib import Path

from tessera.engine.models.weights.safetensors import Array, Checkpoint

# What stands before the language model's own names; some savers put it in the place of their `model.`.
PREFIXES = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)


class TextPart:
    """A checkpoint that hides the tensors of the parts that see or hear."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        stored = checkpoint.names
        found = [pair for pair in PREFIXES if any(name.startswith(pair[0]) for name in stored)]
        prefix, instead = self._prefix = found[0] if found else ("", "")
        self._stored = {name: name for name in stored if name.startswith("lm_head.")}
        if found:
            self._stored |= {instead + name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
        else:
            self._stored |= {name: name for name in stored if name.startswith("model.")}

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def spellings(self, module: str) -> tuple[str, ...]:
        """The names that a module goes by: its own, and that in the checkpoint."""
        prefix, instead = self._prefix
        return (module, prefix + module.removeprefix(instead)) if module.startswith(instead) else (module,)

    def path(self, name: str) -> Path:
        return self._checkpoint.path(self._stored[name])

    def tensor(self, name: str) -> Array:
        return self._checkpoint.tensor(self._stored[name])
