"""Mistral's form of chats, by the version of a tekken.json: a template for folders that have the file and no template.

| version | system prompt | tools before the user's | calls | result |
| --- | --- | --- | --- | --- |
| v3 | in the last user's message | last message | [TOOL_CALLS] and a JSON list | an object with content and call_id |
| v7 | [SYSTEM_PROMPT], where it stands | last | as v3 | id[TOOL_CONTENT]content |
| v11 | as v7 | last | each [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} | as v7, in the order of the calls |
| v13 | as v7 | first | each [TOOL_CALLS]name[ARGS]{...} | content, in the order of the calls |
| v15 | as v7 | first, with the reasoning effort: none or high | as v13 | as v13 |

Messages of one role in a row are one. From v13 on reasoning is in [THINK] where the file has it. Sources:
tokens/tokenizers/instruct.py and protocol/instruct/normalize.py of mistralai/mistral-common. What it refuses is shown
nevertheless: calls beside text in v3, and ids of other lengths than 9, of which the last 9 characters are, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Container

VERSIONS = ("v3", "v7", "v11", "v13", "v15")
THINK_TOKENS = ("[THINK]", "[/THINK]")

_TEMPLATE = """\
{%- macro available_tools() %}
{%- if tools %}
{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}
{%- set about = tool.function %}
{%- set shown = {'name': about.name, 'description': about.description or '', 'parameters': about.parameters or {}} %}
{{- {'type': 'function', 'function': shown} | tojson ~ ('' if loop.last else ', ') }}
{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- endmacro %}
{%- macro result(message) %}
{%- set id, content = (message.tool_call_id or '')[-9:], message.content or '' %}
{{- '[TOOL_RESULTS]' }}@result@{{ '[/TOOL_RESULTS]' }}
{%- endmacro %}
{{- bos_token }}
{%- set place = namespace(tools=-1, call_ids=[], results=[]) %}
{%- for message in messages %}
{%- if message.role == 'user' and (loop.first or loop.previtem.role != 'user')@which_user@ %}
{%- set place.tools = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set begins = loop.first or loop.previtem.role != message.role %}
{%- set ends = loop.last or loop.nextitem.role != message.role %}
{%- if message.role == 'system' %}
@system@
{%- elif message.role == 'user' %}
{%- if not begins %}{{ '\\n\\n' }}
{%- elif loop.index0 == place.tools %}
{{- available_tools() }}@settings@{{ '[INST]' }}@preamble@
{%- else %}{{ '[INST]' }}
{%- endif %}
{{- message.content or '' }}
{%- if ends %}{{ '[/INST]' }}{% endif %}
{%- elif message.role == 'tool' %}
@tool@
{%- else %}
{%- if not begins and loop.previtem.content and message.content %}{{ '\\n\\n' }}{% endif %}
@thinking@
{{- (message.content or '').rstrip(' ') }}
{%- if message.tool_calls %}
{%- set place.call_ids = message.tool_calls | map(attribute='id') | list %}
@calls@
{%- endif %}
{%- if ends %}{{ eos_token }}{% endif %}
{%- endif %}
{%- endfor %}
"""

_SYSTEM = "{{- '[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]' }}"
_SYSTEM_OF_V3 = (
    "{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n') %}"
    "{%- if system %}{{ system ~ '\\n\\n' }}{% endif %}"
)

_IN_ORDER = "{{- result(message) }}"
_IN_ORDER_OF_CALLS = """\
{%- if begins %}
{%- set place.results = [] %}
{%- for other in messages[loop.index0:] %}
{%- if other.role != 'tool' %}{% break %}{% endif %}
{%- set place.results = place.results + [other] %}
{%- endfor %}
{%- for id in place.call_ids | unique(case_sensitive=true) %}
{%- for other in place.results if other.tool_call_id == id %}{{ result(other) }}{% endfor %}
{%- endfor %}
{%- for other in place.results if other.tool_call_id not in place.call_ids %}{{ result(other) }}{% endfor %}
{%- endif %}"""

# Content that looks like JSON is shown as it is, other text as a string.
_RESULT_OF_V3 = """\
{%- set is_json = content and content[0] in '{[' or content in ('true', 'false', 'null') %}
{%- set number = content[-1:].isdigit() and content in (content | int | string, content | float | string) %}
{{- '{"content": ' ~ (content if is_json or number else content | tojson) ~ ', "call_id": ' ~ id | tojson ~ '}' }}"""
_RESULT_WITH_ID = "{{- id ~ '[TOOL_CONTENT]' ~ content }}"
_RESULT = "{{- content }}"

_LISTED_CALLS = """\
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- '{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' ~ call.function.arguments | tojson }}
{{- (', "id": ' ~ call.id[-9:] | tojson if call.id else '') ~ '}' ~ ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' }}"""
_CALLS = """\
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' ~ call.function.name }}@call_id@{{ '[ARGS]' ~ call.function.arguments | tojson }}
{%- endfor %}"""
_CALL_ID = "{{ '[CALL_ID]' ~ call.id[-9:] if call.id else '' }}"

_THINKING = "{%- if message.thinking %}{{ '[THINK]' ~ message.thinking ~ '[/THINK]' }}{% endif %}"
_SETTINGS = """\
{%- set effort = 'none' if (reasoning_effort or 'none') in ('none', 'minimal') else 'high' %}
{{- '[MODEL_SETTINGS]{"reasoning_effort": "' ~ effort ~ '"}[/MODEL_SETTINGS]' }}"""


def mistral_template(version: str, special: Container[str]) -> str | None:
    """The template of a version, for a file with these special tokens; None where the version is not known."""
    if version not in VERSIONS:
        return None
    number = int(version[1:])
    thinks = number >= 13 and all(token in special for token in THINK_TOKENS)
    parts = {
        "which_user": "" if number < 13 else " and place.tools < 0",
        "settings": "" if number < 15 else _SETTINGS,
        "system": "" if number < 7 else _SYSTEM,
        "preamble": _SYSTEM_OF_V3 if number < 7 else "",
        "tool": _IN_ORDER if number < 11 else _IN_ORDER_OF_CALLS,
        "result": _RESULT_OF_V3 if number < 7 else _RESULT_WITH_ID if number < 13 else _RESULT,
        "thinking": _THINKING if thinks else "",
        "calls": _LISTED_CALLS if number < 11 else _CALLS,
        "call_id": _CALL_ID if number < 13 else "",
    }
    text = _TEMPLATE
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text
