"""`tessera serve` with an encoder alone, and with one that embeds and one that scores beside a model that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.engine.golden.embedders import decoder, encoder
from tests.engine.golden.scorers import scorer
from tests.support.models.tiny_classifiers import build_classifier
from tests.support.models.tiny_encoder import build_encoder, write_pooling
from tests.support.servers.embedding_server import cat, word_piece
from tests.support.servers.server_fixture import DEADLINE, Server, async_client, running_server, stream_answer


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_encoder(tmp_path_factory.mktemp("encoder") / "minibert")
    write_pooling(folder, "mean_tokens")
    word_piece().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_classifier("bert", tmp_path_factory.mktemp("reranker") / "judge")
    word_piece().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def both(
    tiny_folder: Path, encoder_folder: Path, reranker_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("logs") / "both.log"
    beside = ("--embedding-model", str(encoder_folder), "--reranker-model", str(reranker_folder))
    options = ("--num-kv-blocks", "512", *beside)
    with running_server(tiny_folder, log_file, *options) as server:
        yield server


def sdk_for(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=DEADLINE)


def test_an_encoder_alone_is_an_embedding_server(encoder_folder: Path, tmp_path: Path) -> None:
    with running_server(encoder_folder, tmp_path / "log", "--pooling", "cls") as server:
        assert "48 dimensions, cls pooling, of at most 64 tokens" in server.log
        assert "/v1/embeddings" in server.log
        assert "KV cache" not in server.log
        with sdk_for(server) as sdk:
            answer = sdk.embeddings.create(model="minibert", input=["The cat sat.", "a tree"])
            with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
                sdk.chat.completions.create(model="minibert", messages=[{"role": "user", "content": "hello"}])
        expected = encoder(encoder_folder, pooling="cls").compute([cat("the", "cat", "sat", "."), cat("a", "tree")])
        assert np.allclose([item.embedding for item in answer.data], expected, atol=1e-6)
        assert server.http.get("/health").status_code == 200
        assert server.metrics()["embedding_requests_total"] == 1


def test_both_models_embed_under_their_names(both: Server, tiny_folder: Path, encoder_folder: Path) -> None:
    with sdk_for(both) as sdk:
        beside = sdk.embeddings.create(model="minibert", input="The cat sat.")
        main = sdk.embeddings.create(model=both.model, input=[[5, 6, 7], [8]])
    expected = encoder(encoder_folder).compute([cat("the", "cat", "sat", ".")])
    assert np.allclose(beside.data[0].embedding, expected[0], atol=1e-6)
    expected = decoder(tiny_folder, "last").compute([[5, 6, 7], [8]])
    assert np.allclose([item.embedding for item in main.data], expected, atol=1e-5)


def test_the_reranker_beside_scores_pairs(both: Server, reranker_folder: Path) -> None:
    documents = ["The dog ran.", "It sat on a mat.", "a tree"]
    answer = both.post({"query": "the cat", "documents": documents, "top_n": 2}, "/v1/rerank")
    pairs = [[*cat("the", "cat"), *cat(*words_of(text))[1:]] for text in documents]
    logits = scorer(reranker_folder).compute(pairs, [4] * 3)[:, 0]
    order = np.argsort(-logits)[:2]
    assert answer["model"] == "judge"
    assert [result["index"] for result in answer["results"]] == order.tolist()
    scores = [result["relevance_score"] for result in answer["results"]]
    assert np.allclose(scores, 1 / (1 + np.exp(-logits[order])), atol=1e-6)
    assert "scores      judge beside it, 1 label, sigmoid, of at most 66 tokens" in both.log
    assert both.metrics()['scoring_requests_total{model_name="judge"}'] == 1
    assert [model["id"] for model in both.http.get("/v1/models").json()["data"]] == [both.model, "minibert", "judge"]


def words_of(text: str) -> list[str]:
    return text.lower().replace(".", " .").split()


def test_generation_and_embeddings_do_not_disturb_each_other(both: Server) -> None:
    prompts = [[10 + index, 20, 30] for index in range(4)]
    texts = [f"the cat sat on {'small ' * index} tree" for index in range(40)]
    alone = [both.tokens(prompt, 60) for prompt in prompts]
    embedded = both.post({"model": "minibert", "input": texts}, "/v1/embeddings")["data"]

    async def together() -> None:
        async with async_client(both) as client:
            answers = [stream_answer(client, both.body(prompt, 60)) for prompt in prompts]
            requests = [
                client.post("/v1/embeddings", json={"model": model, "input": texts})
                for model in ("minibert", both.model, "minibert", both.model)
            ]
            results = await asyncio.gather(asyncio.gather(*answers), asyncio.gather(*requests))
            assert [answer.token_ids for answer in results[0]] == alone
            assert all(response.status_code == 200 for response in results[1])
            for response in results[1][::2]:
                for found, expected in zip(response.json()["data"], embedded, strict=True):
                    assert np.allclose(found["embedding"], expected["embedding"], atol=1e-6)

    asyncio.run(together())
    both.until_idle()


@pytest.mark.parametrize("arguments", [("--embedding-model", "{tiny}"), ("--embedding-model", "{missing}")], ids=str)
def test_what_cannot_be_served_beside_is_a_clear_error(
    arguments: tuple[str, ...], tiny_folder: Path, tmp_path: Path
) -> None:
    paths = {"tiny": str(tmp_path / "other"), "missing": str(tmp_path / "nothing")}
    (tmp_path / "other").symlink_to(tiny_folder)
    filled = [argument.format(**paths) for argument in arguments]
    log_file = tmp_path / "log"
    with (
        pytest.raises(AssertionError, match="exit code 2"),
        running_server(tiny_folder, log_file, *filled, "--served-model-name", "chat"),
    ):
        pass
    assert "only an encoder can be served" in log_file.read_text() or "there is no folder" in log_file.read_text()
