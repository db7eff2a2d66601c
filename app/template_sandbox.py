"""The Jinja environment of chat templates: an immutable sandbox whose work is metered.

Templates come with models and are not trusted. The sandbox keeps them from Python's internals; the
meter ends one that runs too long or makes too much text, because a thread cannot be stopped from
outside. Loops, calls, `~`, `+`, `*` and `**` are metered, which is all that repeats or doubles; a
single call of one of Jinja's own filters is not.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

TICKS_PER_CLOCK_READ = 64
MAX_INTEGER_BITS = 4096


class RenderLimitError(Exception):
    """A rendering went over its time or size; the message is for the user."""


class Meter:
    """What one rendering may still use. `deadline` is in `time.monotonic()` seconds."""

    def __init__(self, deadline: float, max_chars: int) -> None:
        self._deadline = deadline
        self.max_chars = max_chars
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % TICKS_PER_CLOCK_READ == 0 and time.monotonic() > self._deadline:
            raise RenderLimitError("The chat template takes too long to render these messages.")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise RenderLimitError(f"The chat template makes more than {self.max_chars} characters of these messages.")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What templates written for transformers expect, metered. Rendering needs `metered` around it."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self._thread = threading.local()
        self.filters["tojson"] = _to_json
        self.filters[_LOOP_FILTER] = _metered_items
        self.filters[_CONCAT_FILTER] = _metered_concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["namespace"] = _PublicNamespace
        self.globals["dict"] = _make_dict

    @property
    def meter(self) -> Meter:
        meter: Meter = self._thread.meter
        return meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self._thread.meter = meter

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.meter.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _is_sized(left) and _is_sized(right):
            self.meter.check_size(len(left) + len(right))
        elif operator == "*" and (_is_sized(left) or _is_sized(right)):
            sized, factor = (left, right) if _is_sized(left) else (right, left)
            if isinstance(factor, int):
                self.meter.check_size(len(sized) * factor)
        elif operator != "+" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > MAX_INTEGER_BITS:
                raise RenderLimitError(f"The chat template computes a number of more than {MAX_INTEGER_BITS} bits.")
        return super().call_binop(context, operator, left, right)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_MeterNodes().visit(source), name, filename, defer_init)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


_LOOP_FILTER = "metered items"  # names with a space cannot be written in a template
_CONCAT_FILTER = "metered concat"


class _MeterNodes(NodeTransformer):
    """Sends every loop's items and every `~` through the meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOP_FILTER, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _CONCAT_FILTER, [], [], None, None, lineno=node.lineno)


# pass_context also keeps Jinja from evaluating these at compile time.
@pass_context
def _metered_items(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    meter = _environment(context).meter
    for item in items:
        meter.tick()
        yield item


@pass_context
def _metered_concat(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _environment(context).meter.check_size(sum(map(len, texts)))
    return "".join(texts)


def _environment(context: Context) -> TemplateEnvironment:
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    return environment


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


def _is_sized(value: object) -> bool:
    return isinstance(value, (str, list, tuple))
