"""HTTP by hand, over a socket."""

from __future__ import annotations

import socket
from typing import Any

import orjson

from tests.support.servers.surface_fixtures import PATIENCE

TEXT = {"model": "tiny", "prompt": "hi"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: tiny\r\ncontent-type: application/json\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def read_to_the_end(connection: socket.socket) -> bytes:
    """Everything received until the server closes or resets the connection, as it may while more is being sent."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def responses(received: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of each response, none of which may be cut or hold another."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        (length,) = (int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        found.append((int(lines[0].split()[1]), orjson.loads(rest[:length])))
        received = rest[length:]
    return found
