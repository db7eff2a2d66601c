"""Sequence classifiers of all encoders against Hugging Face transformers (tests/golden), and scores by decoders."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig, PoolingName
from tessera.engine.contract.errors import ConfigError, InvalidRequestError, ModelError
from tessera.engine.contract.messages import AddEmbedding, AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.models.config import load_config, parse_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.embedding_engine import EmbeddingEngine
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.yes_no import yes_no_tokens
from tessera.engine.tensor import CPU, float32
from tests.engine.golden.embedders import encoder
from tests.engine.golden.scorers import scorer
from tests.support.decoder_harness import DecoderHarness, relative_error
from tests.support.models.tiny_classifiers import POSITIONS, TINY_CLASSIFIERS, WITH_HEADS, build_classifier, pair
from tests.support.models.tiny_encoder import build_encoder
from tests.support.models.tiny_models import TINY_MODELS, build, prompt, write_safetensors
from tests.support.paths import GOLDEN

Array = np.ndarray[Any, Any]

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 5e-3}
CLIENT = b"client"

# What makes a family a family, undone: the logits must then be far off.
PERTURBATIONS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2},
    "xlm-roberta": {"pad_token_id": 0},
    "distilbert": {"n_heads": 2},
    "modernbert": {"local_attention": 12},
    "nomic_bert": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN / "golden_scores.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_the_model_is_the_one_the_golden_scores_were_made_from(
    name: str, tmp_path: Path, golden: dict[str, Array]
) -> None:
    digest = hashlib.sha256()
    for path in sorted(build_classifier(name, tmp_path / name).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert golden[f"{name}/sha256"].tobytes() == digest.digest(), "run tests/golden/make_golden_scores.py again"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_vectors_match(name: str, dtype: Any, tmp_path: Path, golden: dict[str, Array]) -> None:
    runner = encoder(build_classifier(name, tmp_path), dtype=dtype)
    (token_ids, first_length), vectors = pair(), golden[f"{name}/vectors"]
    pooled: dict[PoolingName, Array] = {"mean": vectors.mean(axis=0), "last": vectors[-1], "cls": vectors[0]}
    for pooling, expected in pooled.items():
        found = runner.pooled([token_ids], [first_length], pooling)
        assert relative_error(found[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", WITH_HEADS)
def test_logits_match(name: str, dtype: Any, tmp_path: Path, golden: dict[str, Array]) -> None:
    folder = build_classifier(name, tmp_path)
    token_ids, first_length = pair()
    found = scorer(folder, dtype=dtype).compute([[5], token_ids, [9] * 60], [1, first_length, 60])
    assert np.abs(found[1] - golden[f"{name}/logits"]).max() < TOLERANCE[dtype]
    assert found.dtype == float32


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_golden_vectors_tell_variants_apart(name: str, tmp_path: Path, golden: dict[str, Array]) -> None:
    folder = build_classifier(name, tmp_path, **PERTURBATIONS[name])
    token_ids, first_length = pair()
    found = encoder(folder).pooled([token_ids], [first_length], "mean")
    assert relative_error(found[0], golden[f"{name}/vectors"].mean(axis=0)) > 10 * TOLERANCE["float32"]


def test_nomicberts_own_names_of_settings() -> None:
    native = TINY_CLASSIFIERS["nomic_bert"].config
    old: dict[str, Any] = {
        "n_embd": 32,
        "n_inner": 48,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 8192,
        "max_trained_positions": 66,
    }
    old |= {"activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 100.0}
    kept = {key: native[key] for key in ("architectures", "model_type", "type_vocab_size", "vocab_size")}
    found = parse_config({**kept, **old, "rotary_emb_fraction": 1.0, "prenorm": False}, {})
    assert found == parse_config(native, {})
    with pytest.raises(ModelError, match="moe_every_n_layers must be false: mixtures of experts"):
        parse_config({**native, "moe_every_n_layers": 2}, {})


def test_the_second_text_has_a_token_type_of_its_own(tmp_path: Path, golden: dict[str, Array]) -> None:
    token_ids, _ = pair()
    found = scorer(build_classifier("bert", tmp_path)).compute([token_ids])
    assert relative_error(found[0], golden["bert/logits"]) > 1e-2


def test_positions_of_padding_are_none_of_a_text(tmp_path: Path) -> None:
    """XLM-RoBERTa's table has 66 rows, of which those up to the one of padding (1) serve no text."""
    assert encoder(build_classifier("xlm-roberta", tmp_path)).max_input_tokens == POSITIONS - 2
    with pytest.raises(ModelError, match="positions begin at 66, but there are only 66"):
        load_config(build_classifier("xlm-roberta", tmp_path, pad_token_id=65))


def test_modernbert_in_the_spelling_of_transformers_5(tmp_path: Path, golden: dict[str, Array]) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 900.0}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 20.0}
    old = dict.fromkeys(("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"))
    folder = build_classifier("modernbert", tmp_path, **old, layer_types=kinds, rope_parameters=ropes)
    token_ids, first_length = pair()
    found = scorer(folder).compute([token_ids], [first_length])
    assert relative_error(found[0], golden["modernbert/logits"]) < TOLERANCE["float32"]


