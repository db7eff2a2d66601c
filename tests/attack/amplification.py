"""Small requests that cost much: deep bodies, wide parameters, many sequences, long grammars, many scrapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.attack.context import Attack
from tests.attack.target import ATTACKER
from tests.attack.wire import GONE, request_bytes

LARGE = 2**24 - 64  # bytes of the largest body
NUM_SCRAPES = 480
NUM_GRAMMARS = 24
GRAMMAR_BYTES = 20_000  # a large one that still compiles


async def deep_bodies(attack: Attack) -> None:
    """As many brackets as a body holds."""
    body = b'{"messages": [' + b"[]," * (LARGE // 3 - 10) + b"[]]}"
    await attack.ask("brackets", "POST", "/v1/chat/completions", body)
    await attack.ask("deep brackets", "POST", "/v1/chat/completions", b"[" * LARGE)


async def many_messages(attack: Attack) -> None:
    messages = [{"role": "user", "content": "x"}] * 16384
    body = json.dumps({"model": attack.model, "messages": messages, "max_tokens": 1}).encode()
    await _together(attack, "messages", "/v1/chat/completions", [body] * 4)


async def detokenize(attack: Attack) -> None:
    body = json.dumps({"model": attack.model, "tokens": [5] * 2**20}).encode()
    await attack.ask("detokenize", "POST", "/detokenize", body)


async def wide_parameters(attack: Attack) -> None:
    """Parameters of kilobytes for each of 8 x 128 sequences."""
    common = {"model": attack.model, "prompt": ["a"] * 8, "n": 128, "max_tokens": 2}
    wide: list[dict[str, Any]] = [
        {"bad_words": ["b" * 200 + str(i) for i in range(128)]},
        {"allowed_token_ids": [i % 100 for i in range(65536)]},
        {"logit_bias": {str(i): 1 for i in range(1024)}},
        {"stop": ["s" * 100 + str(i) for i in range(16)]},
    ]
    bodies = [json.dumps({**common, **fields}).encode() for fields in wide]
    await _together(attack, "wide parameters", "/v1/completions", bodies)
    await _leave(attack, "wide parameters", "/v1/completions", bodies)


async def many_sequences(attack: Attack) -> None:
    body = json.dumps(
        {"model": attack.model, "prompt": ["a", "b", "c", "d"], "n": 128, "max_tokens": 40, "ignore_eos": True}
    ).encode()
    await _together(attack, "many sequences", "/v1/completions", [body] * 2)


async def high_priority(attack: Attack) -> None:
    body = json.dumps(
        {"model": attack.model, "prompt": "a b c", "max_tokens": 60, "priority": -(2**31), "ignore_eos": True}
    ).encode()
    await _together(attack, "priority", "/v1/completions", [body] * 64)


async def prompt_logprobs(attack: Attack) -> None:
    body = json.dumps(
        {"model": attack.model, "prompt": ["a b " * 100] * 32, "max_tokens": 1, "prompt_logprobs": 5}
    ).encode()
    await attack.ask("prompt_logprobs", "POST", "/v1/completions", body)


async def many_grammars(attack: Attack) -> None:
    """Distinct large ones, whose senders leave at once; then one whose sender waits."""

    def body(number: int) -> bytes:
        words = " | ".join(f'"{number}-{i}"' for i in range(GRAMMAR_BYTES // 10))
        return json.dumps(
            {"model": attack.model, "prompt": "a", "max_tokens": 4, "guided_grammar": f"root ::= {words}"}
        ).encode()

    await _leave(attack, "grammar", "/v1/completions", [body(attack.rng.randrange(10**6)) for _ in range(NUM_GRAMMARS)])
    await attack.ask("grammar", "POST", "/v1/completions", body(attack.rng.randrange(10**6)))


async def scrapes(attack: Attack) -> None:
    async def one() -> None:
        await attack.ask("scrape", "GET", "/metrics", b"", key="")

    await asyncio.gather(*(one() for _ in range(NUM_SCRAPES)))


FORMS: tuple[Callable[[Attack], Awaitable[None]], ...] = (
    deep_bodies,
    many_messages,
    detokenize,
    wide_parameters,
    many_sequences,
    high_priority,
    prompt_logprobs,
    many_grammars,
    scrapes,
)


async def _together(attack: Attack, what: str, path: str, bodies: list[bytes]) -> None:
    await asyncio.gather(*(attack.ask(what, "POST", path, body) for body in bodies))


async def _leave(attack: Attack, what: str, path: str, bodies: list[bytes]) -> None:
    """Send and go away at once."""
    for body in bodies:
        connection = await attack.connect()
        if connection is not None:
            with contextlib.suppress(*GONE):
                connection.writer.write(request_bytes("POST", path, body, ATTACKER))
                await connection.writer.drain()
            connection.reset()
        attack.note(what, None)


async def run(attack: Attack) -> None:
    """Each form in turn, again and again."""
    while not attack.is_over:
        for form in FORMS:
            await form(attack)
            if attack.is_over:
                return
