"""instructor: objects in its modes."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    city: str


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "a city"}]
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    city = patched.chat.completions.create(model="tiny", messages=hello, response_model=City, max_retries=0)
    found[mode.name] = city.city
print(json.dumps(found))
