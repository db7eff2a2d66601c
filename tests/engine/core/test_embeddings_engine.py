"""The queue of embedding requests, and the way of a request from a client through the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    AddEmbedding,
    AddRequest,
    EmbedderRole,
    EmbeddingOutput,
    TokenIds,
)
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.account import Accounts
from tessera.engine.core.embedder import (
    BUSY_SECONDS,
    BUSY_SHARE,
    GENERATION_TURNS,
    VERIFIED_TOGETHER,
    Embedder,
    EmbeddingMetrics,
    EmbeddingOnlyCore,
    PassTurns,
)
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.supervisor import EngineSupervisor, make_run_dir
from tests.support.fakes.fake_runner import Harness
from tests.support.models.tiny_encoder import build_encoder, inputs, write_pooling

VOCAB_SIZE = 100
BROKEN = 99  # a text that begins with it has an embedding that is not finite
ME, OTHER = b"me", b"other"


class FakeModel:
    """Embeds a text as (its length, its first token), and keeps what each pass was given."""

    dimension = 2
    vocab_size = VOCAB_SIZE
    max_input_tokens = 20
    max_num_tokens = 40
    max_num_inputs = 8

    def __init__(self) -> None:
        self.passes: list[list[list[int]]] = []

    def compute(self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None) -> Any:
        self.passes.append([list(ids) for ids in inputs])
        rows = [[len(ids), np.nan if ids[0] == BROKEN else ids[0]] for ids in inputs]
        return np.array(rows, np.float32)


def add_embedding(
    request_id: str,
    inputs: list[list[int]],
    role: EmbedderRole = "main",
    first_lengths: Sequence[int] = (),
    account: AccountRef = NO_ACCOUNT,
) -> AddEmbedding:
    return AddEmbedding(request_id, [array("i", ids) for ids in inputs], role, list(first_lengths), account)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def embedder(model: FakeModel) -> Embedder:
    return Embedder(model, max_queue_len=3)


def finish(embedder: Embedder, *, busy: bool = False) -> dict[tuple[bytes, str], EmbeddingOutput]:
    found = {}
    while embedder.has_work:
        for client, output in embedder.step(busy=busy):
            key = client, output.request_id
            assert key not in found, "a request ends once"
            found[key] = output
    return found


def vectors(output: EmbeddingOutput) -> list[list[float]]:
    assert output.refusal is None
    return np.frombuffer(output.vectors, "<f4").reshape(-1, 2).tolist()


def test_requests_of_one_moment_share_a_pass(model: FakeModel, embedder: Embedder) -> None:
    embedder.add_request(add_embedding("a", [[1], [2, 2]]), ME)
    embedder.add_request(add_embedding("a", [[3] * 3]), OTHER)
    found = finish(embedder)
    assert len(model.passes) == 1
    assert vectors(found[ME, "a"]) == [[1, 1], [2, 2]]
    assert vectors(found[OTHER, "a"]) == [[3, 3]]


def test_passes_keep_to_their_limits(model: FakeModel, embedder: Embedder) -> None:
    embedder.add_request(add_embedding("long", [[index] * 15 for index in range(7)]), ME)
    embedder.add_request(add_embedding("many", [[index] for index in range(30)]), ME)
    found = finish(embedder)
    assert all(sum(map(len, made)) <= 40 and len(made) <= 8 for made in model.passes)
    assert vectors(found[ME, "long"]) == [[15, index] for index in range(7)]
    assert vectors(found[ME, "many"]) == [[1, index] for index in range(30)]


def test_a_long_list_does_not_delay_a_short_one(model: FakeModel, embedder: Embedder) -> None:
    embedder.add_request(add_embedding("list", [[1] * 20] * 100), ME)
    embedder.step(busy=False)
    embedder.add_request(add_embedding("one", [[2]]), OTHER)
    ended: list[str] = []
    while not ended:
        ended += [output.request_id for _, output in embedder.step(busy=False)]
    assert ended == ["one"]
    assert len(model.passes) <= 3


def test_passes_are_small_while_text_is_generated_but_always_move_on(model: FakeModel, embedder: Embedder) -> None:
    embedder.add_request(add_embedding("a", [[1] * 3] * 10 + [[2] * 20]), ME)
    found = finish(embedder, busy=True)
    assert max(sum(map(len, made)) for made in model.passes[:-1]) <= 40 // BUSY_SHARE
    assert model.passes[-1] == [[2] * 20]  # longer than a small pass, and still whole
    assert len(vectors(found[ME, "a"])) == 11


class SlowModel(FakeModel):
    """Each of its passes takes a while by the clock of an engine that generates."""

    seconds = 0.06

    def __init__(self, engine: Harness) -> None:
        super().__init__()
        self._engine = engine

    def compute(self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None) -> Any:
        self._engine.now += self.seconds
        return super().compute(inputs, first_lengths)


@pytest.mark.parametrize("is_own", [False, True])
def test_fault_fairness_long_passes_leave_most_of_the_time_to_other_accounts_generation(is_own: bool) -> None:
    generation = Harness()
    accounts = generation.core.accounts
    turns = PassTurns(accounts, clock=lambda: generation.now)
    models = [SlowModel(generation), SlowModel(generation)]
    embedders = [Embedder(model, max_queue_len=3, accounts=accounts, turns=turns) for model in models]
    generation.add("g", [1, 2, 3], 100, account=AccountRef(1), ignore_eos=True)
    for embedder in embedders:
        embedder.add_request(add_embedding("e", [[1] * 20] * 150, account=AccountRef(1 if is_own else 2)), ME)
    num_turns, step_seconds = 60, 0.009
    for _ in range(num_turns):
        generation.step(step_seconds)
        for embedder in embedders:
            embedder.step(busy=True)
    num_passes = sum(len(model.passes) for model in models)
    if is_own:
        assert num_passes == 2 * num_turns
    else:
        assert 2 <= num_passes <= 1 + num_turns * step_seconds / (GENERATION_TURNS * SlowModel.seconds)


def test_fault_fairness_passes_beside_generation_are_short_however_slow_a_text_is() -> None:
    """64 short texts in a pass, each of which takes a CPU as long as eight tokens do, took 60 ms beside generation."""

    class EachTakesTime(FakeModel):
        max_num_tokens, max_num_inputs = 4096, 1024
        now = 0.0

        def compute(self, inputs: Sequence[TokenIds | list[int]], first_lengths: list[int] | None = None) -> Any:
            self.now += 0.001 * len(inputs)
            return super().compute(inputs, first_lengths)

    accounts, model = Accounts(), EachTakesTime()
    embedder = Embedder(model, max_queue_len=3, accounts=accounts, turns=PassTurns(accounts, lambda: model.now))
    embedder.add_request(add_embedding("e", [[1] * 4] * 1000), ME)
    finish(embedder, busy=True)
    seconds = [0.001 * len(made) for made in model.passes]
    assert max(seconds[1:]) < 1.1 * BUSY_SECONDS
    assert sum(seconds[1:-1]) > 0.8 * BUSY_SECONDS * len(seconds[1:-1]), "no pass is shorter than need be"


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([], InvalidRequestError, "must not be empty"),
        ([[1], []], InvalidRequestError, "no tokens"),
        ([[1] * 21], ContextLengthError, "at most 20 tokens, but an input has 21"),
        ([[VOCAB_SIZE]], InvalidRequestError, "outside 0 to 99"),
        ([[-1]], InvalidRequestError, "outside 0 to 99"),
    ],
    ids=str,
)
def test_wrong_inputs_are_refused_alone(
    inputs: list[list[int]], error: type[RequestError], message: str, embedder: Embedder
) -> None:
    embedder.add_request(add_embedding("good", [[1]]), ME)
    with pytest.raises(error, match=message) as refusal:
        embedder.add_request(add_embedding("bad", inputs), ME)
    assert refusal.value.status == 400
    assert list(finish(embedder)) == [(ME, "good")]


def test_fault_stalls_thousands_of_short_texts_to_embed_are_verified_together(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 of them, looked at one by one, took 10 ms of the engine's thread, and 42 on a busy machine."""
    looks: list[int] = []
    frombuffer = np.frombuffer

    def note(joined: bytes, dtype: Any) -> Any:
        looks.append(len(joined))
        return frombuffer(joined, dtype)

    monkeypatch.setattr(np, "frombuffer", note)
    embedder.add_request(add_embedding("many", [[1, 2, 3]] * 2048), ME)
    assert len(looks) == 1, "of 6,144 ids"
    with pytest.raises(InvalidRequestError, match="outside 0 to 99"):
        embedder.add_request(add_embedding("wrong", [[1] * 20] * 2047 + [[1, VOCAB_SIZE]]), ME)
    assert max(looks) < 2 * VERIFIED_TOGETHER * np.dtype(np.uint32).itemsize