def test_a_classifier_without_its_head_makes_embeddings(tmp_path: Path) -> None:
    folder = build_classifier("modernbert", tmp_path, architectures=["ModernBertModel"])
    config = load_config(folder)
    assert config.classifier is None
    vectors = encoder(folder).compute([pair()[0]])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.raises(ModelError, match=r"lacks the tensors classifier\.bias, classifier\.weight"):
        encoder(folder)


# -- labels and score functions -------------------------------------------------------------------


def classifier_of(**values: Any) -> Any:
    config = {**TINY_CLASSIFIERS["bert"].config, "id2label": None, **values}
    return parse_config(json.loads(json.dumps(config)), {}).classifier


@pytest.mark.parametrize(
    ("values", "labels", "scores"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"id2label": {"0": 7}}, ("7",), "sigmoid"),
        ({"problem_type": "regression", "num_labels": 1}, ("LABEL_0",), "identity"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "single_label_classification"}, ("LABEL_0", "LABEL_1"), "softmax"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("LABEL_0",),
            "identity",
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            ("LABEL_0",),
            "sigmoid",
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            ("LABEL_0",),
            "tanh",
        ),
        ({"num_labels": 1, "sentence_transformers": {"version": "5.0"}}, ("LABEL_0",), "sigmoid"),
    ],
    ids=str,
)
def test_labels_and_score_functions(values: dict[str, Any], labels: tuple[str, ...], scores: str) -> None:
    found = classifier_of(**values)
    assert (found.labels, found.scores, found.pooling) == (labels, scores, "cls")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id2label": {"1": "a"}}, "id2label must be an object that names labels from 0 on"),
        ({"id2label": ["a"]}, "id2label must be an object"),
        ({"num_labels": 0}, "num_labels must be an integer from 1"),
        ({"problem_type": "guessing"}, "problem_type must be one of regression"),
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            "sentence_transformers: activation_fn must be one of torch.nn.modules.linear.Identity",
        ),
    ],
    ids=str,
)
def test_a_wrong_head_is_one_clear_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        classifier_of(**values)
    assert message in str(error.value)


def test_the_activation_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = build_classifier("bert", tmp_path, sentence_transformers={"version": "6.2.0"})
    own = folder / "config_sentence_transformers.json"
    for function, scores in (("linear.Identity", "identity"), ("activation.Sigmoid", "sigmoid")):
        own.write_text(json.dumps({"activation_fn": f"torch.nn.modules.{function}", "model_type": "CrossEncoder"}))
        found = load_config(folder).classifier
        assert found is not None
        assert found.scores == scores
    own.write_text(json.dumps({"prompts": {}}))
    assert load_config(folder) == load_config(build_classifier("bert", tmp_path / "other"))


# -- decoders -------------------------------------------------------------------------------------


def loaded(folder: Path, **settings: Any) -> EmbeddingEngine:
    """An engine's embedders over a decoder, without a core."""
    options = {"dtype": "float32", "num_kv_blocks": 16, "max_model_len": 64, **settings}
    config = EngineConfig(model=str(folder), **options).with_device_defaults("cpu")
    model = load_config(folder)
    engine = EmbeddingEngine(config)
    engine.load_beside(make_ops(CPU), None)
    engine.add_decoder(model, ModelRunner(config, model, CPU, make_ops(CPU)))
    return engine


def logits_of(engine: EmbeddingEngine, *inputs: list[int]) -> Array:
    engine.embedders["scorer"].add_request(AddEmbedding("a", [array("i", one) for one in inputs], "scorer"), CLIENT)
    ((_, output),) = engine.embedders["scorer"].step(busy=False)
    return np.frombuffer(output.vectors, "<f4").reshape(len(inputs), -1)


def test_a_decoder_with_a_score_head(tmp_path: Path) -> None:
    """The product of its last token's vector, which `tests/golden/compare_checkpoints` compares with transformers."""
    model = TINY_MODELS["qwen3"]
    config = {**model.config, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}
    folder = build(replace(model, config=config), tmp_path)
    add_tensor(folder, "score.weight", np.random.RandomState(3).standard_normal((3, config["hidden_size"])))
    engine = loaded(folder)
    info = engine.scorer
    assert info is not None
    assert (info.form, info.scores, info.labels) == ("pair", "softmax", ("LABEL_0", "LABEL_1", "LABEL_2"))
    assert set(engine.embedders) == {"scorer"}
    assert not engine.infos
    with np.load(GOLDEN / "golden_embeddings.npz") as file:
        hidden = file["qwen3"]
    expected = np.random.RandomState(3).standard_normal((3, config["hidden_size"])).astype(np.float32) @ hidden[-1]
    assert relative_error(logits_of(engine, [5], prompt())[1], expected) < 1e-4


def add_tensor(folder: Path, name: str, values: Array) -> None:
    """In a file of its own."""
    write_safetensors(folder / "more.safetensors", {name: values.astype(np.float32)})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def yes_no_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    build(TINY_MODELS["qwen3"], folder)
    Tokenizer(models.WordLevel({"[UNK]": 0, "no": 7, "yes": 9}, "[UNK]")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["Qwen3-Reranker-0.6B", "judge"])
