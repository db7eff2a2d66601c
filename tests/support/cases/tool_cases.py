"""Texts in the formats of tool calls: whole calls, texts that only resemble them, and texts that take long to read."""

from __future__ import annotations

PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
LLAMA_PARIS = PARIS.replace("arguments", "parameters")
CITY = ("weather", '{"city": "Paris"}')
PING = ("ping", "{}")
TRICKY = (
    '{"city": "a\\"}</tool_call>[TOOL_CALLS]<|python_tag|> \\\\", "n": [{"x": {}}, [1.5e-3, null, true]], "é": "🙂"}'
)
V3_BEGIN = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
HARMONY_HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
HARMONY_PARIS = f'{HARMONY_HEAD}{{"city": "Paris"}}<|call|>'
V31_PARIS = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
# Every kind of literal that Python has and JSON has an equal for.
PYTHONIC = (
    r"""a='it\'s "x"\n\x41\u00e9\U0001F642\d', b="", c='''long "one's"\n''', d=[1, -2.50, 0x1F, 1_000, True, null,], """
    r"""e={'k': (None, false), "l": {}, "m": [[], {}]}, f=1e3"""
)
PYTHONIC_JSON = (
    r"""{"a": "it's \"x\"\nA\u00e9🙂\\d", "b": "", "c": "long \"one's\"\n", "d": [1, -2.5, 31, 1000, true, null], """
    r""""e": {"k": [null, false], "l": {}, "m": [[], {}]}, "f": 1000.0}"""
)