def test_the_queue_is_bounded_and_ids_are_unique(embedder: Embedder) -> None:
    for index in range(3):
        embedder.add_request(add_embedding(str(index), [[1]]), ME)
    with pytest.raises(InvalidRequestError, match="is in use"):
        embedder.add_request(add_embedding("0", [[1]]), ME)
    with pytest.raises(QueueFullError, match="3 requests"):
        embedder.add_request(add_embedding("3", [[1]]), ME)
    finish(embedder)
    embedder.add_request(add_embedding("3", [[1]]), ME)


def test_what_is_not_finite_fails_its_request_alone(embedder: Embedder) -> None:
    embedder.add_request(add_embedding("bad", [[1], [BROKEN], [2]]), ME)
    embedder.add_request(add_embedding("good", [[1]]), ME)
    found = finish(embedder)
    refusal = found[ME, "bad"].refusal
    assert refusal is not None
    assert refusal.error_status == 500
    assert vectors(found[ME, "good"]) == [[1, 1]]
    assert embedder.num_in_hand == 0


def test_abort_ends_a_request_of_that_client_alone(model: FakeModel, embedder: Embedder) -> None:
    for client in (ME, OTHER):
        embedder.add_request(add_embedding("a", [[1] * 20] * 6), client)
    embedder.step(busy=False)
    embedder.abort(["a", "unknown"], ME)
    num_passes = len(model.passes)
    assert list(finish(embedder)) == [(OTHER, "a")]
    assert len(model.passes) - num_passes == 3  # the five that OTHER still had, two at a time


