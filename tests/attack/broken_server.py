"""A server that breaks promises: `python -m tests.attack.broken_server FAULT,FAULT`. With `none` it breaks none.

The harness is tested with it: each of its checks must be able to fail. It needs no model and starts at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import zlib
from typing import Any

FAULTS = (
    "status",
    "retry-after",
    "canary",
    "refused canary",
    "slow canary",
    "server exit",
    "engine exit",
    "traceback",
    "models without a key",
    "no answer",
    "slow admin",
    "stall",
    "blocks",
    "descriptors",
    "processes",
    "memory",
)
DOCUMENT = {
    "paths": {
        "/v1/completions": {
            "post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/C"}}}}}
        }
    },
    "components": {"schemas": {"C": {"type": "object", "properties": {"prompt": {"type": "string"}}}}},
}
ENGINE = "tessera.engine.ipc.process"
LATER = 40  # attacker's requests after which a fault begins, so that it is not there before the attack
DELAY = 2.0  # seconds
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class BrokenServer:
    def __init__(self, faults: frozenset[str]) -> None:
        self._faults = faults
        self._num_attacks = 0
        self._held: list[Any] = []
        self._engine = self._start_engine()

    def _start_engine(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([ENGINE, "1000"], executable="/bin/sleep", preexec_fn=_end_with_parent)

    @property
    def _is_broken(self) -> bool:
        return self._num_attacks > LATER

    async def serve(self) -> None:
        for name, on_request in (("Ready on", self.answer), ("For operators are on", self.answer_admin)):
            server = await asyncio.start_server(on_request, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            self._held.append(server)
            if name == "Ready on":
                ready = port
            else:
                print(f"Health and metrics for operators are on http://127.0.0.1:{port}, without a key", flush=True)
        print(f"Ready on http://127.0.0.1:{ready}", flush=True)
        await asyncio.Event().wait()

    async def answer_admin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if "slow admin" in self._faults:
            await asyncio.sleep(DELAY)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                size = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = await reader.readexactly(int(size) if size.isdigit() else 0)
                path = head.split(" ")[1]
                if "sk-canary" in head and path != "/metrics":
                    await self._answer_canary(writer, body)
                elif not await self._answer_attack(writer, path, body):
                    break
        except (EOFError, OSError, asyncio.LimitOverrunError, IndexError, ValueError):
            pass
        finally:
            writer.close()

    async def _answer_canary(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        text = str(zlib.crc32(body))
        if self._is_broken and "canary" in self._faults:
            text += "!"
        if self._is_broken and "slow canary" in self._faults:
            await asyncio.sleep(DELAY)
        is_refused = self._is_broken and "refused canary" in self._faults
        _write(writer, 429 if is_refused else 200, {"choices": [{"text": text}]})

    async def _answer_attack(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> bool:
        """-> whether the connection stays open."""
        if path == "/openapi.json":
            _write(writer, 200, DOCUMENT)
        elif path == "/metrics":
            used = 1 if self._is_broken and "blocks" in self._faults else 0
            _write(writer, 200, f'tessera:kv_cache_blocks{{state="used"}} {used}\n'.encode())
        elif path == "/v1/models" and "models without a key" in self._faults:
            _write(writer, 200, {"object": "list"})
        else:
            self._num_attacks += 1
            if self._is_broken:
                return self._break(writer)
            _write(writer, 400, {"error": {}})
        return True

    def _break(self, writer: asyncio.StreamWriter) -> bool:
        faults = self._faults
        if "server exit" in faults:
            os._exit(1)
        if "no answer" in faults:
            return False
        if "engine exit" in faults and self._num_attacks == LATER + 1:
            self._engine.kill()
            self._engine.wait()
            self._engine = self._start_engine()
        if "traceback" in faults:
            print("Traceback (most recent call last):", flush=True)
        if "stall" in faults:
            print("the event loop was held up for 900 ms (800 ms of its own): somewhere", flush=True)
        if "descriptors" in faults:
            self._held.append(open(os.devnull))  # noqa: SIM115 (it leaks)
        if "processes" in faults and sum(isinstance(one, subprocess.Popen) for one in self._held) < 2:
            self._held.append(self._start_engine())
        if "memory" in faults and sum(isinstance(one, bytes) for one in self._held) < 8:
            self._held.append(os.urandom(2**22))
        status = 500 if "status" in faults else 503 if "retry-after" in faults else 400
        _write(writer, status, {"error": {}})
        return True


def _write(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))


if __name__ == "__main__":
    broken = BrokenServer(frozenset(sys.argv[1].split(",")))
    try:
        asyncio.run(broken.serve())
    finally:
        broken._engine.kill()
