"""Files of JSON lines to train on, each line checked, and all that is wrong said at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson

from tessera.app.schema.request import RequestModel, parse_request
from tessera.engine.contract.errors import ConfigError, InvalidRequestError

MAX_SHOWN_ERRORS = 10
MAX_LINE_BYTES = 2**26

Line = TypeVar("Line", bound=RequestModel)


def read_lines(path: Path, schema: type[Line], on_line: Callable[[Line], None], *, name: str = "") -> int:
    """Check every line that is not empty, and hand it on until one is wrong; -> how many there are.

    Args:
        on_line: may raise ConfigError or InvalidRequestError for what is wrong with a line beyond its form.
        name: of the file in errors; its path if empty.

    Raises: ConfigError with all that is wrong, up to a number of lines.
    """
    shown = name or str(path)
    wrong: list[str] = []
    num_lines = num_wrong = 0
    for number, line in _numbered(path, shown):
        num_lines += 1
        try:
            parsed = _parsed(line, schema)
            if not wrong:
                on_line(parsed)
        except (ConfigError, InvalidRequestError) as error:
            num_wrong += 1
            if len(wrong) < MAX_SHOWN_ERRORS:
                wrong.append(f"\n  line {number}: {error}")
    if wrong:
        more = f"\n  and {num_wrong - MAX_SHOWN_ERRORS} more" if num_wrong > MAX_SHOWN_ERRORS else ""
        raise ConfigError(f"{shown} has {num_wrong} line{'s' if num_wrong > 1 else ''} at fault:{''.join(wrong)}{more}")
    if not num_lines:
        fields = ", ".join(f'"{field}": ...' for field, each in schema.model_fields.items() if each.is_required())
        raise ConfigError(f"{shown} is empty; a line is {{{fields}}}")
    return num_lines


def _numbered(path: Path, shown: str) -> Iterator[tuple[int, bytes]]:
    """Without empty lines; counted from 1. The end of a line that is too long is not read at once."""
    try:
        with path.open("rb") as file:
            number, begins = 0, True
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += begins
                if begins and line.strip():
                    yield number, line
                begins = line.endswith(b"\n")
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}") from None


def _parsed(line: bytes, schema: type[Line]) -> Line:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequestError(f"It has more than {MAX_LINE_BYTES} bytes.")
    try:
        body: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"It is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("It must be an object.")
    parsed = parse_request(schema, body)
    parsed.check()
    return parsed
