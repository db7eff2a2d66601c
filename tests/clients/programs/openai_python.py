"""OpenAI's client for Python: chat, streams, tools, objects, responses, embeddings, models and errors."""

import json
import sys

import openai
from checks import check, report
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOO_LONG = "x y " * 200000


class City(BaseModel):
    city: str


@check
def chat():
    answer = client.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="low", store=True)
    return answer.choices[0].message.content


@check
def stream():
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options))
    assert chunks[-1].usage.completion_tokens > 1
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@check
def stream_helper():
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=[TOOL]) as events:
        kinds = {event.type for event in events}
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.done" in kinds
    return [call.function.name, json.loads(call.function.arguments)]


@check
def tools():
    first = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    return client.chat.completions.create(model="tiny", messages=[*ASK, first, result]).choices[0].message.content


@check
def parse():
    messages = [{"role": "user", "content": "a city"}]
    answer = client.chat.completions.parse(model="tiny", messages=messages, response_format=City)
    return answer.choices[0].message.parsed.city


@check
def completions():
    return client.completions.create(model="tiny", prompt="hello", max_tokens=50).choices[0].text


@check
def responses():
    first = client.responses.create(model="tiny", input="hello")
    second = client.responses.create(model="tiny", input="weather?", previous_response_id=first.id)
    return [first.output_text, second.output_text != ""]


@check
def responses_stream():
    with client.responses.stream(model="tiny", input="think", reasoning={"effort": "high"}) as events:
        kinds = {event.type for event in events}
        text = events.get_final_response().output_text
    assert "response.reasoning_text.delta" in kinds
    return text


@check
def responses_tools():
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    first = client.responses.create(model="tiny", input=ASK, tools=[tool])
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    return client.responses.create(model="tiny", input=[*ASK, *first.output, result], tools=[tool]).output_text


@check
def responses_parse():
    return client.responses.parse(model="tiny", input="a city", text_format=City).output_parsed.city


@check
def embeddings():
    return client.embeddings.create(model="tiny", input=["one", "two"]).data[1].embedding


@check
def models():
    return [model.id for model in client.models.list()]


@check
def too_long():
    try:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": TOO_LONG}])
    except openai.BadRequestError as error:
        return error.code


@check
def unknown_model():
    try:
        client.chat.completions.create(model="other", messages=HELLO)
    except openai.NotFoundError as error:
        return error.param


report()
