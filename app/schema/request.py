"""The base of all requests, and parsing: a wrong body gets one sentence that names the field and what it accepts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from tessera.engine.contract.errors import InvalidRequestError

logger = logging.getLogger("tessera.app")

R = TypeVar("R", bound="RequestModel")

FieldValues = Mapping[str, tuple[Any, ...]]  # values of a field that change nothing, by the field's name

MAX_LOGGED = 1024
MAX_WHOLE_FLOATS = 64
LARGEST_EXACT = 2**53  # a larger float may stand for another integer than was sent
REST = ", 'other'"  # the tag of what is known and left out, among those of a union
_logged: set[str] = set()  # subjects of `log_once`

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


_JSON_NAMES = {"True": "true", "False": "false"}


class RequestModel(BaseModel):
    """Base of all requests: strict types, unknown fields ignored, null means omitted where a default exists.

    Attributes:
        refused: fields of OpenAI's API or of other servers that would change the meaning of a completion and that this
            server does not have, each with the values that change nothing. Any other value is an error.
        hints: fields that change no meaning, such as `service_tier`. They are taken without effect; the log says so
            once for each name, unless the value is one of those that change nothing.
        examples: bodies for /openapi.json by name; MODEL stands for a served model.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    refused: ClassVar[FieldValues] = {}
    hints: ClassVar[FieldValues] = {}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    def requested_model(self) -> str | None:
        """The model that the request names; None where its kind of request need not name one."""
        return getattr(self, "model", None)

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""

    @classmethod
    def __get_pydantic_json_schema__(cls, source: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of pydantic, with the refused fields named in the description."""
        schema = handler(source)
        for fields, meaning in ((cls.refused, "Refused unless they ask for nothing"), (cls.hints, "Without effect")):
            names = ", ".join(sorted(set(fields) - set(cls.model_fields)))
            if names:
                described = handler.resolve_ref_schema(schema)
                described["description"] = f"{described.get('description', '')}\n\n{meaning}: {names}.".strip()
        return schema

    @classmethod
    def check_refused(cls, body: Mapping[str, Any]) -> None:
        if cls.refused.keys().isdisjoint(body):
            return
        for name, neutral in cls.refused.items():
            if _asks_for_something(body.get(name), neutral):
                raise InvalidRequestError(f"{name} is not supported by this server.", param=name)

    @classmethod
    def note_hints(cls, body: Mapping[str, Any]) -> None:
        if cls.hints.keys().isdisjoint(body):
            return
        for name, neutral in cls.hints.items():
            if name in body and _asks_for_something(body[name], neutral):
                log_once(name, "the request field %s is taken, but has no effect", name)


def log_once(subject: str, message: str, *args: object) -> None:
    """Write a warning, unless this process has written one about the same subject."""
    if subject not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(subject)
        logger.warning(message, *args)


def _asks_for_something(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and not any(type(value) is type(same) and value == same for same in neutral)


def parse_request(model: type[R], body: Mapping[str, Any]) -> R:
    """A request from its body, in which 100.0 counts as the integer 100, as JSON Schema has it.

    Raises:
        InvalidRequestError: names the first field at fault.
    """
    model.check_refused(body)
    model.note_hints(body)
    try:
        try:
            return model.model_validate(body)
        except ValidationError as error:
            if not _make_integers(error, body):
                raise
            return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True)[0]
        path = field_path(first["loc"], body)
        raise InvalidRequestError(f"{path or 'The body'} {_complaint(first)}.", param=path or None) from None


def _make_integers(error: ValidationError, body: Any) -> bool:
    """Change whole numbers that are written as floats, where integers are asked for; False where there are none.

    Libraries whose numbers are all floats write them so.
    """
    if error.error_count() > MAX_WHOLE_FLOATS:
        return False
    num_changed = 0
    for each in error.errors(include_url=False, include_context=False):
        value = each["input"]
        if each["type"] != "int_type" or type(value) is not float or not value.is_integer():
            continue
        if abs(value) > LARGEST_EXACT:  # the parser makes floats of longer integers, too
            continue
        node: Any = body
        key: Any
        for key in each["loc"]:
            if not (isinstance(node, dict) and key in node) and not (isinstance(node, list) and isinstance(key, int)):
                continue  # pydantic's name for a member of a union
            if node[key] is value:
                node[key] = int(value)
                num_changed += 1
                break
            node = node[key]
    return num_changed > 0


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
        accepted = str(context["expected"]).replace(" or ", ", ")
        return f"must be one of {accepted}" if ", " in accepted else f"must be {_JSON_NAMES.get(accepted, accepted)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        if type(error["input"]) is not dict:
            return "must be an object"
        tags = str(context.get("expected_tags", "")).removesuffix(REST)
        given = f"is of type '{str(context['tag'])[:40]}', but " if "tag" in context else ""
        return f"{given}must have one of the types {tags}" if tags else "must have a type"
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
