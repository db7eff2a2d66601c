"""HTTP that is wrong, ambiguous or slow: framing, smuggling, trailers, slow senders and readers.

No request of these forms has a key, so that no answer may be a 200 for what needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import cast

from tests.attack.context import Attack
from tests.attack.target import ATTACKER
from tests.attack.wire import GONE, request_bytes

PATH = "/v1/models"  # needs a key
SECRET = f"Authorization: Bearer {ATTACKER}"
UNKNOWN_KEY = b"sk-unknown"
READ_TIMEOUT = 2.0  # seconds; many forms wait for more
NUM_CLIENTS = 24
LEAST_CLIENTS = 8  # of each process, where several attack together: many forms wait for READ_TIMEOUT
NUM_SLOW = 60  # connections
SLOW_SECONDS = 6.0
MAX_ANSWER = 2**16


def head(first: str, *lines: str) -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


HIDDEN = head(f"GET {PATH} HTTP/1.1", "Host: x").decode()  # a request in another one's body
FORMS: tuple[bytes, ...] = (
    head(f"GET {PATH} HTTP/1.1", "Host: x"),
    head(f"GET {PATH} HTTP/1.1"),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "Host: y"),
    head(f"GET {PATH} HTTP/1.0", SECRET + "x"),
    head(f"GET {PATH} HTTP/2.0", "Host: x"),
    head(f"GET {PATH} HTTP/9.9", "Host: x"),
    head(f"GET {PATH}"),
    head(f"get {PATH} HTTP/1.1", "Host: x"),
    head(f"GET  {PATH}  HTTP/1.1", "Host: x"),
    head(f"GET\t{PATH}\tHTTP/1.1", "Host: x"),
    head(f"GET http://other{PATH} HTTP/1.1", "Host: x"),
    head("GET //v1//models HTTP/1.1", "Host: x"),
    head("GET /v1/./models HTTP/1.1", "Host: x"),
    head("GET /health/../v1/models HTTP/1.1", "Host: x"),
    head("GET /health%2f..%2fv1/models HTTP/1.1", "Host: x"),
    head("GET /v1/models%00 HTTP/1.1", "Host: x"),
    head("GET /v1/models?/health HTTP/1.1", "Host: x"),
    head("GET /v1/models#/health HTTP/1.1", "Host: x"),
    head("GET * HTTP/1.1", "Host: x"),
    head("OPTIONS * HTTP/1.1", "Host: x"),
    head("CONNECT other:80 HTTP/1.1", "Host: other:80"),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: A"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 60,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"\x00" * 1000,
    b"\r\n" * 3000,
    head(f"GET {PATH} HTTP/1.1", "Host: x", SECRET.replace(": ", " : ")),
    head(f"GET {PATH} HTTP/1.1", "Host: x", " " + SECRET),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "X: y", "\t" + SECRET),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "X: \x00y"),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "no colon"),
    head(f"GET {PATH} HTTP/1.1", "Host: x", ": no name"),
    head(f"GET {PATH} HTTP/1.1", "Host: x\n" + SECRET),
    head(f"GET {PATH} HTTP/1.1", "Host: x", "X: " + "y" * 70000),
    head(f"GET {PATH} HTTP/1.1", "Host: x", *(f"X{i}: y" for i in range(9000))),
    head(f"GET {PATH}?{'a' * 70000} HTTP/1.1", "Host: x"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: -1"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 1e3"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 99999999999999999999"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 1000000000000"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 3", "Content-Length: 4") + b"abcd",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 3, 3") + b"abc",
    head("POST /health HTTP/1.1", "Host: x", f"Content-Length: {len(HIDDEN)}", "Transfer-Encoding: chunked")
    + b"0\r\n\r\n"
    + HIDDEN.encode(),
    head("POST /health HTTP/1.1", "Host: x", "Content-Length: 4", "Transfer-Encoding: xchunked") + HIDDEN.encode(),
    head("POST /health HTTP/1.1", "Host: x", "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n" + HIDDEN.encode(),
    head("POST /health HTTP/1.1", "Host: x", "Transfer-Encoding:\x0bchunked") + b"0\r\n\r\n" + HIDDEN.encode(),
    head("POST /health HTTP/1.0", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + HIDDEN.encode(),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"zz\r\n",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"ffffffffffffffff\r\n",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked")
    + b"1;"
    + b"x" * 90000
    + b"\r\na\r\n0\r\n\r\n",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"0\r\n" + SECRET.encode() + b"\r\n\r\n",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"0\r\n" + b"x: y\r\n" * 40000,
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 3000 + b"0\r\n\r\n",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Expect: 100-continue", "Content-Length: 5"),
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Expect: the-unexpected", "Content-Length: 5") + b"12345",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Encoding: gzip", "Content-Length: 4") + b"\x1f\x8b\x08\x00",
    head(f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 10") + b"short",
    head("GET /health HTTP/1.1", "Host: x") * 60,
    head("GET /health HTTP/1.1", "Host: x") + b"garbage garbage garbage\r\n\r\n",
    head("GET /health HTTP/1.1", "Host: x", "Content-Length: 40") + HIDDEN.encode() + b" " * 40,
)


def mutated(rng: random.Random, form: bytes) -> bytes:
    """A form with some bytes changed, doubled or left out.

    Its key is one that the server does not know: a change can make a right header of a wrong one.
    """
    data = bytearray(form.replace(ATTACKER.encode(), UNKNOWN_KEY)[:20000])
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data))
        choice = rng.random()
        if choice < 0.5:
            data[place] = rng.choice(b"\x00\r\n\t :;,/%?#\xff0aZ")
        elif choice < 0.75:
            del data[place : place + rng.randint(1, 8)]
        else:
            data[place:place] = data[place : place + rng.randint(1, 40)]
        if not data:
            return form
    return bytes(data)


async def _send_form(attack: Attack, form: bytes) -> None:
    connection = await attack.connect()
    if connection is None:
        attack.note("form", None)
        return
    received = b""
    with contextlib.suppress(*GONE):
        connection.writer.write(form)
        if attack.rng.random() < 0.5:
            connection.writer.write_eof()
        end = asyncio.get_running_loop().time() + READ_TIMEOUT
        while len(received) < MAX_ANSWER:
            piece = await asyncio.wait_for(connection.reader.read(MAX_ANSWER), end - asyncio.get_running_loop().time())
            if not piece:
                break
            received += piece
            if b"\r\n\r\n" in received and attack.rng.random() < 0.9:
                break
    connection.reset() if attack.rng.random() < 0.2 else connection.close()
    _check(attack, form, received)


def _check(attack: Attack, form: bytes, received: bytes) -> None:
    part = attack.part
    part.requests += 1
    if not received.startswith(b"HTTP/1.1 "):
        part.unanswered += 1
        if received:
            part.unexpected[f"no HTTP in answer to {form[:40]!r}"] += 1
        return
    status = int(received[9:12])
    part.statuses[status] += 1
    if status >= 500 and status not in (501, 505) and b"retry-after" not in received.lower():
        part.faulty[f"{status} for {form[:40]!r}"] += 1
    if b'"object":"list"' in received or b'"owned_by"' in received:
        part.unexpected[f"models without a key for {form[:60]!r}"] += 1


async def _slow_senders(attack: Attack) -> None:
    """Heads and bodies that come byte by byte."""

    async def one(slow: bytes) -> None:
        connection = await attack.connect()
        if connection is None:
            return
        with contextlib.suppress(*GONE):
            for byte in slow[:20]:
                connection.writer.write(bytes([byte]))
                await asyncio.sleep(SLOW_SECONDS / 20)
        connection.close()
        attack.note("slow sender", None)

    body = request_bytes("POST", "/v1/completions", b"{" * 30, ATTACKER)
    head_only = head(f"GET {PATH} HTTP/1.1", "Host: x")
    await asyncio.gather(*(one(body[-30:] if i % 2 else head_only) for i in range(attack.own_share(NUM_SLOW))))


async def _slow_readers(attack: Attack) -> None:
    """Streams that are asked for and never read."""

    async def one() -> None:
        connection = await attack.connect()
        if connection is None:
            return
        body = {"model": attack.model, "prompt": "a b c", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with contextlib.suppress(*GONE):
            connection.writer.write(request_bytes("POST", "/v1/completions", json.dumps(body).encode(), ATTACKER))
            cast(asyncio.Transport, connection.writer.transport).pause_reading()
            await asyncio.sleep(SLOW_SECONDS)
        connection.reset()
        attack.note("slow reader", None)

    await asyncio.gather(*(one() for _ in range(attack.own_share(NUM_SLOW // 4))))


async def run(attack: Attack) -> None:
    rng = attack.rng
    whole = attack.num_requests
    if whole >= 10 * NUM_SLOW:
        await asyncio.gather(_slow_senders(attack), _slow_readers(attack))

    async def one() -> None:
        while await attack.is_due():
            form = rng.choice(FORMS)
            await _send_form(attack, mutated(rng, form) if rng.random() < 0.6 else form)

    await asyncio.gather(*(one() for _ in range(attack.own_share(NUM_CLIENTS, LEAST_CLIENTS))))
