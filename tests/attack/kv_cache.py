"""The server's KV cache, whose memory is its process's own only once it has been written."""

from __future__ import annotations

import json
import random

from tests.attack.target import CANARY, Target
from tests.attack.wire import request_bytes

PROMPTS_AT_A_TIME, PROMPT_LENGTH = 16, 2000
FIRST_ID, LAST_ID = 10, 120
MOST_ROUNDS = 100  # a GPU has memory of its own, which no look at its process counts


async def fill_kv_cache(target: Target, model: str, rng: random.Random) -> None:
    """Write all blocks, with prompts of random tokens; afterwards memory grows only by what is kept beside them."""
    for _ in range(MOST_ROUNDS):
        if await target.blocks("free") == 0:
            return
        for _ in range(PROMPTS_AT_A_TIME):
            prompt = random_prompt(rng, PROMPT_LENGTH)
            body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode()
            connection = await target.wire.connect()
            answer = await connection.ask(request_bytes("POST", "/v1/completions", body, CANARY))
            connection.close()
            assert answer.status == 200, answer


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids that every model has."""
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
