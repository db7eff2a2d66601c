"""The declaration of an option: the field of a struct, annotated with `Option`."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tessera.options.errors import OptionError
from tessera.options.values import Kind, ValueRule, check_value, parse_text

Repetition = Literal["repeat", "words", "commas"]


@dataclass(frozen=True)
class Option:
    """Makes a field an option. Its name, type and default are those of the field.

    Accepted types: bool, int, float, str, Path, dict (a JSON object), Literal, `tuple[item, ...]` of these, and each
    of them `| None`. A Literal's values are the choices.

    Attributes:
        help: a phrase for --help and the documentation, without the default.
        group: title below which the option is listed.
        metavar: what stands for the value in --help.
        low, high: bounds of a number, both accepted.
        pattern, form: regular expression that a text must match, and what it describes, as in "must be {form}".
        parse: turns the text of one item into a value that the types above do not cover; raises OptionError.
        repetition: how the command line gives several items: the option repeated, words after it, or one word with
            commas. The environment has commas, the file a list.
        name: without dashes, where it is not the field's.
        aliases: further names, without dashes.
        default: the default in words, where the field's value does not say it.
        bare: the value of the option without one.
        positional: given without its name on the command line.
        secret: a value that is never shown.
    """

    help: str
    group: str
    metavar: str | None = None
    low: float = -math.inf
    high: float = math.inf
    pattern: str | None = None
    form: str = ""
    parse: Callable[[str], Any] | None = None
    repetition: Repetition = "repeat"
    name: str | None = None
    aliases: tuple[str, ...] = ()
    default: str | None = None
    bare: Any = None
    positional: bool = False
    secret: bool = False


@dataclass(frozen=True)
class DeclaredOption:
    """An option with all that its field says about it."""

    field: str
    option: Option
    rule: ValueRule
    many: bool
    default: Any

    @property
    def name(self) -> str:
        """As on the command line, without dashes; the key in a file."""
        return self.option.name or self.field.replace("_", "-")

    @property
    def flag(self) -> str:
        return self.name.upper() if self.option.positional else f"--{self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.option.aliases)

    @property
    def default_text(self) -> str:
        """The default as help and documentation show it; empty where there is none to show."""
        if self.option.default is not None:
            return self.option.default
        if self.default is None or self.default == () or self.default == {} or self.option.secret:
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)

    def parse_item(self, text: str) -> Any:
        """The value of one item. Raises OptionError with what is accepted."""
        return self.option.parse(text) if self.option.parse is not None else parse_text(self.rule, text)

    def parse_text(self, text: str) -> Any:
        """The value of a text that holds all items, separated by commas. Raises OptionError."""
        if not self.many:
            return self.parse_item(text)
        return self.parse_items([item.strip() for item in text.split(",") if item.strip()])

    def parse_items(self, items: list[str]) -> tuple[Any, ...]:
        return tuple(self.parse_item(item) for item in items)

    def check(self, value: Any) -> None:
        """Raise OptionError if a value of the right type is outside what is accepted; the default never is."""
        if value is None or value == self.default or self.option.parse is not None:
            return
        for item in value if self.many else (value,):
            check_value(self.rule, item)


@cache
def declared_options(struct: type[msgspec.Struct]) -> tuple[DeclaredOption, ...]:
    """The options among a struct's fields, in their order."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        option = next((extra for extra in hint.__metadata__ if isinstance(extra, Option)), None)
        if option is not None:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            found.append(_declare(field.name, hint.__origin__, option, default))
    return tuple(found)


def check_fields(settings: msgspec.Struct) -> None:
    """Raise OptionError, which names the option, for the first field outside its bounds or choices."""
    for declared in declared_options(type(settings)):
        try:
            declared.check(getattr(settings, declared.field))
        except OptionError as error:
            raise OptionError(f"{declared.flag} {error}") from None


def _declare(field: str, hint: Any, option: Option, default: Any) -> DeclaredOption:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not types.NoneType)
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    rule = ValueRule(_kind(hint, choices), choices, option.low, option.high, option.pattern, option.form, option.secret)
    return DeclaredOption(field, option, rule, many, default)


def _kind(hint: Any, choices: tuple[Any, ...]) -> Kind:
    if choices:
        return "choice"
    kinds: dict[Any, Kind] = {
        bool: "switch",
        int: "integer",
        float: "number",
        str: "text",
        Path: "path",
        dict: "object",
    }
    return kinds.get(get_origin(hint) or hint, "text")
