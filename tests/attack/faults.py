"""Processes killed and stopped, descriptors and disk used up, while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.attack.context import Attack
from tests.attack.target import ENGINE, NUM_DESCRIPTORS, WORKER
from tests.attack.wire import Connection, NoAnswerError

HEALTH_DEADLINE = 5.0  # seconds until a dead or stopped engine shows
RECOVERY = 60.0  # seconds until the server serves again
NUM_SERVED = 8  # completions in a row that show it, so that each app process very likely has one
RENDERER, PROBE = "tessera.app.text.renderer", "tessera.engine.grammar.probe"
GRAMMARS_FOR_A_PROBE = 20


async def kill_engine(attack: Attack) -> None:
    await _with_engine(attack, signal.SIGKILL)


async def stop_engine(attack: Attack) -> None:
    await _with_engine(attack, signal.SIGSTOP)


async def _with_engine(attack: Attack, signum: int) -> None:
    engines = attack.target.children(ENGINE)
    assert engines, "there is no engine"
    attack.canaries.excused = True
    attack.own_kills += signum == signal.SIGKILL
    load = asyncio.gather(*(_complete(attack) for _ in range(8)))
    await asyncio.sleep(0.05)
    os.kill(engines[0], signum)
    if not await _until(lambda: _health(attack, 503), HEALTH_DEADLINE):
        attack.part.unexpected["a dead or stopped engine was healthy"] += 1
    if signum == signal.SIGSTOP:
        os.kill(engines[0], signal.SIGCONT)
    await _until_served(attack)
    await load
    attack.canaries.excused = False


async def kill_worker(attack: Attack) -> None:
    await _with_processes(attack, WORKER)


async def kill_renderer(attack: Attack) -> None:
    await _with_processes(attack, RENDERER)


async def kill_probe(attack: Attack) -> None:
    """Probes of grammars come and go: many grammars are asked for until one is found."""

    async def ask(number: int) -> None:
        body = {"model": attack.model, "prompt": "a", "max_tokens": 2, "guided_regex": f"[a-z]{{1,{number}}}b"}
        await attack.ask("grammar", "POST", "/v1/completions", json.dumps(body).encode())

    attack.canaries.excused = True
    first = attack.rng.randrange(1, 10**6)
    asking = asyncio.gather(*(ask(first % 900 + number) for number in range(GRAMMARS_FOR_A_PROBE)))
    for _ in range(100):
        if found := attack.target.children(PROBE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGKILL)
            break
        await asyncio.sleep(0.01)
    await asking
    await _until_served(attack)
    attack.canaries.excused = False


async def _with_processes(attack: Attack, module: str) -> None:
    attack.canaries.excused = True
    load = asyncio.gather(*(_complete(attack) for _ in range(4)))
    for pid in attack.target.children(module)[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(NoAnswerError, OSError):
        await load
    await _until_served(attack)
    attack.canaries.excused = False


async def take_all_descriptors(attack: Attack) -> None:
    """Connections until the server has no descriptor left for more; health is answered all the same."""
    held: list[Connection] = []
    for _ in range(2 * NUM_DESCRIPTORS):
        connection = await attack.connect()
        if connection is None:
            break
        held.append(connection)
    attack.note("crowd", None)
    if not await _until(lambda: _health(attack, 200), HEALTH_DEADLINE):
        attack.part.unexpected["no health beside a crowd of connections"] += 1
    for connection in held:
        connection.reset()
    await _until_served(attack)


async def fill_disk(attack: Attack) -> None:
    """Where the attack was started with a small disk for temporary files."""
    folder = os.environ.get("TESSERA_ATTACK_DISK")
    if not folder:
        return
    filling = Path(folder) / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(b"x" * 65536):
            pass
    body = json.dumps({"model": attack.model, "input": "hi", "max_output_tokens": 2}).encode()
    for _ in range(4):
        await attack.ask("a full disk", "POST", "/v1/responses", body)
        await attack.ask("a full disk", "GET", "/metrics", b"")
    filling.unlink(missing_ok=True)


FAULTS: tuple[Callable[[Attack], Awaitable[None]], ...] = (
    kill_engine,
    stop_engine,
    kill_worker,
    kill_renderer,
    kill_probe,
    take_all_descriptors,
    fill_disk,
)


async def run(attack: Attack) -> None:
    """Each fault in turn, again and again."""
    while not attack.is_over:
        for fault in FAULTS:
            await fault(attack)
            if attack.is_over:
                return


async def _complete(attack: Attack) -> None:
    body = {"model": attack.model, "prompt": "Once upon a time", "max_tokens": 30, "ignore_eos": True}
    await attack.ask("a completion", "POST", "/v1/completions", json.dumps(body).encode())


async def _health(attack: Attack, status: int) -> bool:
    with contextlib.suppress(NoAnswerError, OSError):
        return (await attack.target.wire.get("/health")).status == status
    return False


async def _until_served(attack: Attack) -> None:
    """Wait until health and a completion are right again."""

    async def serves() -> bool:
        if not await _health(attack, 200):
            return False
        body = json.dumps({"model": attack.model, "prompt": "a", "max_tokens": 1}).encode()
        for _ in range(NUM_SERVED):
            answer = await attack.ask("a completion", "POST", "/v1/completions", body)
            if answer is None or answer.status != 200:
                return False
        return True

    if not await _until(serves, RECOVERY):
        attack.part.unexpected["the server did not recover"] += 1


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await condition():
            return True
        await asyncio.sleep(0.05)
    return False
