"""Tool parsers: every format, cut anywhere, malformed anyhow."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any, get_args

import pytest

from tessera.app.generate.reader import CompletionReader
from tessera.app.model_settings import ToolParserName
from tessera.app.tools.formats.registry import FORMATS, choose_format
from tessera.app.tools.parts import CallStart
from tessera.engine.contract.errors import ConfigError
from tests.support.cases import tool_cases
from tests.support.cases.tool_cases import CITY, LLAMA_PARIS, PARIS, TRICKY
from tests.support.cases.tool_texts import Message, message_of

SEED = 20
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"enum": [1, 2, "high"]},
        },
    },
    "ping": {},
}


def read(name: str, text: str, pieces: list[str] | None = None, *, cut: bool = False, **options: Any) -> Message:
    """The message of a text, in pieces that may be empty."""
    parser = FORMATS[name].parser(TOOLS, **options)  # type: ignore[index]
    reader = CompletionReader(None, parser)
    parts = []
    for piece in pieces if pieces is not None else [text]:
        reader.read_text(piece)
        parts += reader.take_parts()
    reader.finish(cut=cut)
    return message_of(parts + reader.take_parts())


# format, text, content, calls
CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    *tool_cases.CASES,
    ("hermes", "just text", "just text", []),
    ("hermes", f"<tool_call>{PARIS}</tool_call>", None, [CITY]),
    ("hermes", f"\n<tool_call>\n{PARIS}\n</tool_call>\n", None, [CITY]),
    ("hermes", f"I look. \n<tool_call>\n{PARIS}\n</tool_call>", "I look.", [CITY]),
    ("hermes", f"Look: \n<tool_call>{PARIS}</tool_call> done", "Look: done", [CITY]),
    ("hermes", f"<tool_call>{PARIS}</tool_call>" * 3, None, [CITY] * 3),
    ("hermes", f"<tool_call>{PARIS}\n{PARIS}</tool_call> done", " done", [CITY] * 2),
    ("hermes", f"<tool_call>{PARIS}", None, [CITY]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call>', None, [("weather", TRICKY)]),
    ("hermes", f'<tool_call>{{"arguments": {TRICKY}, "name": "weather"}}</tool_call>', None, [("weather", TRICKY)]),
    ("hermes", '<tool_call>{"name": "ping"}</tool_call>', None, [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', None, [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("ping", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": [1, {}], "name": "ping", "arguments": {}}</tool_call>', None, [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": {}, "arguments": {"a": 1}}', None, [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', None, [("unheard_of", "{}")]),
    ("qwen3_coder", "just <b>text</b>", "just <b>text</b>", []),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        "qwen3_coder",
        '<function=weather><parameter=city>\n\nline 1\n"line" 2\n\n</parameter></function>',
        None,
        [("weather", '{"city": "\\nline 1\\n\\"line\\" 2\\n"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=share>1</parameter><parameter=exact>True</parameter>"
        '<parameter=tags>\n[1, {"a": 2}]\n</parameter><parameter=unit>12</parameter></function></tool_call>',
        None,
        [("weather", '{"share": 1, "exact": true, "tags": [1, {"a": 2}], "unit": "12"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=unit>None</parameter><parameter=days>three</parameter>"
        "<parameter=level>2</parameter><parameter=other>7</parameter></function></tool_call>",
        None,
        [("weather", '{"unit": null, "days": "three", "level": 2, "other": "7"}')],
    ),
    ("qwen3_coder", "<tool_call><function=ping></function></tool_call>" * 2, None, [("ping", "{}")] * 2),
    ("qwen3_coder", "<tool_call><function=ping></function><function=ping></function>", None, [("ping", "{}")] * 2),
    ("llama3_json", "just text", "just text", []),
    ("llama3_json", LLAMA_PARIS, None, [CITY]),
    ("llama3_json", f"\n{LLAMA_PARIS}\n", None, [CITY]),
    ("llama3_json", f"<|python_tag|>{LLAMA_PARIS}; {LLAMA_PARIS}", None, [CITY] * 2),
    ("llama3_json", f"Let me see. <|python_tag|>{PARIS}", "Let me see.", [CITY]),
    ("llama3_json", f'{{"type": "function", {LLAMA_PARIS[1:]}', None, [CITY]),
    ("mistral", "just text [1]", "just text [1]", []),
    ("mistral", f"[TOOL_CALLS][{PARIS}]", None, [CITY]),
    ("mistral", f"Yes. [TOOL_CALLS] [{PARIS}, {PARIS}]", "Yes.", [CITY] * 2),
    ("mistral", f"[TOOL_CALLS]{PARIS}", None, [CITY]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', None, [CITY]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]123abcXYZ[ARGS]{"city": "Paris"}', None, [CITY]),
    ("mistral", 'On it.[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]ping[ARGS]{}', "On it.", [CITY, ("ping", "{}")]),
]

# Texts that only resemble calls: given out as they are.
MALFORMED = [
    *tool_cases.MALFORMED,
    ("hermes", "<tool_call>{bad}</tool_call>"),
    ("hermes", "a <tool_call> b <tool_call> c </tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "not a name", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {city: 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argu'),
    ("hermes", f'<tool_call>{{"name": "{"x" * 200}<tool_call>", "arguments": {{}}}}</tool_call>'),
    ("hermes", "an unfinished <tool_c"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "<tool_call><function=not a name></function></tool_call>"),
    ("qwen3_coder", f"<function={'x' * 200}>"),
    ("qwen3_coder", "<tool_call>\n<function=wea"),
    ("qwen3_coder", "<tool_call>\n<funct"),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '{"name": "weather", "age": 3}'),
    ("llama3_json", '{"name": "unheard_of", "parameters": {"city": "Paris"}}'),
    ("llama3_json", '{"name": "weather"}'),
    ("llama3_json", '{"answer": {"name": "weather", "parameters": {}}}'),
    ("llama3_json", f"Such as {LLAMA_PARIS}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] nothing here"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{1}"),
    ("mistral", f"[TOOL_CALLS]{'x' * 300}{{}}"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_reads(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert read(name, text) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    assert read(name, text) == (text, [])


@pytest.mark.parametrize(("name", "text"), [*((case[0], case[1]) for case in CASES), *MALFORMED])
def test_the_result_does_not_depend_on_where_the_text_is_cut(name: str, text: str) -> None:
    rng = Random(SEED)
    print("seed", SEED)
    for cut in (False, True):
        whole = read(name, text, cut=cut)
        assert read(name, text, list(text), cut=cut) == whole
        for _ in range(20):
            places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
            ends = [0, *places, len(text)]
            pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
            assert read(name, text, pieces, cut=cut) == whole, pieces


def test_random_texts_of_markup_are_read_alike_however_cut_and_never_lost() -> None:
    rng = Random(SEED)
    print("seed", SEED)
    alphabet = ["<tool_call>", "</tool_call>", "<function=", "ping>", "<parameter=city>", "</parameter>", "</function>"]
    alphabet += ['{"name": ', '"ping"', ', "arguments": ', ', "parameters": ', '{"a": ', "1", "}", "]", "[", ",", " "]
    alphabet += tool_cases.ALPHABET
    alphabet += ["[TOOL_CALLS]", "ping", "[ARGS]", "<|python_tag|>", ";", "\n", '"', "\\", "word", "<", "{}", "tru"]
    for name in FORMATS:
        for _ in range(150):
            text = "".join(rng.choices(alphabet, k=rng.randint(1, 24)))
            whole = read(name, text)
            assert read(name, text, list(text)) == whole, (name, text)
            if not whole[1]:
                assert whole[0] == text, (name, text)


def test_arguments_that_break_off_stay_a_call() -> None:
    start = '<tool_call>{"name": "weather", "arguments": {"city": '
    assert read("hermes", start + '"Par', cut=True) == (None, [("weather", '{"city": "Par')])
    assert read("hermes", start + "tru}}</tool_call> so") == (" so", [("weather", '{"city": tru}}')])
    assert read("mistral", '[TOOL_CALLS]ping[ARGS]{"a": x}') == (None, [("ping", '{"a": x}')])
    coder = "<tool_call><function=weather><parameter=city>Par"
    assert read("qwen3_coder", coder, cut=True) == (None, [("weather", '{"city": "Par')])
    assert read("qwen3_coder", coder) == (None, [("weather", '{"city": "Par"}')])
    assert read("qwen3_coder", "<function=ping>oh no") == ("oh no", [("ping", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_in_pieces_and_names_once(name: Any) -> None:
    text = next(text for form, text, _, calls in CASES if form == name and len(calls) == 1)
    reader = CompletionReader(None, FORMATS[name].parser(TOOLS))
    steps = []
    for character in text:
        reader.read_text(character)
        steps.append(reader.take_parts())
    parts = [part for step in steps for part in step]
    assert len([part for part in parts if isinstance(part, CallStart)]) == 1
    assert max(map(len, steps)) <= 2
    assert len([step for step in steps if step]) > 5, "arguments are not held back until they are whole"


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_enough_where_calls_are_not_parallel(name: str) -> None:
    text, calls = next((text, calls) for form, text, _, calls in CASES if form == name and len(calls) > 1)
    assert read(name, text, max_calls=1)[1] == calls[:1]
    assert read(name, text, list(text), max_calls=1)[1] == calls[:1]


def test_ids_suit_the_templates_that_see_them_again() -> None:
    def first_id(name: str, text: str) -> str:
        parser = FORMATS[name].parser(TOOLS)  # type: ignore[index]
        parser.read_text(text)
        start = parser.take_parts()[0]
        assert isinstance(start, CallStart)
        return start.id

    hermes = {first_id("hermes", f"<tool_call>{PARIS}") for _ in range(9)}
    assert len(hermes) == 9
    assert all(call_id.startswith("call_") for call_id in hermes)
    mistral = first_id("mistral", f"[TOOL_CALLS][{PARIS}]")
    assert len(mistral) == 9, "Mistral's templates refuse other lengths"
    assert mistral.isalnum()


HERMES_TEMPLATE = "{{ tools }}<tool_call>{}</tool_call>"
TEMPLATES: list[tuple[str, str]] = [
    *tool_cases.TEMPLATES,
    ("hermes", HERMES_TEMPLATE),
    ("qwen3_coder", "{{ tools }}<tool_call><function=f><parameter=p>"),
    ("llama3_json", "{{ tools }}<|python_tag|>"),
    ("llama3_json", """{{ tools }}{{ '"parameters": ' }}"""),
    ("mistral", "{{ tools }}[TOOL_CALLS]"),
    ("mistral", "{{ tools }}[TOOL_CALLS]f[ARGS]"),
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_auto_finds_the_format_in_the_template(name: ToolParserName, template: str) -> None:
    found = choose_format("auto", ["{{ messages }}", template])
    assert found is not None
    assert found.parser is FORMATS[name].parser


def test_every_format_can_be_asked_for_by_name() -> None:
    assert {"auto", "none", *FORMATS} == set(get_args(ToolParserName))


def test_no_format_without_tools_in_the_template() -> None:
    assert choose_format("auto", ["{{ messages }} <tool_call>"]) is None
    assert choose_format("auto", []) is None
    assert choose_format("none", [HERMES_TEMPLATE]) is None
    assert choose_format("mistral", [HERMES_TEMPLATE]) is FORMATS["mistral"]
    with pytest.raises(ConfigError, match="--tool-call-parser hermes: the model has no chat template that shows"):
        choose_format("hermes", ["{{ messages }}"])
