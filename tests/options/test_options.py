"""Options: declared by a field, read from the command line, the environment and a file, checked and documented."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import pytest

from tessera.options.command_options import CommandOptions, GivenOptions
from tessera.options.declaration import Option, check_fields, declared_options
from tessera.options.errors import OptionError
from tessera.options.parser import Parser
from tessera.options.reference import render_reference


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    level: Annotated[Literal["low", "high"], Option("how much", group="main")] = "low"


class Engine(Shared, frozen=True, kw_only=True):
    folder: str
    size: Annotated[int, Option("blocks", group="main", metavar="N", low=1, high=64, default="by device")] = 0
    share: Annotated[float | None, Option("of memory", group="main", low=0, high=1)] = None
    cache: Annotated[bool, Option("keep it", group="main")] = True
    eager: Annotated[bool, Option("at once", group="main", aliases=("hasty",))] = False


class App(Shared, frozen=True, kw_only=True):
    names: Annotated[tuple[str, ...], Option("of the model", group="app", name="name")] = ()
    key: Annotated[tuple[str, ...], Option("secret", group="app", pattern=r"\w+", form="a word", secret=True)] = ("k",)
    limits: Annotated[tuple[float, ...], Option("<b>", group="app", low=0, high=9, repetition="commas")] = (1.0, 2.5)
    words: Annotated[tuple[str, ...], Option("several", group="app", repetition="words")] = ()
    extra: Annotated[dict[str, Any], Option("fields", group="app")] = {}
    file: Annotated[Path | None, Option("to read", group="app")] = None
    sweep: Annotated[float | None, Option("or not", group="app", low=0, high=1, bare=0.5)] = None
    rate: Annotated[float, Option("a second", group="app", low=0)] = math.inf
    ask: Annotated[bool | None, Option("first", group="app", default="where useful")] = None
    model: Annotated[str | None, Option("to serve", group="app", positional=True)] = None


COMMAND = CommandOptions("APP_", (Engine, App), other_variables=("APP_HOME", "APP_TOOL_"), groups=("app", "main"))


def read(*arguments: str, file: str | None = None, **environment: str) -> GivenOptions:
    parser = Parser(prog="app")
    COMMAND.add_to(parser)
    if file is not None:
        arguments = (*arguments, "--config", file)
    return COMMAND.read(parser.parse_args(arguments), environment)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Text -> the path of a file with it."""

    def write(text: str) -> str:
        path = tmp_path / "app.yaml"
        path.write_text(text)
        return str(path)

    return write


GIVEN = {
    "level": "high",
    "size": 3,
    "share": 0.001,
    "cache": False,
    "eager": True,
    "names": ("1.10", "b"),
    "key": ("s3cret",),
    "limits": (3.0, 4.5),
    "words": ("x", "y"),
    "extra": {"top_k": 7, "deep": {"a": [1, None]}},
    "file": Path("a b.json"),
    "sweep": 0.25,
    "rate": math.inf,
    "ask": False,
    "model": "org/name",
}
COMMAND_LINE = (
    *("org/name", "--level", "high", "--size", "3", "--share", "1e-3", "--no-cache", "--hasty", "--name", "1.10"),
    *("--name", "b", "--key=s3cret", "--limits", "3,4.5", "--extra", '{"top_k": 7, "deep": {"a": [1, null]}}'),
    *("--file", "a b.json", "--sweep", "0.25", "--rate", "inf", "--no-ask", "--words", "x", "y"),
)
ENVIRONMENT = {
    "APP_LEVEL": "high\n",
    "APP_SIZE": "3",
    "APP_SHARE": "1e-3",
    "APP_CACHE": "false",
    "APP_EAGER": "Yes",
    "APP_NAME": "1.10, b,",
    "APP_KEY": "s3cret",
    "APP_LIMITS": "3,4.5",
    "APP_WORDS": "x,y",
    "APP_EXTRA": '{"top_k": 7, "deep": {"a": [1, null]}}',
    "APP_FILE": "a b.json",
    "APP_SWEEP": "0.25",
    "APP_RATE": "inf",
    "APP_ASK": "0",
    "APP_MODEL": "org/name",
}
FILE = """
model: org/name
level: high
size: 3
share: 1e-3
cache: off
hasty: true
name: [1.10, b]
key: s3cret
limits: [3, 4.5]
words: x, y
extra: {top_k: 7, deep: {a: [1, null]}}
file: a b.json
sweep: 0.25
rate: inf
ask: no
"""