# format, text, content, calls
CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("deepseek_v3", "just text < ", "just text < ", []),
    (
        "deepseek_v3",
        f'<｜tool▁calls▁begin｜>{V3_BEGIN}weather\n```json\n{{"city": "Paris"}}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        None,
        [CITY],
    ),
    (
        "deepseek_v3",
        f"I look.\n<｜tool▁calls▁begin｜>{V3_BEGIN}weather\n```json\n{TRICKY}\n```<｜tool▁call▁end｜>\n"
        f"{V3_BEGIN}ping\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("weather", TRICKY), PING],
    ),
    ("deepseek_v3", f'{V3_BEGIN}weather\n{{"city": "Paris"}}', None, [CITY]),
    ("deepseek_v31", "just text", "just text", []),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V31_PARIS}<｜tool▁calls▁end｜>", None, [CITY]),
    (
        "deepseek_v31",
        f"Yes.<｜tool▁calls▁begin｜>{V31_PARIS}{V31_PARIS}<｜tool▁calls▁end｜> so",
        "Yes. so",
        [CITY] * 2,
    ),
    ("gemma", "just text <start", "just text <start", []),
    (
        "gemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
        None,
        [CITY],
    ),
    ("gemma", "I look.\n<start_function_call>call:ping{}<end_function_call> so", "I look. so", [PING]),
    ("gemma", "<start_function_call>call:ping{}<start_function_call>call:ping{}", None, [PING] * 2),
    (
        "gemma",
        "<start_function_call>call:ping{}<end_function_call><start_function_response>response:ping{a:1}",
        None,
        [PING],
    ),
    (
        "gemma",
        '<start_function_call>call:other{a:<escape>x, {y} "z"<escape>, n: -2.5 ,t:true,'
        'l:[<escape>a,]<escape>,{k:<escape>}<escape>,m:[1,null]}],s:["b\\"]"],w:word}<end_function_call>',
        None,
        [
            (
                "other",
                '{"a": "x, {y} \\"z\\"", "n": -2.5, "t": true, '
                '"l": ["a,]",{"k":"}","m":[1,null]}], "s": ["b\\"]"], "w": "word"}',
            )
        ],
    ),
    ("glm4", "just text\n{}", "just text\n{}", []),
    ("glm4", 'weather\n{"city": "Paris"}', None, [CITY]),
    ("glm4", '\nweather\n{"city": "Paris"}\n', None, [CITY]),
    ("glm4", f"weather\n{TRICKY}<|assistant|>ping\n{{}}\nping\n{{}}", None, [("weather", TRICKY), PING, PING]),
    ("glm4", 'weather\n{"city": "Paris"}\nThat is all', "That is all", [CITY]),
    ("glm45", "just text <b>", "just text <b>", []),
    (
        "glm45",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        None,
        [CITY],
    ),
    (
        "glm45",
        'On it.<tool_call>weather<arg_key>city</arg_key><arg_value>\n a < b "x"\n</arg_value><arg_key>days</arg_key>'
        "<arg_value>3</arg_value></tool_call>",
        "On it.",
        [("weather", r'{"city": "\n a < b \"x\"\n", "days": 3}')],
    ),
    ("glm45", "<tool_call>ping</tool_call>\n<tool_call>ping\n</tool_call>", None, [PING] * 2),
    (
        "glm45",
        "<tool_call>weather<arg_key>tags</arg_key><arg_value>[1]</arg_value>",
        None,
        [("weather", '{"tags": [1]}')],
    ),
    ("harmony", "<|channel|>final<|message|>just text<|return|>", "just text", []),
    ("harmony", "just text <|chan", "just text <|chan", []),
    ("harmony", HARMONY_PARIS, None, [CITY]),
    ("harmony", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY_PARIS}", None, [CITY]),
    (
        "harmony",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_HEAD}{TRICKY}",
        "I look.",
        [("weather", TRICKY)],
    ),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', None, [CITY]),
    ("harmony", "<|channel|>commentary to=functions.ping<|message|><|call|>", None, [PING]),
    (
        "harmony",
        "<|channel|>commentary to=ping<|message|>{}<|end|><|start|>assistant to=functions.weather<|channel|>commentary"
        '<|message|>{"city": "Paris"}<|call|> more',
        None,
        [PING, CITY],
    ),
    ("granite", "just text", "just text", []),
    ("granite", f"<|tool_call|>[{PARIS}]", None, [CITY]),
    ("granite", f"<tool_call>[{PARIS}, {PARIS}]</tool_call>", None, [CITY] * 2),
    ("granite", f"Sure.<function_call> {PARIS}", "Sure.", [CITY]),
    ("granite", f"<|tool_call|>{PARIS} so", "so", [CITY]),
    ("internlm", "just text", "just text", []),
    ("internlm", f"<|action_start|><|plugin|>\n{LLAMA_PARIS}<|action_end|>", None, [CITY]),
    (
        "internlm",
        f"I look.<|action_start|><|plugin|>{PARIS}<|action_end|>\n<|action_start|> <|plugin|>{PARIS}",
        "I look.",
        [CITY] * 2,
    ),
    ("phi4_mini", "just text, functools.reduce", "just text, functools.reduce", []),
    ("phi4_mini", f"<|tool_call|>[{PARIS}]<|/tool_call|>", None, [CITY]),
    ("phi4_mini", f"functools[{PARIS}, {PARIS}]", None, [CITY] * 2),
    ("phi4_mini", f"Sure. <|tool_call|>{PARIS}<|/tool_call|>\nSo", "Sure.\nSo", [CITY]),
    ("xlam", "[1] is a citation", "[1] is a citation", []),
    ("xlam", f"[{PARIS}]", None, [CITY]),
    ("xlam", f"\n[\n{PARIS},\n{PARIS}\n]\n", None, [CITY] * 2),
    ("llama4_pythonic", "[just text]", "[just text]", []),
    ("llama4_pythonic", '[weather(city="Paris")]', None, [CITY]),
    ("llama4_pythonic", "<|python_start|>[weather(city='Paris'), ping()]<|python_end|>", None, [CITY, PING]),
    ("llama4_pythonic", "Sure.<|python_start|>weather(city='Paris')<|python_end|>", "Sure.", [CITY]),
    ("llama4_pythonic", f"[weather({PYTHONIC})]", None, [("weather", PYTHONIC_JSON)]),
    ("olmo3", "just f(x=1) text", "just f(x=1) text", []),
    ("olmo3", "<function_calls>\nweather(city='Paris')\n</function_calls>", None, [CITY]),
    ("olmo3", 'I look.<function_calls>weather(city="Paris")\nping()\n</function_calls>', "I look.", [CITY, PING]),
    ("olmo3", f"<function_calls>weather( {PYTHONIC} , )</function_calls>", None, [("weather", PYTHONIC_JSON)]),
]

