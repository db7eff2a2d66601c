"""A quantised safetensors checkpoint by the names that a model in 16 bits has."""

from __future__ import annotations

from pathlib import Path

from tessera.engine.models.quantised.rules import Quantisation
from tessera.engine.models.quantised.stored import ModuleTensors, Scheme, StoredMatrix
from tessera.engine.models.weights.safetensors import Array, Checkpoint
from tessera.engine.models.weights.text_part import TextPart
from tessera.engine.tensor import FLOAT_DTYPES

PLAIN = {dtype.name for dtype in FLOAT_DTYPES} | {"float64"}


class QuantisedCheckpoint:
    """The tensors of a quantised module are one, `module.weight`; the others are those of `stored`.

    A module that has a plain weight stays in 16 bits, unless its scheme takes such.
    """

    def __init__(self, stored: Checkpoint | TextPart, quantisation: Quantisation) -> None:
        self.folder = stored.folder
        self._stored = stored
        self._quantisation = quantisation
        self._schemes: dict[str, Scheme] = {}
        names = stored.names
        for weight in sorted({scheme.weight for scheme in quantisation.schemes}):
            for name in names:
                module = name.removesuffix(f".{weight}")
                scheme = quantisation.scheme_of(*stored.spellings(module)) if module != name else None
                if scheme is not None and scheme.weight == weight and self._is_quantised(name, scheme):
                    self._schemes[f"{module}.weight"] = scheme
        self._opened: dict[str, StoredMatrix] = {}
        hidden = {
            f"{name.removesuffix('weight')}{other}"
            for name, scheme in self._schemes.items()
            for other in (scheme.weight, *scheme.others)
        }
        self._names = names - hidden | set(self._schemes)

    def _is_quantised(self, name: str, scheme: Scheme) -> bool:
        stored = self._stored.tensor(name)
        if stored.dtype.name not in PLAIN:
            return not scheme.takes_plain
        if scheme.takes_plain:
            return scheme.holds(stored.shape)
        return any(f"{name.removesuffix(scheme.weight)}{other}" in self._stored.names for other in scheme.others)

    @property
    def names(self) -> set[str]:
        return self._names

    def path(self, name: str) -> Path:
        scheme = self._schemes.get(name)
        return self._stored.path(name if scheme is None else f"{name.removesuffix('weight')}{scheme.weight}")

    def tensor(self, name: str) -> Array | StoredMatrix:
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._stored.tensor(name)
        if name not in self._opened:
            self._opened[name] = scheme.open(ModuleTensors(self._stored, name.removesuffix(".weight")))
        return self._opened[name]
