"""Values of options: from text, and within their bounds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.options.errors import OptionError
from tessera.options.suggestions import did_you_mean

Kind = Literal["switch", "choice", "integer", "number", "text", "path", "object"]

SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class ValueRule:
    """The values that an option accepts; the fields are those of `Option`."""

    kind: Kind
    choices: tuple[Any, ...]
    low: float
    high: float
    pattern: str | None
    form: str
    secret: bool


def parse_text(rule: ValueRule, text: str) -> Any:
    """Raises OptionError: "must be ..., not ..."."""
    value: Any = text
    if rule.kind == "switch":
        value = SWITCH.get(text.lower())
        if value is None:
            raise OptionError(f"must be true or false{_not(rule, text)}")
    elif rule.kind == "choice":
        value = next((choice for choice in rule.choices if str(choice) == text), None)
        if value is None:
            names = [str(choice) for choice in rule.choices]
            raise OptionError(f"invalid choice: {text!r} (choose from {', '.join(names)}){did_you_mean(text, names)}")
    elif rule.kind in ("integer", "number"):
        try:
            value = int(text) if rule.kind == "integer" else float(text)
        except ValueError:
            value = math.nan
        _check_bounds(rule, value, repr(text))
    elif rule.kind == "path":
        value = Path(text)
    elif rule.kind == "object":
        value = _json_object(rule, text)
    elif rule.pattern is not None and not re.fullmatch(rule.pattern, text):
        raise OptionError(f"must be {rule.form}{_not(rule, text)}")
    return value


def check_value(rule: ValueRule, value: Any) -> None:
    """Raise OptionError if a value that was not given as text is outside the bounds or choices."""
    if rule.kind in ("integer", "number"):
        _check_bounds(rule, value, str(value))
    elif rule.kind == "choice" and value not in rule.choices:
        raise OptionError(f"must be one of {', '.join(map(str, rule.choices))}, not {value}")
    elif rule.pattern is not None and not re.fullmatch(rule.pattern, value):
        raise OptionError(f"must be {rule.form}{_not(rule, value)}")


def bounds_text(rule: ValueRule) -> str:
    """The accepted numbers in words: "a whole number from 1 to 64"."""
    kind = "a whole number" if rule.kind == "integer" else "a number"
    low, high = (f"{bound:g}" if rule.kind == "number" else str(bound) for bound in (rule.low, rule.high))
    return f"{kind} from {low} to {high}"


def _check_bounds(rule: ValueRule, value: float, shown: str) -> None:
    if not rule.low <= value <= rule.high:  # false for nan
        raise OptionError(f"must be {bounds_text(rule)}, not {shown}")


def _json_object(rule: ValueRule, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"must be a JSON object{_not(rule, text)}")
    return value


def _not(rule: ValueRule, text: str) -> str:
    return "" if rule.secret else f", not {text!r}"
