"""Models that come and go: durations, metrics of several engines in one text, holds of requests that give up."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tessera.app.engines.engines import Engines
from tessera.app.engines.keep_alive import seconds_of
from tessera.app.engines.messages import Granted, Hold, ModelStatus, Release, Statuses, ToPool, Used, pool_address
from tessera.app.ops.metrics_text import merged


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("0", 0), ("90", 90), ("-1", math.inf), ("-1m", math.inf)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 m", "m", "1d", "--1", "5m!", "1" * 65])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="a duration such as 5m"):
        seconds_of(text)


def test_a_family_of_several_engines_stands_once_and_has_the_model_as_a_label() -> None:
    one = b"# HELP up Is it.\n# TYPE up gauge\nup 1.0\n# HELP n_total Some.\n# TYPE n_total counter\n"
    one += b'n_total{model_name="a",k="1"} 2.0\n'
    two = one.replace(b'model_name="a"', b'model_name="b"')
    families = {
        family.name: family
        for family in text_string_to_metric_families(
            merged([({"model_name": "a"}, one), ({"model_name": 'b"'}, two)]).decode()
        )
    }
    assert {name: len(family.samples) for name, family in families.items()} == {"up": 2, "n": 2}
    assert [sample.labels["model_name"] for sample in families["up"].samples] == ["a", 'b"']
    assert [sample.labels for sample in families["n"].samples] == [
        {"model_name": "a", "k": "1"},
        {"model_name": "b", "k": "1"},
    ]


def test_a_request_that_gives_up_waiting_leaves_no_hold(tmp_path: Path) -> None:
    """The pool grants the hold when the client has left: it is released at once."""

    async def run() -> None:
        seen: asyncio.Queue[ToPool] = asyncio.Queue()
        writers: list[asyncio.StreamWriter] = []

        async def pool(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            writer.write(msgspec.json.encode(Statuses([ModelStatus("unloaded")])) + b"\n")
            while line := await reader.readline():
                await seen.put(msgspec.json.decode(line, type=ToPool))

        server = await asyncio.start_unix_server(pool, pool_address(tmp_path))
        engines = Engines.of_run_dir(tmp_path, {"m": 1}, is_static=False)
        await engines.start()
        while not writers:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(engines.hold(0, 60))
        assert [await seen.get(), await seen.get()] == [Hold(0), Used(0, 0)]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        writers[0].write(msgspec.json.encode(Granted(0)) + b"\n")
        released = await asyncio.wait_for(seen.get(), 10)
        assert isinstance(released, Release)
        await engines.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(run())
