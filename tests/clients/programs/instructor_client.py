"""instructor: objects in its modes, and as they grow."""

import sys

import instructor
import openai
from checks import check, report
from pydantic import BaseModel


class City(BaseModel):
    city: str


CLIENT = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "a city"}], "max_retries": 0}


def city(mode):
    patched = instructor.from_openai(CLIENT, mode=mode)
    return patched.chat.completions.create(response_model=City, **ASK).city


@check
def tools():
    return city(instructor.Mode.TOOLS)


@check
def json():
    return city(instructor.Mode.JSON)


@check
def json_schema():
    return city(instructor.Mode.JSON_SCHEMA)


@check
def partial():
    patched = instructor.from_openai(CLIENT, mode=instructor.Mode.TOOLS)
    grown = list(patched.chat.completions.create_partial(response_model=City, **ASK))
    return grown[-1].city


report()