def test_yes_less_no_is_the_logit_of_a_reranker(name: str, tmp_path: Path) -> None:
    folder = yes_no_folder(tmp_path / name)
    steps = [{"path": path, "type": f"sentence_transformers.{path[2:]}"} for path in ("0_Transformer", "1_LogitScore")]
    (folder / "modules.json").write_text(json.dumps(steps))
    engine = loaded(folder, scoring="auto" if "Reranker" in name else "yes-no")
    info = engine.scorer
    assert info is not None
    assert (info.form, info.scores, info.beside) == ("yes_no", "sigmoid", False)
    assert set(engine.embedders) == {"main", "scorer"}
    harness = DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=64)
    logits = harness.logits(prompt())[-1]
    assert np.allclose(logits_of(engine, [5], prompt())[1], logits[9] - logits[7], rtol=1e-3, atol=1e-4)


def test_a_model_is_asked_for_yes_and_no_by_its_name_or_by_the_option(tmp_path: Path) -> None:
    folder = yes_no_folder(tmp_path / "judge")
    model = load_config(folder)

    def tokens(**settings: Any) -> tuple[int, int] | None:
        return yes_no_tokens(EngineConfig(model=str(folder), **settings), model)

    assert tokens() is None
    assert tokens(served_name="Qwen/Qwen3-Reranker-4B") == (9, 7)
    assert tokens(served_name="Qwen/Qwen3-Reranker-4B", scoring="none") is None
    assert tokens(scoring="yes-no") == (9, 7)
    (folder / "tokenizer.json").unlink()
    assert tokens(served_name="Qwen/Qwen3-Reranker-4B") is None
    with pytest.raises(ConfigError, match=r"--scoring yes-no: .*judge cannot score pairs: .*has no tokenizer"):
        tokens(scoring="yes-no")


# -- alone and beside another model ---------------------------------------------------------------


def test_a_reranker_alone(tmp_path: Path, golden: dict[str, Array]) -> None:
    folder = build_classifier("xlm-roberta", tmp_path / "reranker")
    engine = EmbeddingEngine(EngineConfig(model=str(folder), served_name="judge").with_device_defaults("cpu"))
    core, info = engine.load_alone(load_config(folder), make_ops(CPU), "", None)
    assert (info.generates, info.embeddings, info.max_model_len) == (False, (), POSITIONS - 2)
    assert info.scorer is not None
    assert (info.scorer.beside, info.scorer.labels) == (False, ("relevant",))
    assert np.allclose(logits_of(engine, pair()[0]), golden["xlm-roberta/logits"], atol=1e-5)
    assert b'tessera:scoring_requests_total{model_name="judge"} 1.0' in engine.render_metrics()
    with pytest.raises(InvalidRequestError, match="makes no text"):
        core.add_request(AddRequest("a", array("i", [1]), SamplingParams(max_tokens=1), 0.0), CLIENT)


def test_a_reranker_beside_a_decoder(tmp_path: Path, golden: dict[str, Array]) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path / "llama")
    reranker = build_classifier("bert", tmp_path / "reranker")
    engine = loaded(folder, reranker_model=str(reranker))
    info = engine.scorer
    assert info is not None
    assert (info.beside, info.architecture, info.max_input_tokens) == (True, "BertModel", POSITIONS)
    assert set(engine.embedders) == {"main", "scorer"}
    token_ids, first_length = pair()
    request = AddEmbedding("a", [array("i", token_ids)], "scorer", [first_length])
    engine.embedders["scorer"].add_request(request, CLIENT)
    ((_, output),) = engine.embedders["scorer"].step(busy=False)
    assert np.allclose(np.frombuffer(output.vectors, "<f4"), golden["bert/logits"], atol=1e-5)


def test_models_that_cannot_be_beside(tmp_path: Path) -> None:
    decoder = str(build(TINY_MODELS["llama"], tmp_path / "llama"))
    reranker = str(build_classifier("bert", tmp_path / "reranker"))
    encoder_folder = str(build_encoder(tmp_path / "encoder"))
    for changes, message in (
        ({"reranker_model": encoder_folder}, "has no head for classification .*: give it as --embedding-model"),
        ({"reranker_model": decoder}, "--reranker-model .* is a LlamaForCausalLM, which is served alone"),
        ({"embedding_model": decoder}, "--embedding-model .* is a LlamaForCausalLM, which is served alone"),
        ({"embedding_model": reranker}, "has a head for classification: give it as --reranker-model"),
    ):
        asked = msgspec.structs.replace(EngineConfig(model=decoder).with_device_defaults("cpu"), **changes)
        with pytest.raises(ModelError, match=message):
            EmbeddingEngine(asked).load_beside(make_ops(CPU), None)
    alone = EngineConfig(model=reranker, reranker_model=reranker).with_device_defaults("cpu")
    with pytest.raises(ConfigError, match="goes beside a model that scores nothing"):
        EmbeddingEngine(alone).load_alone(load_config(Path(reranker)), make_ops(CPU), "", None)
