"""DSPy: predictions in its two formats, reasoning first, an agent with a tool."""

import sys

import dspy
from checks import check, report

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
LM = dspy.LM("openai/tiny", api_base=f"{sys.argv[1]}/v1", api_key="none", num_retries=0)
dspy.configure(lm=LM)


def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@check
def predict():
    return dspy.Predict("question -> answer")(question="plain?").answer


@check
def chain_of_thought():
    found = dspy.ChainOfThought("question -> answer")(question="thoughtful?")
    return [found.reasoning, found.answer]


@check
def json():
    with dspy.context(adapter=dspy.JSONAdapter()):
        return dspy.Predict("question -> answer")(question="plain?").answer


@check
def react():
    found = dspy.ReAct("question -> answer", tools=[weather])(question="weather?")
    return [found.answer, [found.trajectory[f"tool_name_{step}"] for step in range(2)]]


report()
