"""The Jinja environment of chat templates: an immutable sandbox whose work is metered.

Templates come with models and are not trusted. The sandbox keeps them from Python's internals; the
meter ends one that runs too long or makes too much text, because a thread cannot be stopped from
outside. Loops, calls, filters, operators and what is printed are metered, which is all that repeats or grows; what
a single step of these is about to make is measured before it is made.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
MAX_PARTS = 2**20  # of a list or an object that is turned into text
MAX_DIGITS = 18
CONTAINERS = (list, tuple, dict)
# Filters that make no text of their value's parts, so that these need not be weighed.
STRUCTURAL_FILTERS = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)
WIDTH_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "truncate", "wordwrap"})

_NUMBER = re.compile(r"[0-9]+")


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

    def check_size(self, size: float) -> None:
        if size > self.max_chars:
            raise RenderLimitError(f"The chat template makes more than {self.max_chars} characters of these messages.")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What templates written for transformers expect, metered. Rendering needs `metered` around it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], finalize=_metered_output
        )
        self._thread = threading.local()
        self.filters["tojson"] = _to_json
        self.filters.update({name: _metered_filter(self, name, function) for name, function in self.filters.items()})
        self.filters[_LOOP_FILTER] = _metered_items
        self.filters[_CONCAT_FILTER] = _metered_concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["namespace"] = _PublicNamespace
        self.globals["dict"] = _make_dict
        del self.globals["lipsum"]  # text by the million words, in one call

    @property
    def meter(self) -> Meter:
        meter: Meter = self._thread.meter
        return meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self._thread.meter = meter

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.meter.tick()
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_text_method(__self.meter, method.__name__, text, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _is_sized(left) and _is_sized(right):
            self.meter.check_size(len(left) + len(right))
        elif operator == "*" and (_is_sized(left) or _is_sized(right)):
            sized, factor = (left, right) if _is_sized(left) else (right, left)
            if isinstance(factor, int):
                self.meter.check_size(len(sized) * factor)
        elif operator == "%" and isinstance(left, str):
            _check_text_method(self.meter, "format", left, right if isinstance(right, tuple) else (right,))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
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
    _environment(context).meter.check_size(_weight(parts))
    return "".join(map(str, parts))


@pass_context
def _metered_output(context: Context, value: Any) -> Any:
    if isinstance(value, CONTAINERS):
        _environment(context).meter.check_size(_weight(value))
    return value


def _metered_filter(environment: TemplateEnvironment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter, measured. While a template is compiled there is no meter, so nothing is evaluated then."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = environment.meter
        meter.tick()
        value, given = args[first], (*args[first + 1 :], *kwargs.values())
        if name == "join" and isinstance(value, Iterator):
            value = list(value)
            args = (*args[:first], value, *args[first + 1 :])
        if name not in STRUCTURAL_FILTERS and isinstance(value, CONTAINERS):
            meter.check_size(_weight(value))
        if name in WIDTH_FILTERS:
            meter.check_size(max((number for number in given if isinstance(number, int)), default=0))
        if name in ("replace", "format") and isinstance(value, str):
            _check_text_method(meter, name, value, given)
        elif name == "join" and isinstance(value, CONTAINERS):
            meter.check_size(_weight(value) + len(value) * max(map(_weight, given), default=0))
        result = function(*args, **kwargs)
        if _is_sized(result):
            meter.check_size(len(result))
        return result

    return metered


def _check_text_method(meter: Meter, name: str, text: str, given: Sequence[Any]) -> None:
    """Before a text's method makes another: how long that would be."""
    numbers = [number for number in given if isinstance(number, int)]
    texts = [one for one in given if isinstance(one, str)]
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            meter.check_size(max(numbers, default=0))
        case "expandtabs":
            meter.check_size(text.count("\t") * max(numbers, default=8))
        case "replace" if len(texts) >= 2:
            meter.check_size(len(text) + text.count(texts[0]) * len(texts[1]))
        case "join":
            items = [item for item in given if isinstance(item, CONTAINERS)]
            meter.check_size(sum(_weight(item) + len(text) * len(item) for item in items))
        case "translate":
            tables = [table for table in given if isinstance(table, dict)]
            meter.check_size(len(text) * max((_weight(one) for table in tables for one in table.values()), default=1))
        case "format" | "format_map":
            widths = [int(digits[:MAX_DIGITS]) for digits in _NUMBER.findall(text)]
            from_arguments = sum(numbers) * (text.count("*") + text.count("{")) + _weight(list(given))
            meter.check_size(sum(widths) + from_arguments * (1 + text.count("{") + text.count("%")))
        case _:
            pass


def _weight(value: Any) -> float:
    """About the characters that a value takes as text, infinite for what has more parts than MAX_PARTS."""
    size = num_parts = 0
    pending = [value]
    while pending:
        one = pending.pop()
        num_parts += 1
        if num_parts > MAX_PARTS:
            return math.inf
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            pending += one
    return size + num_parts


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
