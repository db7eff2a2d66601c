"""Large JSON that is read in pieces is what orjson makes of it, whatever is in it and wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tessera.app.http import body, json_reader
from tessera.app.http.body import parse_json
from tessera.app.http.json_reader import JsonError

THOROUGH = settings(
    max_examples=100, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
)

SPACE = st.sampled_from(["", "", "", " ", "\n\t"])
CHARACTERS = ["a", ",", "[", "}", "é", "😀", r"\n", r"\"", r"\\", r"\u00e9", r"\ud83d\ude00"]
STRING = st.lists(st.sampled_from(CHARACTERS), max_size=40).map(lambda parts: f'"{"".join(parts)}"')
KEY = st.one_of(st.sampled_from(['"a"', '"b"', '""', r'"\"c"', r'"\\"', '"[,"']), STRING)
SCALAR = st.one_of(st.sampled_from(["1", "-1.5e3", "null", "true", '""']), STRING)
TOKENS = [
    *"[]{},:1",
    '"',
    "\\",
    " ",
    ".5",
    "null",
    '"a"',
    '"a":',
    '"x":[',
    '"y":{',
    ',"a":',
    "[1,",
    "[]",
    '"a[',
    r'"\""',
]


def joined(brackets: str, items: list[str], spaces: list[str]) -> str:
    return (
        brackets[0] + ",".join(space + item + space for item, space in zip(items, spaces, strict=False)) + brackets[1]
    )


def containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaces = st.lists(SPACE, min_size=8, max_size=8)
    lists = st.builds(joined, st.just("[]"), st.lists(values, max_size=8), spaces)
    members = st.tuples(KEY, SPACE, values).map(lambda parts: f"{parts[0]}{parts[1]}:{parts[1]}{parts[2]}")
    return st.one_of(lists, st.builds(joined, st.just("{}"), st.lists(members, max_size=8), spaces))


CHANGE = st.tuples(st.integers(0), st.integers(0, 2), st.sampled_from(TOKENS))
JSON = st.recursive(SCALAR, containers, max_leaves=30)


@contextmanager
def small_pieces(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "LARGE_BODY", size)
        patch.setattr(json_reader, "PIECE", size)
        patch.setattr(json_reader, "STRING_PART", 17 + size)
        yield


def read(parse: Any, text: bytes) -> str:
    """The value, with the order of its keys, or that there is none."""
    try:
        return repr(parse(text))
    except (JsonError, orjson.JSONDecodeError):
        return "an error"


@given(JSON, st.integers(1, 40))
@THOROUGH
def test_pieces_make_what_the_whole_makes(text: str, size: int) -> None:
    with small_pieces(size):
        assert repr(parse_json(text.encode())) == repr(orjson.loads(text))


@given(
    JSON,
    st.lists(st.tuples(st.integers(0), st.integers(0, 2), st.sampled_from(TOKENS)), max_size=3),
    st.integers(1, 40),
)
@THOROUGH
def test_what_is_wrong_is_wrong_in_pieces(text: str, changes: list[tuple[int, int, str]], size: int) -> None:
    for at, num_left_out, token in changes:
        begin = at % (len(text) + 1)
        text = text[:begin] + token + text[begin + num_left_out :]
    with small_pieces(size):
        assert read(parse_json, text.encode()) == read(orjson.loads, text.encode())


@given(st.lists(st.sampled_from(TOKENS), max_size=20).map("".join), st.integers(1, 40))
@example("[,1]", 1)
@example("[1,,2]", 1)
@example("[[1].5]", 1)
@example("[1,2,]", 1)
@example('{"a":[1,2],}', 1)
@example('{"a":1,"b":2,"a":[1,2,3],"a":4}', 1)
@example("[1,2}", 1)
@example("[1,2]]", 1)
@example("[1,2", 1)
@example("[1,2] 3", 1)
@THOROUGH
def test_tokens_in_any_order_are_read_in_pieces_as_a_whole(text: str, size: int) -> None:
    with small_pieces(size):
        assert read(parse_json, text.encode()) == read(orjson.loads, text.encode())


@given(st.binary(max_size=30), JSON, st.integers(0), st.integers(1, 40))
@THOROUGH
def test_bytes_that_are_no_text_are_an_error(data: bytes, text: str, at: int, size: int) -> None:
    whole = text.encode()
    begin = at % (len(whole) + 1)
    whole = whole[:begin] + data + whole[begin:]
    with small_pieces(size):
        assert read(parse_json, whole) == read(orjson.loads, whole)


@pytest.mark.parametrize("character", CHARACTERS)
def test_long_strings_are_read_in_parts(character: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    parse = orjson.loads

    def note(text: bytes) -> Any:
        sizes.append(len(text))
        return parse(text)

    for first in range(3):
        text = f'{{"{"k" * first}":"{character * 300_000}","b":["{character * 200_000}"]}}'.encode()
        monkeypatch.setattr(orjson, "loads", note)
        found = parse_json(text)
        monkeypatch.setattr(orjson, "loads", parse)
        assert found == parse(text)
    assert max(sizes) <= json_reader.PIECE + 100


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1,\n2,\n"é", x]}',
        '{"a": [1,\n2,\n"éé"',
        '{"a": [1,\n2, 3}',
        '{"a": [1,\n2, 3]}\n x',
        '{"a": "é", "b": nan}',
    ],
)
def test_errors_say_where(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError) as whole:
        orjson.loads(text)
    for size in range(1, 30):
        with small_pieces(size), pytest.raises(JsonError) as in_pieces:
            parse_json(text.encode())
        assert (in_pieces.value.line, in_pieces.value.column) == (whole.value.lineno, whole.value.colno), size
