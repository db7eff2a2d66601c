"""litellm: its routes to OpenAI's, Anthropic's and Ollama's APIs, and the error that starts its fallbacks."""

import sys

import litellm
from checks import check, report

litellm.telemetry = False
litellm.suppress_debug_info = True
URL = sys.argv[1]
COMMON = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC = {"model": "anthropic/tiny", "api_base": URL, "api_key": "none", "num_retries": 0}
OLLAMA = {"model": "ollama_chat/tiny", "api_base": URL, "num_retries": 0}
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": PARAMETERS}}
TOO_LONG = [{"role": "user", "content": "x y " * 200000}]


def two_turns(common):
    first = litellm.completion(messages=ASK, tools=[TOOL], **common).choices[0].message
    call = first.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "rain"}
    chunks = litellm.completion(messages=[*ASK, first.model_dump(), result], tools=[TOOL], stream=True, **common)
    return [call.function.name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


@check
def chat_with_effort():
    answer = litellm.completion(
        messages=HELLO, allowed_openai_params=["reasoning_effort"], reasoning_effort="low", **COMMON
    )
    return answer.choices[0].message.content


@check
def tools():
    return two_turns(COMMON)


@check
def anthropic_tools():
    return two_turns(ANTHROPIC)


@check
def ollama_tools():
    return two_turns(OLLAMA)


@check
def responses():
    return litellm.responses(input="hello", **COMMON).output[0].content[0].text


@check
def embeddings():
    return litellm.embedding(input=["one"], **COMMON).data[0]["embedding"]


@check
def too_long():
    try:
        litellm.completion(messages=TOO_LONG, **COMMON)
    except litellm.exceptions.ContextWindowExceededError as error:
        return type(error).__name__


@check
def too_long_by_anthropic():
    try:
        litellm.completion(messages=TOO_LONG, **ANTHROPIC)
    except litellm.exceptions.ContextWindowExceededError as error:
        return type(error).__name__


@check
def max_tokens_too_large():
    try:
        litellm.completion(messages=HELLO, max_tokens=2**30, **COMMON)
    except litellm.exceptions.ContextWindowExceededError as error:
        return type(error).__name__


report()