@pytest.mark.parametrize("source", ["command line", "environment", "file"])
def test_every_kind_of_option_from_every_source(source: str, config: Any) -> None:
    if source == "command line":
        given = read(*COMMAND_LINE)
    elif source == "environment":
        given = read(**ENVIRONMENT)
    else:
        given = read(file=config(FILE))
    assert {name: given.value(name) for name in GIVEN} == GIVEN
    assert {given.source(name) for name in GIVEN} == {source}
    engine, app = given.make(Engine, folder="f"), given.make(App)
    assert engine == Engine(
        folder="f", **cast(Any, {name: GIVEN[name] for name in ("level", "size", "share", "cache", "eager")})
    )
    assert (app.level, app.names, app.extra) == ("high", ("1.10", "b"), GIVEN["extra"])


def test_without_anything_the_defaults_hold() -> None:
    given = read()
    assert given.make(Engine, folder="f") == Engine(folder="f")
    assert given.make(App) == App()
    assert {given.source(name) for name in GIVEN} == {"default"}


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(config: Any) -> None:
    path = config("size: 1\nlevel: high\neager: true\nname: [file]\nshare: 0.5")
    given = read("--size", "3", "--no-eager", file=path, APP_SIZE="2", APP_NAME="variable")
    assert [given.value(field) for field in ("size", "names", "share", "level", "eager", "cache")] == [
        3,
        ("variable",),
        0.5,
        "high",
        False,
        True,
    ]
    fields = ("size", "names", "share", "cache")
    assert [given.source(field) for field in fields] == ["command line", "environment", "file", "default"]
    assert [given.rank(field) for field in fields] == [0, 1, 2, 3]
    assert read(APP_CONFIG=path).value("share") == 0.5
    assert read(APP_CONFIG="/nowhere", file=path).value("share") == 0.5


def test_an_empty_variable_a_link_of_kubernetes_and_a_null_count_as_absent(config: Any) -> None:
    given = read(file=config("size: null\nshare:\nlevel: ~\n"), APP_SIZE="", APP_MODEL="tcp://10.0.0.1:80")
    assert {given.source(name) for name in GIVEN} == {"default"}
    assert read(file=config("")).source("size") == "default"


