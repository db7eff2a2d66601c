"""Anthropic's client for Python: messages, streams, tools in two turns, counts, the beta API and errors."""

import sys

import anthropic
from checks import check, report

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}
COMMON = {"model": "tiny", "max_tokens": 8192}


@check
def create():
    message = client.messages.create(**COMMON, messages=HELLO, system="Be brief.")
    return [message.content[0].text, message.stop_reason]


@check
def stream():
    with client.messages.stream(
        model="tiny", max_tokens=64000, messages=[{"role": "user", "content": "think"}]
    ) as events:
        kinds = {event.type for event in events}
        blocks = events.get_final_message().content
    assert {"thinking", "text", "message_stop"} <= kinds
    return [block.type for block in blocks]


@check
def tools():
    first = client.messages.create(**COMMON, messages=ASK, tools=[TOOL])
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**COMMON, messages=history, tools=[TOOL])
    return [first.stop_reason, call.input, second.content[0].text]


@check
def tool_runner():
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(**COMMON, messages=ASK, tools=[weather])
    return runner.until_done().content[0].text


@check
def count_tokens():
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL]).input_tokens
    return counted == client.messages.create(**COMMON, messages=HELLO, tools=[TOOL]).usage.input_tokens


@check
def beta():
    message = client.beta.messages.create(
        **COMMON,
        messages=HELLO,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        thinking={"type": "enabled", "budget_tokens": 2048},
    )
    return [message.content[0].text, message.context_management.applied_edits]


@check
def models():
    return [model.id for model in client.models.list()]


@check
def too_long():
    try:
        client.messages.create(**COMMON, messages=[{"role": "user", "content": "x y " * 200000}])
    except anthropic.BadRequestError as error:
        return "prompt is too long" in str(error)


report()
