"""The input file of a batch: its lines, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.app.http.body import parse_json
from tessera.app.http.json_reader import JsonError
from tessera.engine.contract.errors import InvalidRequestError

MAX_ERRORS = 100  # of one file that are reported
MAX_CUSTOM_ID = 512
READ_BYTES = 2**20  # read at a time, and one line more


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request; `number` counts lines from 1."""

    number: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Validation:
    """The number of requests in a file and their model, or the errors."""

    num_requests: int
    model: str | None
    errors: list[dict[str, Any]]


class LineReader:
    """The lines of a file that are not blank and not in `skipped`, a block at a time. Blocks; raises OSError."""

    def __init__(self, path: Path, max_line: int, skipped: Collection[int] = ()) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  closed by `close`
        self._max_line = max_line
        self._skipped = skipped
        self._number = 0

    def read_block(self) -> list[InputLine]:
        """The next lines; none at the end. A line that is too long is cut, and so no JSON."""
        lines: list[InputLine] = []
        num_bytes = 0
        while num_bytes < READ_BYTES or not lines:
            text = self._file.readline(self._max_line + 1)
            if not text:
                break
            self._number += 1
            num_bytes += len(text)
            if len(text) > self._max_line:
                self._skip_rest()
            if self._number not in self._skipped and not text.isspace():
                lines.append(InputLine(self._number, text))
        return lines

    def close(self) -> None:
        self._file.close()

    def _skip_rest(self) -> None:
        while (rest := self._file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
            pass


def read_lines(path: Path, max_line: int, skipped: Collection[int] = ()) -> Iterator[InputLine]:
    reader = LineReader(path, max_line, skipped)
    try:
        while block := reader.read_block():
            yield from block
    finally:
        reader.close()


def validate_file(path: Path, endpoint: str, models: Collection[str], *, max_lines: int, max_line: int) -> Validation:
    """Look at every line before the first is run. Blocks; raises OSError.

    Args:
        models: names that are served at the endpoint.
        max_lines: most requests.
        max_line: most bytes of a line.
    """
    errors: list[dict[str, Any]] = []
    first_lines: dict[str, int] = {}
    model: str | None = None
    num_requests = 0
    for line in read_lines(path, max_line):
        num_requests += 1
        try:
            if num_requests > max_lines:
                raise _Wrong("too_many_tasks", f"The file has more requests than the {max_lines} that are accepted.")
            named = _model_of(line, endpoint, max_line, first_lines)
            if model is None:
                model = named
                if named not in models:
                    raise _Wrong("model_not_found", f"The model {named[:100]!r} does not exist here.", "body.model")
            elif named != model:
                raise _Wrong(
                    "mismatched_model",
                    f"The model {named[:100]!r} does not match the rest of the batch, which has {model[:100]!r}. "
                    "Each batch must contain requests for a single model.",
                    "body.model",
                )
        except _Wrong as wrong:
            errors.append({"code": wrong.code, "message": str(wrong), "param": wrong.param, "line": line.number})
            if len(errors) == MAX_ERRORS or wrong.code == "too_many_tasks":
                break
    if num_requests == 0:
        errors.append({"code": "empty_file", "message": "The file has no requests.", "param": None, "line": None})
    return Validation(num_requests, model, errors)


class _Wrong(Exception):
    """Something wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def _model_of(line: InputLine, endpoint: str, max_line: int, first_lines: dict[str, int]) -> str:
    """The model of a line's request.

    Args:
        first_lines: the line of each custom_id so far; this one's is noted.

    Raises:
        _Wrong: something else than its model is wrong.
    """
    if len(line.text) > max_line:
        raise _Wrong("invalid_json_line", f"This line has more than {max_line} bytes.")
    try:
        request = parse_json(line.text)
    except JsonError:
        raise _Wrong("invalid_json_line", "This line is not parseable as valid JSON.") from None
    except InvalidRequestError as error:
        raise _Wrong("invalid_json_line", str(error)) from None
    if type(request) is not dict:
        raise _Wrong("invalid_json_line", "This line is not a JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if request.get(name) is None:
            raise _Wrong("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id, body = request["custom_id"], request["body"]
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters."
        raise _Wrong("invalid_custom_id", message, "custom_id")
    first = first_lines.setdefault(custom_id, line.number)
    if first != line.number:
        message = f"The custom_id is that of line {first}; it must be unique for each request in a batch."
        raise _Wrong("duplicate_custom_id", message, "custom_id")
    if request["method"] != "POST":
        raise _Wrong("invalid_method", "The method must be 'POST'.", "method")
    if request["url"] != endpoint:
        message = f"The URL provided for this request does not match the batch endpoint, {endpoint}."
        raise _Wrong("invalid_url", message, "url")
    if type(body) is not dict:
        raise _Wrong("invalid_body", "body must be an object.", "body")
    model = body.get("model")
    if type(model) is not str:
        raise _Wrong("missing_required_parameter", "Missing required parameter: 'model'.", "body.model")
    return model