# Texts that only resemble calls: given out as they are.
MALFORMED = [
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek_v3", f"{V3_BEGIN}not a name\n```json\n{{}}"),
    ("deepseek_v3", f"{V3_BEGIN}{'x' * 300}\n{{}}"),
    ("deepseek_v3", f"{V3_BEGIN}weather\n```json\n[1]"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weather {}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weather<｜tool▁sep"),
    ("gemma", "<start_function_call>ping{}"),
    ("gemma", "<start_function_call>call:weather is fine"),
    ("gemma", "<start_function_call>call:not a name{}"),
    ("gemma", f"<start_function_call>call:{'x' * 300}"),
    ("glm4", "weather"),
    ("glm4", "weather\nis fine"),
    ("glm4", 'weathers\n{"city": "Paris"}'),
    ("glm4", 'The call:\nweather\n{"city": "Paris"}'),
    ("glm4", "weather\n{1}"),
    ("glm45", "<tool_call>not a name<arg_key>"),
    ("glm45", "<tool_call>weather <b>"),
    ("glm45", "<tool_call>weather"),
    ("glm45", f"<tool_call>{'x' * 300}"),
    ("granite", "<|tool_call|>none"),
    ("granite", "<|tool_call|>[]"),
    ("granite", '<tool_call>[{"name": 5}]'),
    ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ("internlm", "<|action_start|><|plug"),
    ("phi4_mini", "functools [1]"),
    ("phi4_mini", "<|tool_call|>"),
    ("xlam", "[]"),
    ("xlam", '[{"name": "Bob", "arguments": {}}]'),
    ("xlam", '[{"name": "weather"}]'),
    ("xlam", f"Such as [{PARIS}]"),
    ("llama4_pythonic", "[unheard_of(a=1)]"),
    ("llama4_pythonic", "[weather('Paris')]"),
    ("llama4_pythonic", "[weather]"),
    ("llama4_pythonic", "[[ping()]]"),
    ("llama4_pythonic", "Such as [ping()]"),
    ("llama4_pythonic", "<|python_start|>print(1)"),
    ("olmo3", "<function_calls></function_calls>"),
    ("olmo3", "<function_calls>f(1)</function_calls>"),
    ("olmo3", f"<function_calls>{'x' * 300}(a=1)"),
    ("olmo3", "<function_calls>\nweather("),
]

# Pieces of random texts.
ALPHABET = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>"),
    *("<start_function_call>call:", "<end_function_call>", "<escape>", "call:ping{", "city:", "}", ","),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "ping\n", "<|tool_call|>", "<|/tool_call|>", "</"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<function_calls>", "</function_calls>", "functools"),
    *("<|python_start|>", "<|python_end|>", "ping(", "city=", "'", ")", "[ping(", "None", "(", "1.5", "\\u0041", "'''"),
]

