"""Checked access to an untrusted JSON object: every value read has a type and a range."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.files import read_bytes

MAX_JSON_BYTES = 16 * 2**20
MAX_SHOWN = 60


class Fields:
    """One JSON object with the defaults for what it does not say.

    A key that is absent or null takes its default. Every reader raises ModelError, naming file, key,
    value and what is accepted. `notes` are sentences about what was left out, for the log.
    """

    def __init__(
        self,
        source: str,
        values: dict[str, Any],
        defaults: dict[str, Any] | None = None,
        notes: list[str] | None = None,
    ) -> None:
        self.source = source
        self.values = values
        self.defaults = defaults or {}
        self.notes = [] if notes is None else notes

    def raw(self, name: str) -> Any:
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        return self.raw(name) is not None

    def refuse(self, name: str, accepted: str) -> NoReturn:
        value = self.raw(name)
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing; it must be {accepted}")
        raise ModelError(f"{self.source}: {name} must be {accepted}, not {shown(value)}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.raw(name)
        if not is_integer(value) or not low <= value <= high:
            self.refuse(name, f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float:
        value = self.raw(name)
        if not is_number(value) or not low <= value <= high:
            self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, accepted: dict[str, Any]) -> Any:
        value = self.raw(name)
        if not isinstance(value, str) or value not in accepted:
            self.refuse(name, f"one of {', '.join(accepted)}")
        return accepted[value]

    def numbers(self, name: str, count: int, low: float, high: float) -> tuple[float, ...]:
        value = self.raw(name)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(is_number(item) and low <= item <= high for item in value):
            self.refuse(name, f"a list of {count} numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def strings(self, name: str, count: int) -> tuple[str, ...]:
        value = self.raw(name)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(item, str) for item in value):
            self.refuse(name, f"a list of {count} strings")
        return tuple(value)

    def section(self, name: str, defaults: dict[str, Any] | None = None) -> Fields:
        """The object at `name`; an absent one is empty."""
        value = self.raw(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(f"{self.source}: {name}", value, defaults, self.notes)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return is_integer(value) and abs(value) <= 2**63


def shown(value: Any) -> str:
    """A value as error texts quote it: on one line and short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(type(value))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def read_json_object(path: Path, notes: list[str] | None = None) -> dict[str, Any]:
    """The object in the JSON file at `path`, at most MAX_JSON_BYTES long.

    Of a key that occurs twice the last value counts, which is added to `notes`.

    Raises: ModelError naming the file and what is wrong with it.
    """
    text = read_bytes(path, MAX_JSON_BYTES)
    notes = [] if notes is None else notes
    return _parse_json_object(text, str(path), lambda key: notes.append(f"{path} has {key} twice: the last one counts"))


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """Like `read_json_object` for text in memory, but a key that occurs twice is an error."""
    return _parse_json_object(text, source, _refuse_twice)


def _parse_json_object(text: bytes, source: str, on_twice: Callable[[str], None]) -> dict[str, Any]:
    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            on_twice(shown(next(name for name in names if names.count(name) > 1)))
        return found

    try:
        value = json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ModelError(f"{source} is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source} must hold a JSON object, not {shown(value)}")
    return value


def _refuse_twice(key: str) -> NoReturn:
    raise ValueError(f"the key {key} occurs twice")
