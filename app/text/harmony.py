"""Harmony, the chat form of gpt-oss: its template, and what messages need before the template prints them.

The template of the model folders shows one call of a turn and refuses reasoning beside text, so that this one takes its
place. Source: docs/format.md of openai/harmony.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera.app.text.typescript import tool_namespace

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ONE_CALL = "tool_calls[0]"  # in templates that show the first call of a message and no other

TEMPLATE = """\
{% macro instructions(text) %}
{{ '<|start|>developer<|message|>' }}
{%- if text %}{{ '# Instructions\n\n' ~ text }}{% endif %}
{%- endmacro %}
{{ '<|start|>system<|message|>' }}
{{- model_identity or 'You are ChatGPT, a large language model trained by OpenAI.' }}
{{- '\nKnowledge cutoff: 2024-06\nCurrent date: ' ~ strftime_now('%Y-%m-%d') }}
{{- '\n\nReasoning: ' ~ (reasoning_effort or 'medium') }}
{{- '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{{- '<|end|>' }}
{%- set first = 1 if messages and messages[0].role == 'developer' else 0 %}
{%- set text = messages[0].content if first else '' %}
{%- if text or tools or response_schema %}
{{- instructions(text) }}
{%- if tools %}{{ ('\n\n' if text else '') ~ '# Tools\n\n' ~ tools }}{% endif %}
{%- if response_schema %}
{{- ('\n\n' if text or tools else '') ~ '# Response Formats\n\n## response\n\n' ~ response_schema }}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages[first:] %}
{%- if message.role == 'developer' %}
{{- instructions(message.content) ~ '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' ~ message.content ~ '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' ~ message.name ~ ' to=assistant<|channel|>commentary<|message|>' ~ message.content }}
{{- '<|end|>' }}
{%- else %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}
{%- endif %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>' ~ ('commentary' if message.tool_calls else 'final') }}
{{- '<|message|>' ~ message.content ~ '<|end|>' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' ~ call.function.name ~ ' <|constrain|>json<|message|>' }}
{{- (arguments if arguments is string else arguments | tojson) ~ '<|call|>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<|channel|>analysis<|message|><|end|><|start|>assistant' }}
{%- endif %}
{%- endif %}
"""

# The levels that the model has been trained on, for those that requests name.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template and "<|start|>" in template


def needs_replacing(template: str) -> bool:
    """Whether a folder's template is one of gpt-oss's that cannot show all of a conversation."""
    return is_harmony(template) and ONE_CALL in template


def prepared_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as TEMPLATE reads them.

    All system and developer messages at the beginning are one developer message. Tool results have the name of the
    function that was called. Of the reasoning only that of calls after the last answer is left, which the model needs
    to go on (docs/format.md, "Handling reasoning output in subsequent sampling").
    """
    answered = max((index for index, message in enumerate(messages) if _is_answer(message)), default=-1)
    names: dict[str, str] = {}
    last_name = "tool"
    found: list[dict[str, Any]] = []
    instructions: list[str] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role in ("system", "developer"):
            if len(instructions) == index:
                instructions.append(message["content"])
            else:
                found.append({"role": "developer", "content": message["content"]})
            continue
        entry = dict(message)
        if role == "assistant":
            if index < answered or _is_answer(message):
                entry.pop("thinking", None)
            for call in message.get("tool_calls", ()):
                last_name = names[call["id"]] = call["function"]["name"]
        elif role == "tool":
            entry["name"] = names.get(message.get("tool_call_id", ""), message.get("name") or last_name)
        found.append(entry)
    if instructions:
        found.insert(0, {"role": "developer", "content": "\n\n".join(filter(None, instructions))})
    return found


def prepared_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """A request's variables with one of the model's efforts; with effort `none` the reasoning is left empty."""
    found = dict(variables)
    effort = found.get("reasoning_effort")
    if effort == "none":
        found.setdefault("enable_thinking", False)
    if isinstance(effort, str):
        found["reasoning_effort"] = EFFORTS.get(effort, effort)
    return found


def prepared_tools(tools: Iterable[Mapping[str, Any]] | None) -> str | None:
    return tool_namespace([tool["function"] for tool in tools]) if tools else None


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message["content"])
