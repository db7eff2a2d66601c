"""From a JSON object to a checked request, with one clear sentence for what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tessera.app.schema.common import RequestModel
from tessera.engine.contract.errors import InvalidRequestError

R = TypeVar("R", bound=RequestModel)

_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_parsing_size": "an integer within range",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "none_required": "null",
}


def parse_request(model: type[R], body: Mapping[str, Any]) -> R:
    """Raises InvalidRequestError naming the first field at fault."""
    model.check_refused(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True)[0]
        path = field_path(first["loc"], body)
        raise InvalidRequestError(f"{path or 'The body'} {_complaint(first)}.", param=path or None) from None


def field_path(location: Sequence[int | str], body: Any) -> str:
    """`messages[0].content` from pydantic's location, without its names for members of unions."""
    path = ""
    node = body
    for position, key in enumerate(location):
        if isinstance(key, int) and isinstance(node, list):
            path += f"[{key}]"
            node = node[key] if key < len(node) else None
        elif isinstance(key, str) and isinstance(node, dict) and (key in node or position == len(location) - 1):
            path += f".{key[:100]}" if path else key[:100]
            node = node.get(key)
    return path


def _complaint(error: ErrorDetails) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "field":
        return str(context["text"])
    if kind == "missing":
        return "is required"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}"
    if kind == "literal_error":
        return f"must be one of {context['expected']}".replace(" or ", ", ")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"must have one of the types {context.get('expected_tags', 'that are supported')}"
    bounds = {
        "greater_than_equal": "at least {ge}",
        "greater_than": "greater than {gt}",
        "less_than_equal": "at most {le}",
    }
    if kind in bounds:
        return f"must be {bounds[kind].format(**context)}, not {error['input']}"
    if kind == "string_too_long":
        return f"may have at most {context['max_length']} characters"
    if kind == "string_too_short":
        return f"must have at least {context['min_length']} character"
    if kind == "too_long":
        return f"may have at most {context['max_length']} entries"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry"
    return "is not valid"
