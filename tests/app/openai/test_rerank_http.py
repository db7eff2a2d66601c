"""/v1/rerank, /v1/score and /v1/classify over HTTP: shapes, pairs, errors; the engine's client is a stand-in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tessera.app.openai.rerank.pairs import AFTER, BEFORE, INSTRUCTION, PairLimits, encode_pairs
from tessera.app.openai.rerank.scorers import cosines, scores_of
from tessera.app.settings import AppSettings
from tessera.app.text.tokenizer import HuggingFaceTokenizer
from tessera.engine.contract.errors import EngineError, QueueFullError
from tessera.engine.contract.messages import EmbedderRole, ScorerInfo
from tessera.engine.ipc.client import Vectors
from tests.support.fakes.fake_client import INFO, FakeClient, always
from tests.support.models.tiny_encoder import CLS, SEP, VOCAB
from tests.support.servers.embedding_server import BESIDE, MAIN, cat, embedded, word_piece
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder
from tests.support.servers.operations import OPERATIONS

SCORER = ScorerInfo(
    beside=True,
    form="pair",
    architecture="BertModel",
    labels=("LABEL_0",),
    scores="sigmoid",
    vocab_size=len(VOCAB),
    max_input_tokens=12,
)
CLASSES = msgspec.structs.replace(SCORER, labels=("bad", "fair", "good"), scores="softmax")
YES_NO = msgspec.structs.replace(SCORER, form="yes_no", beside=False, vocab_size=512, max_input_tokens=2000)


@dataclasses.dataclass
class ScoreCall:
    inputs: list[list[int]]
    role: EmbedderRole
    first_lengths: list[int]


class ScoringClient(FakeClient):
    """Scores an input by its number of tokens and the first of its second text."""

    def __init__(self, scorer: ScorerInfo | None = SCORER, error: Exception | None = None, **changes: Any) -> None:
        fields = {"embeddings": (MAIN, BESIDE), "scorer": scorer, **changes}
        super().__init__(always([]), info=msgspec.structs.replace(INFO, **fields))
        self.calls: list[ScoreCall] = []
        self.error = error
        self.num_labels = 0 if scorer is None else len(scorer.labels)

    async def embed(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        role: EmbedderRole = "main",
        first_lengths: Sequence[int] = (),
        account: Any = None,
    ) -> Vectors:
        if self.error is not None:
            raise self.error
        self.calls.append(ScoreCall([[*token_ids] for token_ids in inputs], role, list(first_lengths)))
        return logits_for(inputs, self.num_labels) if role == "scorer" else embedded(inputs)


def logits_for(inputs: Sequence[Sequence[int]], num_labels: int = 1) -> Vectors:
    rows = [[np.sin(sum(token_ids) + label) * 3 for label in range(num_labels)] for token_ids in inputs]
    return np.array(rows, np.float32)


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


def pair_of(first: str, second: str) -> list[int]:
    return [*cat(*first.split()), *cat(*second.split())[1:]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = tmp_path_factory.mktemp("rerank")
    for name in ("encoder", "judge"):
        (folder / name).mkdir()
        word_piece().save(str(folder / name / "tokenizer.json"))
    return settings_for(
        write_model_folder(folder / "tiny"),
        embedding_folder=str(folder / "encoder"),
        embedding_model_names=("encoder",),
        reranker_folder=str(folder / "judge"),
        reranker_model_names=("judge",),
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    """A model that scores and has no other beside it."""
    return settings_for(write_model_folder(tmp_path_factory.mktemp("alone") / "tiny"))


def post(client: FakeClient, settings: AppSettings, path: str, **body: Any) -> httpx.Response:
    return call(client, settings, "POST", path, json=body)


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    message: str = error["message"]
    return message


# -- rerank ---------------------------------------------------------------------------------------

DOCUMENTS = ["a dog ran", "the cat sat", "a red tree"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_by_relevance(path: str, settings: AppSettings) -> None:
    client = ScoringClient()
    body = post(client, settings, path, model="judge", query="the cat", documents=[*DOCUMENTS[:2], {"text": "a tree"}])
    answer = body.json()
    inputs = [pair_of("the cat", text) for text in (*DOCUMENTS[:2], "a tree")]
    assert client.calls == [ScoreCall(inputs, "scorer", [4, 4, 4])]
    scores = sigmoid(logits_for(inputs)[:, 0])
    assert set(answer) == {"id", "model", "results", "usage"}
    assert answer["id"].startswith("rerank-")
    assert answer["model"] == "judge"
    assert [result["index"] for result in answer["results"]] == np.argsort(-scores).tolist()
    for result in answer["results"]:
        assert np.isclose(result["relevance_score"], scores[result["index"]])
        assert result["document"] == {"text": (*DOCUMENTS[:2], "a tree")[result["index"]]}
    total = sum(map(len, inputs))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}


def test_top_n_and_documents_left_out(settings: AppSettings) -> None:
    def results(**fields: Any) -> list[dict[str, Any]]:
        answer = post(ScoringClient(), settings, "/v1/rerank", query="the cat", documents=DOCUMENTS, **fields).json()
        found: list[dict[str, Any]] = answer["results"]
        return found

    everything = results()
    assert len(everything) == 3
    assert results(top_n=2) == everything[:2]
    assert results(top_n=0) == results(top_n=None) == results(top_n=99) == everything
    assert all(set(result) == {"index", "relevance_score"} for result in results(return_documents=False))


def test_equal_scores_keep_the_order_of_the_documents(settings: AppSettings) -> None:
    answer = post(ScoringClient(), settings, "/v1/rerank", query="the cat", documents=["a dog"] * 5).json()
    assert [result["index"] for result in answer["results"]] == list(range(5))


def test_logits_as_they_are(settings: AppSettings) -> None:
    answer = post(ScoringClient(), settings, "/v1/score", text_1="a", text_2="cat", use_activation=False).json()
    assert np.isclose(answer["data"][0]["score"], logits_for([pair_of("a", "cat")])[0, 0])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ("identity", [[-1000.0, 2.0]]),
        ("sigmoid", [[0.0, 1 / (1 + np.exp(-2))]]),
        ("softmax", [[0.0, 1.0]]),
        ("tanh", [[-1.0, np.tanh(2)]]),
    ],
)
def test_score_functions(scores: str, expected: Any) -> None:
    scorer = msgspec.structs.replace(CLASSES, scores=scores)
    with np.errstate(all="raise", under="ignore"):
        assert np.allclose(scores_of(np.array([[-1000.0, 2.0]]), scorer, True), expected)


# -- score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "the cat", "text_2": "a dog"}, [("the cat", "a dog")]),
        ({"text_1": "a", "text_2": ["dog", "cat"]}, [("a", "dog"), ("a", "cat")]),
        ({"text_1": ["a"], "text_2": ["dog", "cat"]}, [("a", "dog"), ("a", "cat")]),
        ({"text_1": ["a", "the"], "text_2": ["dog", "cat"]}, [("a", "dog"), ("the", "cat")]),
        ({"queries": "a", "documents": [{"text": "dog"}]}, [("a", "dog")]),
        ({"queries": "a", "items": ["dog"]}, [("a", "dog")]),
        ({"data_1": "a", "data_2": ["dog"], "text_1": None}, [("a", "dog")]),
    ],
    ids=str,
)
def test_pairs(body: dict[str, Any], pairs: list[tuple[str, str]], path: str, settings: AppSettings) -> None:
    client = ScoringClient()
    answer = post(client, settings, path, model="judge", **body).json()
    inputs = [pair_of(*pair) for pair in pairs]
    assert client.calls[0].inputs == inputs
    assert client.calls[0].first_lengths == [len(first.split()) + 2 for first, _ in pairs]
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "judge")
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(len(pairs))]
    assert np.allclose([item["score"] for item in answer["data"]], sigmoid(logits_for(inputs)[:, 0]))
    assert answer["usage"]["total_tokens"] == sum(map(len, inputs))


@pytest.mark.parametrize(("name", "role"), [("encoder", "beside"), ("tiny", "main")])
def test_embeddings_score_by_their_cosine(name: str, role: str, settings: AppSettings) -> None:
    client = ScoringClient(None)
    answer = post(client, settings, "/v1/score", model=name, text_1="he", text_2=["hell", "he"]).json()
    ((made,)) = client.calls
    assert (made.role, len(made.inputs), made.first_lengths) == (role, 3, [])
    assert role != "main" or made.inputs == [ids("he"), ids("hell"), ids("he")]
    query, *documents = embedded(made.inputs)
    assert np.allclose([item["score"] for item in answer["data"]], [float(query @ other) for other in documents])
    assert answer["usage"]["total_tokens"] == sum(map(len, made.inputs))
    ranked = post(client, settings, "/v1/rerank", model=name, query="he", documents=["hell", "he"]).json()
    assert ranked["results"][0]["index"] == 1


def test_the_model_of_requests_that_name_none(settings: AppSettings, alone: AppSettings) -> None:
    body = {"text_1": "a", "text_2": "cat"}
    assert post(ScoringClient(), settings, "/v1/score", **body).json()["model"] == "judge"
    assert post(ScoringClient(None), settings, "/v1/score", **body).json()["model"] == "encoder"
    own = msgspec.structs.replace(SCORER, beside=False, vocab_size=512)
    assert post(ScoringClient(own, embeddings=()), alone, "/v1/score", **body).json()["model"] == "tiny"


# -- classify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classes(path: str, settings: AppSettings) -> None:
    client = ScoringClient(CLASSES)
    answer = post(client, settings, path, model="judge", input=["the cat", [CLS, 9, SEP]]).json()
    inputs = [cat("the", "cat"), [CLS, 9, SEP]]
    assert client.calls == [ScoreCall(inputs, "scorer", [])]
    logits = logits_for(inputs, 3).astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for index, item in enumerate(answer["data"]):
        assert set(item) == {"index", "label", "probs", "num_classes"}
        assert (item["index"], item["num_classes"]) == (index, 3)
        assert np.allclose(item["probs"], expected[index])
        assert item["label"] == CLASSES.labels[int(expected[index].argmax())]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


def test_a_model_of_several_classes_does_not_rank(settings: AppSettings) -> None:
    response = post(ScoringClient(CLASSES), settings, "/v1/rerank", model="judge", query="a", documents=["cat"])
    assert "tells 3 classes apart and does not score pairs: use /v1/classify" in refused(response, 400, "model")


def test_a_model_without_classes_does_not_classify(settings: AppSettings, alone: AppSettings) -> None:
    for response in (
        post(ScoringClient(), settings, "/v1/classify", model="encoder", input="cat"),
        post(ScoringClient(YES_NO), alone, "/v1/classify", input="cat"),
    ):
        assert "does not classify texts" in refused(response, 400, "model")


# -- yes and no -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_firsts", "num_seconds"), [(1, 1), (1, 200), (130, 130)])
def test_cosines_are_those_of_each_pair(num_firsts: int, num_seconds: int) -> None:
    rng = np.random.default_rng(0)
    firsts, seconds = (rng.standard_normal((count, 33)).astype(np.float32) for count in (num_firsts, num_seconds))
    found = cosines(firsts, seconds)
    assert found.tolist() == (firsts.astype(np.float64) * seconds.astype(np.float64)).sum(axis=1).tolist()


def test_qwen3_rerankers_prompt(alone: AppSettings) -> None:
    client = ScoringClient(YES_NO)
    body = {"query": "Where?", "documents": ["Here.", "There."]}
    answer = post(client, alone, "/v1/rerank", **body).json()
    question = f"<Instruct>: {INSTRUCTION}\n<Query>: Where?\n<Document>: "
    inputs = [[*ids(BEFORE), *ids(question + text), *ids(AFTER)] for text in body["documents"]]
    assert client.calls == [ScoreCall(inputs, "scorer", [len(token_ids) for token_ids in inputs])]
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert np.allclose([scores[0], scores[1]], sigmoid(logits_for(inputs)[:, 0]))
    post(client, alone, "/v1/rerank", **body, instruction="Find it")
    assert client.calls[1].inputs[0] == [
        *(*ids(BEFORE), *ids("<Instruct>: Find it\n<Query>: Where?\n<Document>: Here."), *ids(AFTER))
    ]


def test_what_is_cut_leaves_the_prompt_whole(alone: AppSettings) -> None:
    client = ScoringClient(YES_NO)
    post(client, alone, "/v1/rerank", query="Where?", documents=["x" * 3000], truncate_prompt_tokens=-1)
    (token_ids,) = client.calls[0].inputs
    assert len(token_ids) == YES_NO.max_input_tokens
    assert token_ids[: len(ids(BEFORE))] == ids(BEFORE)
    assert token_ids[-len(ids(AFTER)) :] == ids(AFTER)


def test_an_instruction_is_for_models_that_are_asked(settings: AppSettings) -> None:
    for name in ("judge", "encoder"):
        response = post(
            ScoringClient(), settings, "/v1/rerank", model=name, query="a", documents=["cat"], instruction="Find it"
        )
        assert "takes no instruction" in refused(response, 400, "instruction")


# -- lengths --------------------------------------------------------------------------------------


def test_what_is_too_long_is_refused_unless_it_may_be_cut(settings: AppSettings) -> None:
    client = ScoringClient()

    def rerank(**fields: Any) -> httpx.Response:
        body = {"model": "judge", "query": "the cat", "documents": ["a dog", "dog " * 9], **fields}
        return post(client, settings, "/v1/rerank", **body)

    response = rerank()
    message = "at most 12 tokens, but the pair of query and documents[1] has 14"
    assert message in refused(response, 400, "documents")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    rerank(truncate_prompt_tokens=-1)
    rerank(truncate_prompt_tokens=9)
    rerank(max_tokens_per_doc=1, max_tokens_per_query=1)
    rerank(documents=["dog"] * 2, max_tokens_per_doc=0)
    dogs = [made.inputs for made in client.calls]
    assert dogs[0] == [pair_of("the cat", "a dog"), pair_of("the cat", "dog " * 7)]
    assert dogs[1] == [pair_of("the cat", "a dog"), pair_of("the cat", "dog " * 4)]
    assert dogs[2] == [pair_of("the", "a"), pair_of("the", "dog")]
    long_query = post(client, settings, "/v1/score", text_1="cat " * 9, text_2=["dog"], truncate_prompt_tokens=8)
    assert long_query.status_code == 200
    assert client.calls[-1].inputs == [pair_of("cat " * 4, "dog")]


@pytest.mark.parametrize("keep", [0, -2, 1.5, "4", 13, 2])
def test_wrong_truncation_is_refused(keep: Any, settings: AppSettings) -> None:
    response = post(
        ScoringClient(),
        settings,
        "/v1/rerank",
        model="judge",
        query="a",
        documents=["cat"],
        truncate_prompt_tokens=keep,
    )
    refused(response, 400, "truncate_prompt_tokens")


@pytest.mark.parametrize("most", [3, 4, 5, 9, 12, 13, 30])
def test_pairs_are_cut_as_by_the_tokenizers_library(most: int) -> None:
    texts = [
        ("the cat", "a dog ran on"),
        ("the cat sat on a mat", "a dog"),
        ("the " * 8, "a " * 9),
        ("", "a"),
        ("", ""),
    ]
    own = HuggingFaceTokenizer(word_piece(), {})
    theirs = word_piece()
    theirs.no_padding()
    theirs.enable_truncation(most, strategy="longest_first")
    expected = [theirs.encode(*pair) for pair in texts]
    found = own.encode_pairs(texts, most)
    assert [token_ids for token_ids, _ in found] == [encoding.ids for encoding in expected]
    assert [first for _, first in found] == [[*encoding.type_ids, 1].index(1) for encoding in expected]


def test_pairs_of_a_tokenizer_without_token_types() -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, "a"))
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    encoded = encode_pairs(HuggingFaceTokenizer(inner, {}), "pair", [("a", "b")], PairLimits(None, None, None))
    assert encoded == [([0, 2, 2, 1, 2], 5)]


@pytest.mark.parametrize(
    "pair", ["$A:0 $B:1", "[x]:1 $A:0 [y]:0 [x]:1 $B:1", "$B:1 [x]:0 $A:0 [y]:0", "$A:1 [y]:1 $B:0"]
)
def test_pairs_of_any_form_are_those_of_the_tokenizers_library(pair: str) -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[x]": 2, "[y]": 3}, "a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A", pair=pair, special_tokens=[("[x]", 2), ("[y]", 3)]
    )
    texts = [("a", "b"), ("a b a", "b"), ("b", "a a"), ("", "b b"), ("a", ""), ("", "")]
    expected = [inner.encode(*each) for each in texts]
    found = HuggingFaceTokenizer(inner, {}).encode_pairs(texts, None)
    assert [token_ids for token_ids, _ in found] == [encoding.ids for encoding in expected]
    assert [first for _, first in found] == [[*encoding.type_ids, 1].index(1) for encoding in expected]


# -- wrong requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": 3, "documents": ["a"]}, "query"),
        ("rerank", {"query": {"txt": "a"}, "documents": ["a"]}, "query"),
        ("rerank", {"query": ["a"], "documents": ["a"]}, "query"),
        ("rerank", {"query": "a"}, "documents"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": "a"}, "documents"),
        ("rerank", {"query": "a", "documents": ["a", 3]}, "documents[1]"),
        ("rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("rerank", {"query": "a", "documents": ["x" * (2**20 + 1)]}, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": "all"}, "top_n"),
        ("rerank", {"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents"),
        ("rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
        ("rerank", {"query": "a", "documents": ["a"], "truncation_side": "left"}, "truncation_side"),
        ("rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("score", {}, None),
        ("score", {"text_1": "a"}, None),
        ("score", {"text_1": "a", "documents": "a"}, None),
        ("score", {"text_1": "a", "text_2": "a", "queries": "a"}, None),
        ("score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("score", {"queries": ["a", "b"], "documents": ["a"] * 3}, "queries"),
        ("score", {"text_1": "a", "text_2": ["a", 5]}, "text_2[1]"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"text_1": "a", "text_2": "a", "use_activation": "no"}, "use_activation"),
        ("classify", {}, "input"),
        ("classify", {"input": ""}, "input"),
        ("classify", {"input": [1, 512]}, "input"),
        ("classify", {"input": "a", "messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_requests_name_the_field(
    path: str, body: dict[str, Any], param: str | None, settings: AppSettings
) -> None:
    client = ScoringClient()
    refused(post(client, settings, f"/v1/{path}", model="judge", **body), 400, param)
    assert not client.calls


def test_models_that_are_not_there_or_score_nothing(settings: AppSettings, alone: AppSettings) -> None:
    body = {"query": "a", "documents": ["cat"]}
    assert "does not exist" in refused(
        post(ScoringClient(), settings, "/v1/rerank", model="other", **body), 404, "model"
    )
    nothing = ScoringClient(None, embeddings=())
    assert "makes no embeddings" in refused(post(nothing, alone, "/v1/rerank", model="tiny", **body), 400, "model")
    chat = {"model": "judge", "messages": [{"role": "user", "content": "hello"}]}
    response = post(ScoringClient(), settings, "/v1/chat/completions", **chat)
    assert "scores texts and makes none: use /v1/rerank" in refused(response, 400, "model")
    own = ScoringClient(msgspec.structs.replace(SCORER, beside=False), embeddings=(), generates=False)
    response = post(own, alone, "/v1/chat/completions", **{**chat, "model": "tiny"})
    assert "use /v1/rerank, /v1/score or /v1/classify" in refused(response, 400, "model")
    assert "makes no embeddings" in refused(post(own, alone, "/v1/embeddings", input="cat"), 400, "model")


def test_a_model_without_a_tokenizer_takes_no_texts(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny")
    for file in folder.glob("*tokenizer*"):
        file.unlink()
    own = msgspec.structs.replace(CLASSES, beside=False, vocab_size=512)
    bare = settings_for(folder)
    response = post(ScoringClient(own), bare, "/v1/classify", input="cat")
    assert "no tokenizer.json" in refused(response, 400, "model")
    assert post(ScoringClient(own), bare, "/v1/classify", input=[1, 2]).status_code == 200


@pytest.mark.parametrize(("error", "status"), [(EngineError("it failed"), 500), (QueueFullError("full"), 429)])
def test_the_engines_errors_pass_through(error: Exception, status: int, settings: AppSettings) -> None:
    response = post(ScoringClient(error=error), settings, "/v1/rerank", query="a", documents=["cat"])
    assert response.status_code == status


def test_models_are_listed(settings: AppSettings) -> None:
    listed = call(ScoringClient(), settings, "GET", "/v1/models").json()["data"]
    found = [(model["id"], model["max_model_len"]) for model in listed]
    assert found == [("tiny", 128), ("encoder", 10), ("judge", 12)]
    assert call(ScoringClient(), settings, "GET", "/v1/models/judge").json()["id"] == "judge"


def test_invocations_are_told_apart_by_their_fields(settings: AppSettings) -> None:
    answer = post(ScoringClient(), settings, "/invocations", query="a", documents=["cat"]).json()
    assert answer["results"][0]["index"] == 0


def test_examples_are_accepted(settings: AppSettings) -> None:
    client = ScoringClient(msgspec.structs.replace(SCORER, max_input_tokens=64))
    for operation in OPERATIONS:
        if operation.id in ("rerank", "score", "classify"):
            assert operation.examples
            for example in operation.examples.values():
                body = json.loads(json.dumps(example).replace("MODEL", "judge"))
                assert post(client, settings, operation.path, **body).status_code == 200


# -- the wrong endpoint, and tokens ---------------------------------------------------------------


def test_a_model_that_scores_is_named_where_it_makes_no_embeddings(settings: AppSettings) -> None:
    response = post(ScoringClient(), settings, "/v1/embeddings", model="judge", input="the cat")
    assert refused(response, 400, "model") == (
        "The model 'judge' scores texts and makes no embeddings: use /v1/rerank or /v1/score."
    )


@pytest.mark.parametrize(("model", "most"), [("encoder", BESIDE.max_input_tokens), ("judge", SCORER.max_input_tokens)])
def test_texts_become_tokens_of_the_model_that_is_named(model: str, most: int, settings: AppSettings) -> None:
    """Of any length, so that a client can count before it cuts."""
    text = "the cat " * 80
    answer = post(ScoringClient(), settings, "/tokenize", model=model, prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == cat(*text.split())
    assert (answer["count"], answer["max_model_len"], answer["token_strs"][0]) == (162, most, "[CLS]")
    back = post(ScoringClient(), settings, "/detokenize", model=model, tokens=answer["tokens"][:3])
    assert back.json()["prompt"].split() == ["[CLS]", "the", "cat"]
    assert "ids go from" in refused(
        post(ScoringClient(), settings, "/detokenize", model=model, tokens=[511]), 400, "tokens"
    )
    chat = {"model": model, "messages": [{"role": "user", "content": "the cat"}]}
    refused(post(ScoringClient(), settings, "/tokenize", **chat), 400, "model")
