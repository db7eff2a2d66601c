"""Options from a YAML file: a mapping of option names to values."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.options.declaration import DeclaredOption
from tessera.options.errors import OptionError
from tessera.options.suggestions import did_you_mean

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

NULL = "tag:yaml.org,2002:null"


def read_config_file(
    path: Path, options: Sequence[DeclaredOption], lists: Mapping[str, Sequence[DeclaredOption]] | None = None
) -> dict[str, Any]:
    """Values by field of the options that the file sets; a null leaves an option at its default.

    Scalars are taken as written: `1.10` is the name "1.10", and `1e-3` a number, whatever YAML makes of them.

    Args:
        lists: keys whose value is a list of mappings, and the options of these. Their values are tuples of dicts.

    Raises:
        OptionError: the file cannot be read, is not YAML, or names the line of what cannot be used.
    """
    return _mapping(path, _compose(path), options, lists or {})


def _mapping(
    path: Path, mapping: MappingNode, options: Sequence[DeclaredOption], lists: Mapping[str, Sequence[DeclaredOption]]
) -> dict[str, Any]:
    known = {name: declared for declared in options for name in declared.names}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, node in mapping.value:
        line = key.start_mark.line + 1
        where = f"{path} line {line}"
        if not isinstance(key.value, str):
            raise OptionError(f"{where}: a key must be the name of an option")
        name = key.value.replace("_", "-")
        if name in lists:
            if name in values:
                raise OptionError(f"{where}: {name} is given twice")
            values[name] = _list_of_mappings(path, where, name, node, lists[name])
            continue
        declared = known.get(name)
        if declared is None:
            raise OptionError(f"{where}: there is no option {key.value}{_hint(name, known, lists)}")
        if declared.field in lines:
            raise OptionError(f"{where}: {name} is given twice, first in line {lines[declared.field]}")
        lines[declared.field] = line
        if node.tag == NULL:
            continue
        try:
            values[declared.field] = _value(declared, node)
        except OptionError as error:
            raise OptionError(f"{where}: {name}: {error}") from None
    return values


def _list_of_mappings(
    path: Path, where: str, name: str, node: Node, options: Sequence[DeclaredOption]
) -> tuple[dict[str, Any], ...]:
    from yaml.nodes import MappingNode, SequenceNode

    entries = node.value if isinstance(node, SequenceNode) else ()
    if not entries or not all(isinstance(entry, MappingNode) for entry in entries):
        raise OptionError(f"{where}: {name} must be a list of mappings, each with options of its own")
    return tuple(_mapping(path, entry, options, {}) for entry in entries)


def _compose(path: Path) -> MappingNode:
    import yaml  # only where there is a file

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--config {path} cannot be read: not UTF-8 text") from None
    except RecursionError:
        raise OptionError(f"--config {path} is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise OptionError(f"--config {path}{place} is not YAML: {reason}") from None
    if node is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(node, yaml.MappingNode):
        raise OptionError(f"--config {path} must be a mapping from options to values, such as port: 8000")
    return node


def _value(declared: DeclaredOption, node: Node) -> Any:
    from yaml.nodes import ScalarNode, SequenceNode

    if isinstance(node, ScalarNode):
        text = str(node.value)
        if declared.many:
            return declared.parse_items([item.strip() for item in text.split(",")])
        return declared.parse_item(text)
    if isinstance(node, SequenceNode):
        if not declared.many:
            raise OptionError("must be one value, not a list")
        if not all(isinstance(item, ScalarNode) for item in node.value):
            raise OptionError("must be a list of plain values")
        return declared.parse_items([str(item.value) for item in node.value])
    if declared.rule.kind != "object":
        raise OptionError("must be one value, not a mapping")
    return declared.parse_item(_json(node))


def _json(node: Node) -> str:
    from yaml.constructor import ConstructorError, SafeConstructor

    try:
        return json.dumps(SafeConstructor().construct_document(node))
    except (ConstructorError, TypeError, ValueError):
        raise OptionError("must hold what JSON can") from None


def _hint(name: str, known: dict[str, DeclaredOption], lists: Collection[str]) -> str:
    opposite = known.get(name.removeprefix("no-"))
    if opposite is not None and opposite.rule.kind == "switch":
        return f"; write {opposite.name}: false"
    return did_you_mean(name, (*known, *lists))
