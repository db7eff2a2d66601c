"""The Jinja environment of chat templates: what templates written for transformers expect, in an immutable sandbox.

Templates come with models and are not trusted. The sandbox keeps them from Python's internals; the process that
renders them (`app.text.renderer`) bounds their time and memory.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """`now` is what `strftime_now` formats."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.now = datetime.now()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: self.now.strftime(format)
        self.globals["namespace"] = _PublicNamespace
        self.globals["dict"] = _make_dict
        del self.globals["lipsum"]  # random text, which no prompt wants


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's own text, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _PublicNamespace(Namespace):
    """Jinja's namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace attribute begins with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines the filter: plain JSON, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
