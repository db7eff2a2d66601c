"""Settings of speculation, and what is reported of it: metrics, usage, predicted outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.speculation.settings import MODEL_METHODS, Speculation
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.fakes.fake_runner import Harness
from tests.support.servers.http_fixtures import call, events, ids, settings_for, write_model_folder

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, None),
        ({"speculation": "auto"}, Speculation()),
        ({"speculation": "on", "speculative_method": "ngram"}, Speculation(method="ngram", always=True)),
        ({"speculation": "auto", "prompt_lookup_max": 1}, Speculation(lookup_min=1, lookup_max=1)),
        ({"speculation": "auto", "prompt_lookup_min": 6}, Speculation(lookup_min=6, lookup_max=6)),
        ({"speculative_config": {"method": "suffix"}}, Speculation()),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 5,
                    "prompt_lookup_max": 4,
                    "prompt_lookup_min": 3,
                }
            },
            Speculation(method="ngram", num_tokens=5, lookup_min=3, lookup_max=4),
        ),
        ({"speculative_config": {"method": "suffix"}, "speculation": "on"}, Speculation(always=True)),
        (
            {"speculative_config": {"model": "small", "num_speculative_tokens": 3}},
            Speculation(method="draft_model", model="small", num_tokens=3),
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "head"}},
            Speculation(method="eagle3", model="head", num_tokens=5),
        ),
        ({"speculative_config": {"method": "mtp"}}, Speculation(method="mtp", num_tokens=3)),
        ({"speculation": "on", "speculative_method": "mtp"}, Speculation(method="mtp", num_tokens=3, always=True)),
        (
            {"speculation": "auto", "speculative_method": "draft_model", "speculative_model": "small"},
            Speculation(method="draft_model", model="small", num_tokens=5),
        ),
    ],
)
def test_options_and_vllm_s_form(options: dict[str, Any], settings: Speculation | None) -> None:
    config = EngineConfig(model="m", **options)
    config.verify()
    assert config.speculation_settings == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative_config": {"method": "medusa"}},
            "--speculative-config: method must be one of ngram, suffix, draft_model, eagle3, mtp, ngram_gpu, "
            "glm4_moe_mtp, mimo_mtp, ernie_mtp, not 'medusa'",
        ),
        ({"speculative_config": {"rejection": 1}}, "--speculative-config: Object contains unknown field `rejection`"),
        (
            {"speculative_config": {"num_speculative_tokens": 0}},
            "--speculative-config: num_speculative_tokens must be a whole number from 1 to 64, not 0",
        ),
        (
            {"speculation": "on", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "--prompt-lookup-min (5) must be at most --prompt-lookup-max (4)",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 3},
            "--speculative-config is given, so its numbers cannot be options of their own as well",
        ),
        (
            {"speculation": "on", "num_speculative_tokens": 65},
            "--num-speculative-tokens must be a whole number from 1 to 64, not 65",
        ),
        (
            {"speculation": "on", "speculative_method": "draft_model"},
            "the method draft_model needs --speculative-model, a folder or hub id",
        ),
        (
            {"speculative_config": {"method": "draft_model"}},
            "--speculative-config: the method draft_model needs model, a folder or hub id",
        ),
        (
            {"speculation": "on", "speculative_model": "small"},
            "--speculative-model is for the method draft_model or eagle3, not for suffix",
        ),
        (
            {"speculative_config": {"method": "mtp", "model": "small"}},
            "--speculative-config: the method mtp takes no model: its layer is in the served model's folder",
        ),
        (
            {"speculation": "on", "speculative_method": "mtp", "tensor_parallel_size": 2},
            "the speculative method mtp cannot be used with --tensor-parallel-size",
        ),
        ({"speculative_model": "small"}, "--speculative-model is given, but --speculation is off"),
        (
            {"speculative_config": {"model": "small"}, "speculative_model": "other"},
            "--speculative-config is given, so --speculative-model must be its `model`",
        ),
        (
            {"speculative_config": {"model": "small"}, "tensor_parallel_size": 2},
            "the speculative method draft_model cannot be used with --tensor-parallel-size",
        ),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **options).verify()
    assert str(caught.value).startswith(message)


def test_metrics_have_vllm_s_names_and_add_up() -> None:
    engine = Harness(speculation="on", speculative_method="ngram", num_speculative_tokens=3)
    engine.runner.say = lambda context: 1 + len(context) % 4
    engine.add("r", [1, 2, 3, 4, 1, 2, 3, 4], 25)
    engine.run()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.core.render_metrics().decode()):
        for sample in family.samples:
            found[sample.name + sample.labels.get("position", "")] = sample.value
    num_accepted = found["tessera:spec_decode_num_accepted_tokens_total"]
    assert found["tessera:spec_decode_num_drafts_total"] >= 6
    assert num_accepted >= 15
    assert found["tessera:spec_decode_num_draft_tokens_total"] >= num_accepted
    by_position = [found[f"tessera:spec_decode_num_accepted_tokens_per_pos_total{place}"] for place in range(3)]
    assert sum(by_position) == num_accepted
    assert by_position == sorted(by_position, reverse=True)
    totals = engine.core.stats().totals
    assert totals is not None
    assert totals.num_accepted_draft_tokens == num_accepted
    last = engine.last_outputs["r"]
    assert last.num_accepted_draft_tokens == num_accepted


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_metrics_tell_methods_apart(method: str) -> None:
    engine = Harness(speculation="on", speculative_method=method)
    engine.runner.say = lambda context: 1 + len(context) % 4
    engine.add("r", [1, 2, 3], 25)
    engine.run()
    counts = engine.core.metrics.speculator.by_source if engine.core.metrics.speculator is not None else {}
    found = {
        (sample.name, sample.labels["method"]): sample.value
        for family in text_string_to_metric_families(engine.core.render_metrics().decode())
        for sample in family.samples
        if "method" in sample.labels
    }
    assert found == {
        ("tessera:spec_decode_num_drafts_total", method): counts[method].num_drafts,
        ("tessera:spec_decode_num_draft_tokens_total", method): counts[method].num_tokens,
        ("tessera:spec_decode_num_accepted_tokens_total", method): counts[method].num_accepted,
    }
    assert 0 < counts[method].num_accepted < counts[method].num_tokens
    totals = engine.core.stats().totals
    assert totals is not None
    assert totals.num_accepted_draft_tokens == counts[method].num_accepted
    assert engine.last_outputs["r"].num_accepted_draft_tokens == counts[method].num_accepted


def test_without_speculation_there_are_no_such_metrics() -> None:
    assert b"spec_decode" not in Harness().core.render_metrics()


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_draft_tokens(tmp_path: Path, stream: bool) -> None:
    outputs = play([*ids("hello"), 0], stop_token_id=0)
    outputs[0].num_accepted_draft_tokens, outputs[0].num_rejected_draft_tokens = 1, 1
    outputs[-1].num_accepted_draft_tokens, outputs[-1].num_rejected_draft_tokens = 5, 2
    body = {**CHAT, "n": 2, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    client = FakeClient(always(outputs))
    answer = call(client, settings_for(write_model_folder(tmp_path)), "POST", "/v1/chat/completions", json=body)
    usage = events(answer.content)[-1]["usage"] if stream else answer.json()["usage"]
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (10, 4)


@pytest.mark.parametrize("content", ["some text", [{"type": "text", "text": "some text"}]])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_prediction_reaches_an_engine_that_drafts(tmp_path: Path, content: Any, speculates: bool) -> None:
    info = msgspec.structs.replace(INFO, speculates=speculates)
    client = FakeClient(always(play(ids("hello"), finish="length")), info=info)
    body = {**CHAT, "prediction": {"type": "content", "content": content}}
    answer = call(client, settings_for(write_model_folder(tmp_path)), "POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert client.submissions[0].prediction == (ids("some text") if speculates else None)


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "static", "content": "x"}, {"type": "content"}, {"type": "content", "content": 5}]
)
def test_a_wrong_prediction_is_refused(tmp_path: Path, prediction: Any) -> None:
    client = FakeClient(always([]))
    body = {**CHAT, "prediction": prediction}
    answer = call(client, settings_for(write_model_folder(tmp_path)), "POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prediction")
