"""RoPE whose frequencies depend on a sequence's length: each sequence takes one form, and the two never share keys."""

from __future__ import annotations

import logging
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.block_digests import first_row
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddEmbedding, AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.models.config import parse_config
from tessera.engine.models.rope import RopeConfig, cos_sin_table
from tessera.engine.models.rope_tables import make_tables
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.support.decoder_harness import DecoderHarness, scattered_blocks
from tests.support.models.tiny_models import TINY_MODELS, build, prompt

MODELS = ("phi3-longrope-long", "llama-dynamic")
TRAINED, LONGEST = 16, 40
CLIENT = b"client"


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS[request.param], tmp_path_factory.mktemp(request.param))


def rope_of(name: str) -> RopeConfig:
    (rope,) = parse_config(TINY_MODELS[name].config, {}).ropes
    return rope


def load(folder: Path, max_model_len: int = LONGEST) -> LoadedEngine:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=max_model_len, block_size=8, num_kv_blocks=64
    )
    return load_engine(config, lambda stage, done, total: None)


def complete(engine: LoadedEngine, *requests: tuple[list[int], int]) -> list[list[int]]:
    """Greedy tokens of prompts with their max_tokens, computed together; the first is one step ahead."""
    core = engine.core
    assert isinstance(core, EngineCore)
    found: dict[str, list[int]] = {}
    for number, (token_ids, max_tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        found[str(number)] = []
        core.add_request(AddRequest(str(number), array("i", token_ids), params, time.monotonic()), CLIENT)
        append_outputs(core, found)
    while core.has_work:
        append_outputs(core, found)
    return list(found.values())


def append_outputs(core: EngineCore, found: dict[str, list[int]]) -> None:
    for output in core.step().get(CLIENT, []):
        assert output.error is None
        found[output.request_id] += output.token_ids


def embed(engine: LoadedEngine, token_ids: list[int]) -> np.ndarray[Any, Any]:
    embedder = engine.embedders["main"]
    embedder.add_request(AddEmbedding("e", [array("i", token_ids)]), CLIENT)
    ((_, output),) = embedder.step(busy=False)
    assert output.refusal is None
    return np.frombuffer(output.vectors, np.float32)


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_long_forms_rows_follow_the_short_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tessera.engine.models")
    rope = rope_of(name)
    (table,), short_len = make_tables((rope,), LONGEST, CPU)
    assert short_len == TRAINED
    assert np.array_equal(table.numpy()[:TRAINED], cos_sin_table(rope, TRAINED))
    assert np.array_equal(table.numpy()[TRAINED:], cos_sin_table(rope, LONGEST))
    assert f"whose prompt and max_tokens stay within {TRAINED} tokens" in caplog.text
    assert f"--max-model-len {TRAINED} " in caplog.text


@pytest.mark.parametrize(("name", "longest"), [("phi3-longrope-long", TRAINED), ("llama-yarn", 64), ("llama", 64)])
def test_one_form_is_one_table(name: str, longest: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tessera.engine.models")
    (table,), short_len = make_tables((rope_of(name),), longest, CPU)
    assert (table.shape[0], short_len) == (longest, 0)
    assert not caplog.records


def test_the_length_that_a_sequence_may_reach_decides() -> None:
    assert [first_row(TRAINED, length) for length in (1, TRAINED, TRAINED + 1)] == [0, 0, TRAINED]
    assert first_row(0, 1) == first_row(0, 1000) == 0


# -- requests -------------------------------------------------------------------------------------


def test_prompt_and_max_tokens_choose_the_form(folder: Path) -> None:
    """Short requests are as on a server of the trained length, alone and among long ones of the same beginning."""
    short, long = (prompt()[:10], 6), (prompt()[:10], 7)
    grown = (prompt()[:30], 10)
    (trained,) = complete(load(folder, TRAINED), short)
    (stretched,) = complete(load(folder), long)
    assert trained != stretched[:6], "the forms must tell apart for this test to say anything"
    both = load(folder)
    assert complete(both, short, long, short, grown)[:3] == [trained, stretched, trained]
    assert complete(both, long, grown, short)[::2] == [stretched, trained], "from the prefix cache"


def test_the_prefix_cache_is_shared_within_a_form_only(folder: Path) -> None:
    engine = load(folder)
    core = engine.core
    assert isinstance(core, EngineCore)

    def hits(*request: Any) -> int:
        before = core.metrics.num_prefix_hits
        complete(engine, request)
        return core.metrics.num_prefix_hits - before

    assert hits(prompt()[:13], 3) == 0
    assert hits(prompt()[:13], 3) == 8
    assert hits(prompt()[:13], 4) == 0
    assert hits(prompt()[:20], 4) == 8


def test_embeddings_take_the_form_of_their_text(folder: Path) -> None:
    engine, long = load(folder), DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=LONGEST)
    short_text, long_text = prompt()[:TRAINED], prompt()[: TRAINED + 1]
    assert np.array_equal(embed(engine, short_text), embed(load(folder, TRAINED), short_text))
    inputs = long.step_inputs(long_text, 0, scattered_blocks(long.num_blocks))[:2]
    hidden = long.decoder.hidden_states(*inputs, long.buffers).numpy()[-1]
    np.testing.assert_allclose(embed(engine, long_text), hidden / np.linalg.norm(hidden), atol=1e-5)
