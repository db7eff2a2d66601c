"""Ollama's client for Python: chat, generate, tools, thinking, objects, embeddings, what it tells of models."""

import json
import sys

import ollama
from checks import check, report

client = ollama.Client(host=sys.argv[1])
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: its name
    """
    return f"rain in {city}"


@check
def chat():
    answer = client.chat("tiny", HELLO, options={"temperature": 0, "num_ctx": 4096, "seed": 1}, keep_alive="5m")
    assert min(answer.eval_count, answer.eval_duration, answer.prompt_eval_duration) > 0
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    return [answer.message.content, answer.done_reason]


@check
def chat_stream():
    parts = list(client.chat("tiny:latest", HELLO, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    return "".join(part.message.content for part in parts)


@check
def tools():
    first = client.chat("tiny", ASK, tools=[weather]).message
    call = first.tool_calls[0].function
    result = {"role": "tool", "tool_name": call.name, "content": weather(**call.arguments)}
    return [call.name, call.arguments, client.chat("tiny", [*ASK, first, result], tools=[weather]).message.content]


@check
def thinking():
    message = client.chat("tiny", [{"role": "user", "content": "think"}], think=True).message
    return [message.thinking, message.content]


@check
def object():
    messages = [{"role": "user", "content": "a city"}]
    return [json.loads(client.chat("tiny", messages, format=form).message.content) for form in ("json", SCHEMA)]


@check
def generate():
    first = client.generate("tiny", "hello", system="be brief")
    second = client.generate("tiny", "hello", context=first.context)
    assert second.prompt_eval_count > len(first.context)
    return [first.response, second.response]


@check
def generate_raw_stream():
    return "".join(part.response for part in client.generate("tiny", "hello", raw=True, stream=True))


@check
def load():
    return [client.generate("tiny").done_reason, client.chat("tiny").done_reason]


@check
def logprobs():
    answer = client.chat("tiny", HELLO, logprobs=True, top_logprobs=1)
    return [len(answer.logprobs) > 1, answer.logprobs[0].logprob]


@check
def embeddings():
    return [client.embed("tiny", ["one", "two"]).embeddings[1], client.embeddings("tiny", "one").embedding]


@check
def models():
    shown = client.show("tiny")
    names = [model.model for model in (*client.list().models, *client.ps().models)]
    return [names, shown.capabilities, shown.modelinfo["fake.context_length"]]


@check
def errors():
    found = []
    for wrong in (lambda: client.chat("other", HELLO), lambda: client.pull("other"), lambda: client.delete("tiny")):
        try:
            wrong()
        except ollama.ResponseError as error:
            found.append(error.status_code)
    return found


report()
