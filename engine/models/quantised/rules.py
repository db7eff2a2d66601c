"""Which scheme each module of a quantised model has."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import shown
from tessera.engine.models.quantised.stored import Scheme

MAX_PATTERNS = 4096
MAX_PATTERN = 500


@dataclass(frozen=True)
class Rule:
    """Modules of which one of these regular expressions matches the whole name have `scheme`; None: 16 bits."""

    patterns: tuple[str, ...]
    scheme: Scheme | None

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.patterns))

    def matches(self, module: str) -> bool:
        return any(pattern.fullmatch(module) for pattern in self._compiled)


@dataclass(frozen=True)
class Quantisation:
    """Of a checkpoint: the first rule that matches a module counts.

    Attributes:
        method: as its configuration names it.
        embeddings: tables of embeddings are quantised too.
    """

    method: str
    rules: tuple[Rule, ...]
    embeddings: bool = False

    def scheme_of(self, *names: str) -> Scheme | None:
        """Of a module that goes by any of these names."""
        for rule in self.rules:
            if any(rule.matches(name) for name in names):
                return rule.scheme
        return None

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))


ALL = (".*",)


def targets(source: str, names: Iterable[object], class_names: tuple[str, ...] = ("Linear",)) -> tuple[str, ...]:
    """Regular expressions for targets of compressed-tensors: a class, a module, or `re:` and the start of a name."""
    return tuple(_target(source, name, class_names) for name in _texts(source, names))


def parts(source: str, names: Iterable[object]) -> tuple[str, ...]:
    """Regular expressions for lists such as modules_to_not_convert: whole components of a module's name."""
    return tuple(rf"(?:.*\.)?{re.escape(name)}(?:\..*)?" for name in _texts(source, names))


def globs(source: str, names: Iterable[object]) -> tuple[str, ...]:
    """Regular expressions for modules and what is in them, with * for any text: ModelOpt."""
    return tuple(
        pattern
        for name in _texts(source, names)
        for pattern in (fnmatch.translate(name), fnmatch.translate(f"{name}.*"))
    )


def expression(source: str, text: str) -> str:
    """A regular expression for what begins a name. Raises: ModelError where it is none."""
    try:
        re.compile(text)
    except re.error as error:
        raise ModelError(f"{source}: {shown(text)} is not a regular expression: {error}") from error
    return f"(?:{text}).*"


def _target(source: str, name: str, class_names: tuple[str, ...]) -> str:
    if name in class_names:
        return ".*"
    return expression(source, name.removeprefix("re:")) if name.startswith("re:") else re.escape(name)


def _texts(source: str, names: Iterable[object]) -> list[str]:
    found = list(names)
    texts = [name for name in found if isinstance(name, str) and 0 < len(name) <= MAX_PATTERN]
    if len(texts) < len(found) or len(found) > MAX_PATTERNS:
        raise ModelError(
            f"{source} must be a list of at most {MAX_PATTERNS} names of at most {MAX_PATTERN} characters, "
            f"not {shown(found)}"
        )
    return texts
