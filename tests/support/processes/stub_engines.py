"""Engine processes with a stub core, and a client of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.request_stream import RequestStream
from tessera.engine.ipc.supervisor import EngineSupervisor, make_run_dir
from tests.support.cases.token_ids import token_ids

DEADLINE = 20.0  # seconds; only a failing test waits this long


@contextlib.asynccontextmanager
async def engine(model: str = "stub", **options: Any) -> AsyncIterator[tuple[EngineSupervisor, EngineClient]]:
    run_dir = make_run_dir()
    module = "tests.support.fakes.stub_engine"
    supervisor = EngineSupervisor(EngineConfig(model=model), run_dir, module=module, **options)
    client = EngineClient(run_dir)
    supervisor.start()
    await asyncio.wait_for(supervisor.wait_launched(), DEADLINE)
    assert supervisor.pid is not None
    await client.start()
    try:
        yield supervisor, client
    finally:
        await client.close()
        await supervisor.stop()
        assert not run_dir.exists()


async def until(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"in vain waited for: {what}"
        await asyncio.sleep(0.01)


async def until_well(client: EngineClient) -> None:
    await until(lambda: client.health()[0], "a healthy engine")


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def count(client: EngineClient, start: int, num_tokens: int) -> None:
    """A request whose answer shows that the engine serves and mixes nothing up."""
    stream = client.submit(token_ids([start]), SamplingParams(max_tokens=num_tokens))
    assert await tokens_of(stream) == list(range(start + 1, start + 1 + num_tokens))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))