def test_metrics_count_what_was_answered(embedder: Embedder) -> None:
    reranker = Embedder(FakeModel(), max_queue_len=3)
    metrics = EmbeddingMetrics({"tiny": embedder}, {"judge": reranker})
    embedder.add_request(add_embedding("a", [[1], [2, 2]]), ME)
    assert b'tessera:num_embedding_requests{model_name="tiny"} 1.0' in metrics.render()
    finish(embedder)
    text = metrics.render()
    assert b'tessera:embedding_requests_total{model_name="tiny"} 1.0' in text
    assert b'tessera:embedding_tokens_total{model_name="tiny"} 3.0' in text
    assert b'tessera:num_embedding_requests{model_name="tiny"} 0.0' in text
    reranker.add_request(add_embedding("b", [[1, 2, 3]], "scorer", [1]), ME)
    assert b'tessera:num_scoring_requests{model_name="judge"} 1.0' in metrics.render()
    finish(reranker)
    text = metrics.render()
    assert b'tessera:scoring_requests_total{model_name="judge"} 1.0' in text
    assert b'tessera:scoring_tokens_total{model_name="judge"} 3.0' in text
    assert b'tessera:embedding_requests_total{model_name="tiny"} 1.0' in text


def test_an_engine_without_generation_refuses_text() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/embeddings"):
        EmbeddingOnlyCore().add_request(AddRequest("a", array("i", [1]), SamplingParams(max_tokens=1), 0.0), ME)


# -- through the process --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engine(folder: Path, **settings: Any) -> AsyncIterator[tuple[EngineSupervisor, EngineClient]]:
    run_dir = make_run_dir()
    supervisor = EngineSupervisor(EngineConfig(model=str(folder), device="cpu", **settings), run_dir)
    client = EngineClient(run_dir)
    supervisor.start()
    await client.start()
    try:
        await supervisor.wait_started()
        await client.wait_first_ready()
        yield supervisor, client
    finally:
        await client.close()
        await supervisor.stop()


def test_an_encoder_is_served_and_errors_cross_whole(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path / "tiny")
    write_pooling(folder, "cls_token")

    async def run() -> None:
        async with engine(folder, served_name="tiny") as (_, client):
            info = client.info
            assert info is not None
            assert not info.generates
            (embedding,) = info.embeddings
            assert (embedding.role, embedding.pooling, embedding.dimension) == ("main", "cls", 48)
            alone = await client.embed(inputs())
            assert alone.shape == (len(inputs()), 48)
            assert np.allclose(np.linalg.norm(alone, axis=1), 1)
            many = await asyncio.gather(*(client.embed([token_ids]) for token_ids in inputs()))
            assert np.allclose(np.concatenate(many), alone, atol=1e-6)
            results = await asyncio.gather(
                client.embed([[10**9]]),
                client.embed([[1] * 65]),
                client.embed(inputs()),
                client.embed([[1]], role="beside"),
                return_exceptions=True,
            )
            assert isinstance(results[0], InvalidRequestError)
            assert isinstance(results[1], ContextLengthError)
            assert isinstance(results[2], np.ndarray)
            assert np.allclose(results[2], alone, atol=1e-6)
            assert isinstance(results[3], InvalidRequestError)
            with pytest.raises(InvalidRequestError, match="makes no text"):
                await anext(client.submit(array("i", [1]), SamplingParams(max_tokens=1)))
            assert b'tessera:embedding_requests_total{model_name="tiny"} 7.0' in await client.metrics()

    asyncio.run(run())


def test_an_engine_that_dies_fails_what_is_in_flight_and_comes_back(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path / "tiny")

    async def run() -> None:
        async with engine(folder) as (supervisor, client):
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGSTOP)  # so that the request surely is in flight
            request = asyncio.ensure_future(client.embed(inputs()))
            await asyncio.sleep(0)
            os.kill(supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineError) as error:
                await request
            assert error.value.code == "engine_died"
            while not client.health()[0]:
                with pytest.raises(EngineError):
                    await client.embed(inputs())
                await asyncio.sleep(0.05)
            assert (await client.embed(inputs())).shape == (len(inputs()), 48)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_cancelled_request_is_given_up(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path / "tiny")

    async def run() -> None:
        async with engine(folder, max_num_batched_tokens=64, max_num_seqs=1) as (_, client):
            request = asyncio.ensure_future(client.embed([[1] * 64] * 2048))
            await asyncio.sleep(0)
            await client.embed([[1]])
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            while b'num_embedding_requests{model_name="tiny"} 0.0' not in (text := await client.metrics()):
                await asyncio.sleep(0.01)
            assert b'embedding_requests_total{model_name="tiny"} 1.0' in text

    asyncio.run(asyncio.wait_for(run(), 60))