# Texts that have made parsers of this kind take quadratic or exponential time, each a prefix and what is repeated.
HOSTILE = [
    ("deepseek_v3", "", "<｜tool▁calls▁begin｜>"),
    ("deepseek_v3", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"),
    ("deepseek_v3", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}```"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>", " \n"),
    ("deepseek_v31", "", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{x", "<｜tool▁call▁end"),
    ("gemma", "", "<start_function_call>"),
    ("gemma", "", "<start_function_call>call:ping{}"),
    ("gemma", "<start_function_call>call:ping{", "a:1,"),
    ("gemma", "<start_function_call>call:ping{a:", "["),
    ("gemma", "<start_function_call>call:ping{a:[", "<escape>"),
    ("gemma", "<start_function_call>call:ping{a:[", "{b:"),
    ("gemma", '<start_function_call>call:ping{a:["', "\\"),
    ("gemma", "<start_function_call>call:ping{a:<escape>", "<escap"),
    ("glm4", "", "ping\n"),
    ("glm4", "", "ping\n{}\n"),
    ("glm4", "ping\n", "\n"),
    ("glm4", "", "ping\n{}<|assistant|"),
    ("glm45", "", "<tool_call>"),
    ("glm45", "", "<tool_call>ping"),
    ("glm45", "", "<tool_call>ping<arg_key>"),
    ("glm45", "<tool_call>weather", "<arg_key>city</arg_key>"),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>", "</arg_value"),
    ("glm45", "<tool_call>weather", "<arg_key>tags</arg_key><arg_value>[</arg_value>"),
    ("glm45", "<tool_call>weather<arg_key>", "x"),
    ("harmony", "", "<|channel|>"),
    ("harmony", "", " \n"),
    ("harmony", "", "<|channel|>analysis<|message|>x<|end|>"),
    ("harmony", "", "<|start|>assistant<|channel|>analysis<|message|><|"),
    ("harmony", "<|channel|>final<|message|>", "<|chan"),
    ("harmony", "", "<|channel|>commentary to=functions.ping<|message|>{}<|end|><|start|>assistant"),
    ("granite", "", "<|tool_call|>["),
    ("granite", "<|tool_call|>[", '{"name": "ping"},'),
    ("granite", "", '<|tool_call|>{"name": "ping"}</tool_call'),
    ("internlm", "", "<|action_start|>"),
    ("internlm", "", '<|action_start|><|plugin|>{"name": "ping"}<|action_end'),
    ("phi4_mini", "", "functools"),
    ("phi4_mini", "functools[", '{"name": "ping"},'),
    ("xlam", "", "["),
    ("xlam", "[", '{"name": "ping", "arguments": {}},'),
    ("llama4_pythonic", "", "["),
    ("llama4_pythonic", "[", "ping(),"),
    ("llama4_pythonic", "", "<|python_start|>[ping("),
    ("llama4_pythonic", "[ping(a=", "["),
    ("llama4_pythonic", "[ping(a='", "\\\\"),
    ("llama4_pythonic", "[ping(a='''", "''\\u"),
    ("llama4_pythonic", "[ping(a=", "1"),
    ("llama4_pythonic", "[ping(a=1", " "),
    ("llama4_pythonic", "[ping(", "a=1,"),
    ("llama4_pythonic", "[ping(a=[", "{'a': 1.5}, "),
    ("olmo3", "", "<function_calls>"),
    ("olmo3", "", "<function_calls>ping()"),
    ("olmo3", "<function_calls>", "ping()\n"),
    ("olmo3", "<function_calls>", "x"),
    ("olmo3", "<function_calls>ping(a=1 b", "</function_calls"),
]

# Formats, and what gives each away in a chat template.
TEMPLATES: list[tuple[str, str]] = [
    ("deepseek_v3", "{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json"),
    ("deepseek_v31", "{{ tools }}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    ("gemma", "{{ tools }}<start_function_call>call:f{}<end_function_call>"),
    ("glm4", "[gMASK]<sop>{{ tools }}在调用上述函数时, Json"),
    ("glm45", "[gMASK]<sop>{{ tools }}<tool_call>{function-name}\n<arg_key>"),
    ("granite", "{{ tools }} respond with <|tool_call|> followed by a JSON list of tools used."),
    ("granite", "{{ tools }}<function_call> {}"),
    ("harmony", "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>"),
    ("internlm", "{{ tools }}<|action_start|><|plugin|>"),
    ("phi4_mini", "{{ tools }}<|tool_call|>{}<|/tool_call|>"),
    ("phi4_mini", "{{ tools }} formatted as functools[{}]"),
    ("xlam", """{{ tools }}[{"name": "tool_call_name", "arguments": {}}]"""),
    ("llama4_pythonic", "{{ tools }} [func_name1(param1=value1), func_name2(...)]"),
    ("olmo3", "{{ tools }}<function_calls>f()</function_calls>"),
]