def test_other_variables_are_no_errors() -> None:
    read(APP_HOME="x", APP_TOOL_SIZE="x", APP_SERVICE_HOST="10.0.0.1", APP_PORT_80_TCP_PORT="80", APPS="x", SIZE="x")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"APP_SIZE": "65"}, "APP_SIZE: must be a whole number from 1 to 64, not '65'"),
        ({"APP_SIZE": "3.5"}, "APP_SIZE: must be a whole number from 1 to 64, not '3.5'"),
        ({"APP_SHARE": "nan"}, "APP_SHARE: must be a number from 0 to 1, not 'nan'"),
        ({"APP_LEVEL": "hihg"}, "APP_LEVEL: invalid choice: 'hihg' (choose from low, high); did you mean high?"),
        ({"APP_CACHE": "maybe"}, "APP_CACHE: must be true or false, not 'maybe'"),
        ({"APP_EXTRA": "[]"}, "APP_EXTRA: must be a JSON object, not '[]'"),
        ({"APP_KEY": "good,no-word"}, "APP_KEY: must be a word"),
        ({"APP_SIZES": "3"}, "APP_SIZES is not an option; did you mean APP_SIZE?"),
        ({"APP_HOMES": "3"}, "APP_HOMES is not an option; did you mean APP_HOME?"),
        ({"APP_NO_CACHE": "1"}, "APP_NO_CACHE is not an option: set APP_CACHE=false"),
    ],
)
def test_a_wrong_variable_is_one_sentence(variables: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError) as failure:
        read(**variables)
    assert str(failure.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nsize: 65", "{path} line 2: size: must be a whole number from 1 to 64, not '65'"),
        ("level: no", "{path} line 1: level: invalid choice: 'no' (choose from low, high)"),
        ("size: [1]", "{path} line 1: size: must be one value, not a list"),
        ("size: {a: 1}", "{path} line 1: size: must be one value, not a mapping"),
        ("name: [[a]]", "{path} line 1: name: must be a list of plain values"),
        ("extra: [1]", "{path} line 1: extra: must be one value, not a list"),
        ("extra: {a: 2020-01-01}", "{path} line 1: extra: must hold what JSON can"),
        ("key: ['a b']", "{path} line 1: key: must be a word"),
        ("size: 1\nlevel: low\nsize: 2", "{path} line 3: size is given twice, first in line 1"),
        ("eager: true\nhasty: false", "{path} line 2: hasty is given twice, first in line 1"),
        ("siez: 1", "{path} line 1: there is no option siez; did you mean size?"),
        ("quite-different: 1", "{path} line 1: there is no option quite-different"),
        ("no_cache: true", "{path} line 1: there is no option no_cache; write cache: false"),
        ("config: other.yaml", "{path} line 1: there is no option config"),
        ("? [size]\n: 1", "{path} line 1: a key must be the name of an option"),
        ("extra: &a {b: *a}", "{path} line 1: extra: must hold what JSON can"),
        ("size: " + "[" * 5000, "--config {path} is nested too deeply"),
        (
            "size: 1\n\x01",
            "--config {path} is not YAML: unacceptable character #x0001: special characters are not allowed",
        ),
        ("- size", "--config {path} must be a mapping from options to values, such as port: 8000"),
        ("a: b: c", "--config {path} line 1 is not YAML: mapping values are not allowed here"),
        ("a: !!python/object/apply:os.getpid []", "{path} line 1: there is no option a"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, message: str, config: Any) -> None:
    path = config(text)
    with pytest.raises(OptionError) as failure:
        read(file=path)
    assert str(failure.value) == message.format(path=path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--config /nowhere cannot be read: No such file or directory"):
        read(file="/nowhere")
    (tmp_path / "binary").write_bytes(b"size: \xff")
    with pytest.raises(OptionError, match="cannot be read: not UTF-8 text"):
        read(file=str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "65"], "app: argument --size: must be a whole number from 1 to 64, not '65'"),
        (["model", "--siez", "3"], "app: unrecognized arguments: --siez 3; did you mean --size?"),
        (["--siez=3"], "app: unrecognized arguments: --siez=3; did you mean --size?"),
        (["--no-cahce"], "app: unrecognized arguments: --no-cahce; did you mean --no-cache?"),
        (["--enable-cache"], "app: unrecognized arguments: --enable-cache; did you mean --cache?"),
        (["--model", "x"], "app: unrecognized arguments: --model; MODEL is given without --model"),
        (["model", "another"], "app: unrecognized arguments: another"),
        (["--key", "no word"], "app: argument --key: must be a word"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="app")
    COMMAND.add_to(parser)
    with pytest.raises(SystemExit) as ended:
        COMMAND.read_or_exit(parser, *parser.parse_known_args(arguments), {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{sentence} (see app --help)\n"


def test_an_option_without_a_value_where_it_has_one_by_itself() -> None:
    assert read("--sweep").value("sweep") == 0.5
    assert read("--sweep", "--size", "3").value("sweep") == 0.5


def test_structs_are_checked_by_the_same_rules() -> None:
    check_fields(Engine(folder="f"))
    check_fields(App(limits=(9.0,), extra={"a": 1}))
    for struct, message in (
        (Engine(folder="f", size=65), "--size must be a whole number from 1 to 64, not 65"),
        (Engine(folder="f", share=math.nan), "--share must be a number from 0 to 1, not nan"),
        (Engine(folder="f", level="x"), "--level must be one of low, high, not x"),  # type: ignore[arg-type]
        (App(limits=(1.0, 10.0)), "--limits must be a number from 0 to 9, not 10.0"),
        (App(key=("a b",)), "--key must be a word"),
    ):
        with pytest.raises(OptionError) as failure:
            check_fields(struct)
        assert str(failure.value) == message


def test_settings_cross_a_process_boundary_as_json() -> None:
    engine = read(*COMMAND_LINE).make(Engine, folder="f")
    assert msgspec.json.decode(msgspec.json.encode(engine), type=Engine) == engine


def test_an_option_that_is_declared_twice_is_refused() -> None:
    class Other(msgspec.Struct):
        size: Annotated[int, Option("another", group="main", low=1, high=2)] = 1

    with pytest.raises(TypeError, match="the option size is declared twice"):
        CommandOptions("APP_", (Engine, Other))


def test_the_reference_has_a_row_for_every_option() -> None:
    text = render_reference(COMMAND)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    names = {f"`{option.flag}`" for struct in (Engine, App) for option in declared_options(struct)} | {"`--config`"}
    assert {row.split(" ")[1].rstrip(",") for row in rows} == names
    assert len(rows) == len(names)
    assert text.index("### App") < text.index("### Main") < text.index("### Configuration")
    for row in (
        "| `--size` | `APP_SIZE` | a whole number from 1 to 64 | by device | blocks |",
        "| `--eager`, `--hasty`, `--no-eager` | `APP_EAGER` | true, false | `off` | at once |",
        "| `--level` | `APP_LEVEL` | `low`, `high` | `low` | how much |",
        "| `--limits` | `APP_LIMITS` | a number from 0 to 9; several | `1,2.5` | `<b>` |",
        "| `--key` | `APP_KEY` | a word; several |  | secret |",
        "| `MODEL` | `APP_MODEL` | `MODEL` |  | to serve |",
    ):
        assert row in rows
