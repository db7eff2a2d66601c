"""Ten times the load that the server has room for, by one key."""

from __future__ import annotations

import asyncio
import json

from tests.attack.context import Attack

FACTOR = 10
MAX_TOKENS = 12
SEQUENCES = 64  # at a time, the default on the CPU


async def run(attack: Attack) -> None:
    async def one() -> None:
        while await attack.is_due():
            body = {
                "model": attack.model,
                "prompt": "Once upon a time " * attack.rng.choice((1, 1, 10)),
                "max_tokens": MAX_TOKENS,
                "stream": attack.rng.random() < 0.5,
            }
            answer = await attack.ask("overload", "POST", "/v1/completions", json.dumps(body).encode())
            if answer is not None and answer.status == 429 and "retry-after" not in answer.headers:
                attack.part.unexpected["429 without Retry-After"] += 1
            if answer is None or answer.status != 200:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(attack.own_share(FACTOR * SEQUENCES))))
