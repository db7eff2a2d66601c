"""`--speculative-config`: every field of vLLM's has an effect, is said to have none, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.speculation.settings import Speculation
from tessera.engine.contract.speculation.vllm_config import HINTS, REFUSED
from tests.support.paths import ROOT


def of(**fields: Any) -> EngineConfig:
    return EngineConfig(model="m", speculative_config=fields)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"method": "mimo_mtp", "num_speculative_tokens": 1}, Speculation(method="mtp", num_tokens=1)),
        ({"method": "glm4_moe_mtp"}, Speculation(method="mtp", num_tokens=3)),
        ({"method": "ernie_mtp"}, Speculation(method="mtp", num_tokens=3)),
        ({"method": "ngram_gpu", "prompt_lookup_max": 3}, Speculation(method="ngram", lookup_max=3)),
        ({"model": "[ngram]", "prompt_lookup_max": 3}, Speculation(method="ngram", lookup_max=3)),
        ({"method": "ngram", "model": "ngram"}, Speculation(method="ngram")),
        (
            {"model": "o/small", "revision": "v2", "max_model_len": 99},
            Speculation(method="draft_model", model="o/small@v2", num_tokens=5, max_model_len=99),
        ),
        ({"model": "o/Qwen3-8B_eagle3"}, Speculation(method="eagle3", model="o/Qwen3-8B_eagle3", num_tokens=5)),
        (
            {"method": "draft_model", "model": "o/EAGLE3"},
            Speculation(method="draft_model", model="o/EAGLE3", num_tokens=5),
        ),
        ({"method": "ngram", "max_model_len": 99, "revision": "v2"}, Speculation(method="ngram")),
    ],
)
def test_fields_with_an_effect(fields: dict[str, Any], settings: Speculation) -> None:
    assert of(**fields).speculation_settings == settings


@pytest.mark.parametrize("name", HINTS)
def test_fields_without_effect_are_named(name: str) -> None:
    given = of(method="suffix", **{name: True})
    assert given.speculation_settings == Speculation()
    assert given.unused_speculative_hints == [f"--speculative-config: {name} has no effect: {HINTS[name]}"]
    assert of(method="suffix", **{name: None}).unused_speculative_hints == []


def test_fields_of_other_methods_are_named() -> None:
    assert of(method="ngram", max_model_len=99, revision="v2").unused_speculative_hints == [
        "--speculative-config: max_model_len has no effect: the method ngram has no model of its own",
        "--speculative-config: revision has no effect: the method ngram has no folder of its own",
    ]
    assert of(model="small", max_model_len=99, revision="v2").unused_speculative_hints == []
    assert EngineConfig(model="m").unused_speculative_hints == []


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_cannot_be_met_are_refused(name: str) -> None:
    for accepted in (*REFUSED[name].accepted, None):
        of(method="suffix", **{name: accepted}).verify()
    with pytest.raises(ConfigError) as caught:
        of(method="suffix", **{name: [2]}).verify()
    assert str(caught.value).startswith(f"--speculative-config: {name} must be ")
    assert str(caught.value).endswith(REFUSED[name].reason)


def test_wordings() -> None:
    def refusal(**fields: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            of(**fields).verify()
        return str(caught.value).removeprefix("--speculative-config: ")

    assert refusal(model="small", draft_tensor_parallel_size=2) == (
        "draft_tensor_parallel_size must be 1 or absent, not 2: a draft model is on one device"
    )
    assert refusal(model="small", draft_tensor_parallel_size=True).startswith("draft_tensor_parallel_size must be 1")
    assert refusal(rejection_sample_method="block") == (
        'rejection_sample_method must be "standard" or absent, not "block": tokens are never accepted but as the model '
        "itself chooses them"
    )
    assert refusal(tensor_parallel_size=1) == (
        "tensor_parallel_size must be absent, not 1: vLLM's name for it is draft_tensor_parallel_size, and that must "
        "be 1"
    )
    assert refusal(model="small", max_model_len=0) == "max_model_len must be at least 1, not 0"
    assert refusal(num_tokens=3).startswith("Object contains unknown field `num_tokens`; it takes method, model, num_")
    assert refusal(method="ngram", model="small").startswith("model is for the method draft_model or eagle3")


def test_a_draft_model_that_was_found_has_no_revision() -> None:
    found = of(model="o/small", revision="v2").with_draft_model("/cache/small")
    assert found.speculation_settings == Speculation(method="draft_model", model="/cache/small", num_tokens=5)


def test_a_head_that_was_found_is_still_one() -> None:
    found = of(model="o/EAGLE3-head").with_draft_model("/cache/head")
    assert found.speculation_settings == Speculation(method="eagle3", model="/cache/head", num_tokens=5)


def test_the_documentation_lists_every_field() -> None:
    text = (ROOT / "docs/operating/speculation.md").read_text()
    assert [name for name in (*HINTS, *REFUSED) if f"`{name}`" not in text] == []
