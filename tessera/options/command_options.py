"""The options of one command: from the command line, the environment, a file, and their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tessera.options.config_file import read_config_file
from tessera.options.declaration import DeclaredOption, Option, declared_options
from tessera.options.environment import read_environment, variable
from tessera.options.errors import OptionError
from tessera.options.parser import Parser

Source = Literal["command line", "environment", "file", "default"]
SOURCES: tuple[Source, ...] = ("command line", "environment", "file", "default")  # the first that has a value wins
Settings = TypeVar("Settings", bound=msgspec.Struct)


class FileOption(msgspec.Struct):
    config: Annotated[
        Path | None,
        Option(
            "YAML file with options, such as max-num-seqs: 64; the command line and the environment override it",
            group="configuration",
            metavar="FILE",
            default="none",
        ),
    ] = None


class GivenOptions:
    """The value of every option of a command, and where each comes from."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
        self._values = values
        self._sources = sources

    def value(self, field: str) -> Any:
        return self._values[field]

    def source(self, field: str) -> Source:
        return self._sources[field]

    def with_entry(self, entry: Mapping[str, Any]) -> GivenOptions:
        """These with the values of one of a list's entries, by field, in their place."""
        return GivenOptions({**self._values, **entry}, {**self._sources, **dict.fromkeys(entry, "file")})

    def rank(self, field: str) -> int:
        """Place of the option's source among SOURCES; lower wins."""
        return SOURCES.index(self._sources[field])

    def make(self, struct: type[Settings], **others: Any) -> Settings:
        """A struct whose options have the given values.

        Args:
            others: fields that are not options, or whose value was worked out from several of them.
        """
        values = {declared.field: self._values[declared.field] for declared in declared_options(struct)}
        return struct(**(values | others))


class CommandOptions:
    """The options that a command's structs declare.

    Args:
        prefix: of the environment variables; None: the command line alone counts, without variables and a file.
        structs: settings of the command; a field that several inherit is one option.
        other_variables: variables with the prefix that are no options, see `read_environment`.
        groups: order of the groups in --help; others follow.
        lists: keys of the file alone, each a list of mappings, and the structs with the options of these. The value is
            a tuple with a dict by field for each mapping.
    """

    def __init__(
        self,
        prefix: str | None,
        structs: Sequence[type[msgspec.Struct]],
        *,
        other_variables: Sequence[str] = (),
        groups: Sequence[str] = (),
        lists: Mapping[str, Sequence[type[msgspec.Struct]]] | None = None,
    ) -> None:
        self.prefix = prefix
        self._other_variables = other_variables
        by_field: dict[str, DeclaredOption] = {}
        for struct in structs if prefix is None else (*structs, FileOption):
            for declared in declared_options(struct):
                if by_field.setdefault(declared.field, declared) != declared:
                    raise TypeError(f"the option {declared.name} is declared twice")
        self.options = list(by_field.values())
        self.lists = {
            key: [declared for struct in each for declared in declared_options(struct)]
            for key, each in (lists or {}).items()
        }
        found = dict.fromkeys((*groups, *(declared.option.group for declared in self.options)))
        self.groups = {
            group: [declared for declared in self.options if declared.option.group == group] for group in found
        }

    def variable(self, declared: DeclaredOption) -> str:
        """Empty where the command line alone counts."""
        return variable(self.prefix, declared.name) if self.prefix is not None else ""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options to argparse. What is not given is absent from the namespace."""
        for title, options in self.groups.items():
            group = parser.add_argument_group(title)
            for declared in options:
                _add_argument(group, declared)

    def read(self, namespace: argparse.Namespace, environment: Mapping[str, str]) -> GivenOptions:
        """Merge the command line, the environment and the file: the first that has an option decides on it.

        Raises:
            OptionError: the environment or the file has something that cannot be used; the message names the place.
        """
        fields = {declared.field for declared in self.options}
        line = {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in vars(namespace).items()
            if field in fields
        }
        variables: dict[str, Any] = {}
        if self.prefix is not None:
            variables = read_environment(self.prefix, environment, self.options, self._other_variables)
        path = (variables | line).get("config")
        in_file = [declared for declared in self.options if declared.field != "config"]
        file = read_config_file(path, in_file, self.lists) if path is not None else {}
        default = {declared.field: declared.default for declared in self.options} | dict.fromkeys(self.lists, ())
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for source, given in reversed(tuple(zip(SOURCES, (line, variables, file, default), strict=True))):
            values |= given
            sources |= dict.fromkeys(given, source)
        return GivenOptions(values, sources)

    def read_or_exit(
        self, parser: Parser, namespace: argparse.Namespace, unknown: Sequence[str], environment: Mapping[str, str]
    ) -> GivenOptions:
        """As `read`; what cannot be used, and the arguments that argparse did not know, end the process."""
        if unknown:
            parser.refuse(unknown)
        try:
            return self.read(namespace, environment)
        except OptionError as error:
            parser.error(str(error))


class Switch(argparse.Action):
    """--NAME for true and --no-NAME for false."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *rest: Any) -> None:
        setattr(namespace, self.dest, not str(rest[-1]).startswith("--no-"))


def _add_argument(group: argparse._ArgumentGroup, declared: DeclaredOption) -> None:
    option, rule = declared.option, declared.rule
    flags = [f"--{name}" for name in declared.names]
    shared: dict[str, Any] = {"dest": declared.field, "default": argparse.SUPPRESS}
    help_text = help_of(declared).replace("%", "%%")
    if rule.kind == "switch":
        opposite = [f"--no-{name}" for name in declared.names]
        if declared.default is False:  # the opposite only undoes a file or a variable
            group.add_argument(*flags, action=Switch, help=help_text, **shared)
            group.add_argument(*opposite, action=Switch, help=argparse.SUPPRESS, **shared)
        else:
            group.add_argument(*flags, *opposite, action=Switch, help=help_text, **shared)
        return
    settings: dict[str, Any] = {"help": help_text, "default": argparse.SUPPRESS, "metavar": _metavar(declared)}
    if declared.many and option.repetition == "commas":
        settings["type"] = _argument_type(declared.parse_text)
    else:
        settings["type"] = _argument_type(declared.parse_item)
        if declared.many:
            settings |= {"nargs": "+", "action": "extend"} if option.repetition == "words" else {"action": "append"}
    if option.bare is not None:
        settings |= {"nargs": "?", "const": option.bare}
    if option.positional:
        settings.pop("action", None)
        group.add_argument(declared.field, nargs="*" if declared.many else "?", **settings)
    else:
        group.add_argument(flags[0], dest=declared.field, **settings)
        for flag in flags[1:]:  # the reference lists them; --help has one name for each option
            group.add_argument(flag, dest=declared.field, **(settings | {"help": argparse.SUPPRESS}))


def help_of(declared: DeclaredOption) -> str:
    """The help with its default."""
    hidden = not declared.default_text or declared.default is False
    return declared.option.help if hidden else f"{declared.option.help} (default: {declared.default_text})"


def _metavar(declared: DeclaredOption) -> str:
    if declared.rule.choices and declared.option.metavar is None:
        return "{" + ",".join(map(str, declared.rule.choices)) + "}"
    return declared.option.metavar or declared.name.upper()


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text is argparse.SUPPRESS:  # of a positional that is not given
            return text
        try:
            return parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
