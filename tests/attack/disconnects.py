"""Clients that leave at each stage of a request, politely or with a reset."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from tests.attack.context import Attack
from tests.attack.target import ATTACKER
from tests.attack.wire import GONE, Connection, request_bytes

STAGES = ("connected", "in the head", "in the body", "sent", "in the queue", "head read", "some events", "half closed")
NUM_CLIENTS = 24
LEAST_CLIENTS = 6  # of each process, where several attack together
PATIENCE = 5.0  # seconds for what is waited for


async def run(attack: Attack) -> None:
    async def one() -> None:
        while await attack.is_due():
            connection = await attack.connect()
            if connection is None:
                attack.note("disconnect", None)
                await asyncio.sleep(0.05)
                continue
            with contextlib.suppress(*GONE):
                await asyncio.wait_for(_leave(attack, connection, attack.rng.choice(STAGES)), PATIENCE)
            connection.reset() if attack.rng.random() < 0.5 else connection.close()
            attack.note("disconnect", None)

    await asyncio.gather(*(one() for _ in range(attack.own_share(NUM_CLIENTS, LEAST_CLIENTS))))


async def _leave(attack: Attack, connection: Connection, stage: str) -> None:
    rng, reader, writer = attack.rng, connection.reader, connection.writer
    request = _request(attack)
    if stage == "connected":
        return
    if stage in ("in the head", "in the body"):
        end = request.index(b"\r\n\r\n")
        writer.write(request[: rng.randrange(1, end) if stage == "in the head" else rng.randrange(end, len(request))])
        await writer.drain()
        return
    writer.write(request)
    await writer.drain()
    if stage == "in the queue":
        await asyncio.sleep(rng.random() * 0.02)
    elif stage == "half closed":
        writer.write_eof()
        await reader.read(rng.choice((1, 100, 10_000)))
    elif stage in ("head read", "some events"):
        await connection.read_head()
        for _ in range(rng.randint(1, 6) if stage == "some events" else 0):
            await reader.readline()


def _request(attack: Attack) -> bytes:
    rng = attack.rng
    common: dict[str, Any] = {"model": attack.model, "max_tokens": 30, "ignore_eos": True, "stream": rng.random() < 0.7}
    if rng.random() < 0.2:
        common["n"] = rng.randint(2, 4)
    if rng.random() < 0.15:
        common["guided_regex"] = f"[a-z]{{1,{rng.randint(1, 50)}}}"
    if rng.random() < 0.5:
        path, body = "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": "hello " * 20}]}
    else:
        path, body = "/v1/completions", {**common, "prompt": "Once upon a time " * rng.choice((1, 20))}
    return request_bytes("POST", path, json.dumps(body).encode(), ATTACKER)
