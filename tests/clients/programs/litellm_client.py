"""litellm: hints, a tool, and the error that starts its fallbacks."""

import json
import sys

import litellm

litellm.telemetry = False
litellm.suppress_debug_info = True
common = {"model": "openai/tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
hello = [{"role": "user", "content": "weather?"}]
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
first = litellm.completion(
    messages=hello, tools=[tool], allowed_openai_params=["reasoning_effort"], reasoning_effort="low", **common
)
call = first.choices[0].message.tool_calls[0]
history = [*hello, first.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
streamed = litellm.completion(messages=history, tools=[tool], stream=True, **common)
text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
errors = []
for wrong in ({"messages": [{"role": "user", "content": "x y " * 200000}]}, {"messages": hello, "max_tokens": 2**30}):
    try:
        litellm.completion(**wrong, **common)
    except litellm.exceptions.ContextWindowExceededError as error:
        errors.append(type(error).__name__)
print(json.dumps({"called": call.function.name, "text": text, "errors": errors}))
