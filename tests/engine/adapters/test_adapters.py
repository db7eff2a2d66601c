"""LoRA adapters beside a base: what they compute, against merged weights, and what folders are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.adapters.modules import adaptable_modules
from tessera.engine.adapters.reader import read_adapter
from tessera.engine.adapters.slots import AdapterSlots
from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.formats import AdapterRows
from tessera.engine.models.config import load_config
from tessera.engine.models.decoder import StepAdapters
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, float32, from_numpy
from tessera.engine.training.lora import LoraSettings, load_adapter, make_adapters, save_adapter
from tessera.engine.training.parameters import load_parameters
from tests.engine.gguf.converter import write_converted
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.decoder_harness import DecoderHarness, Row, relative_error, scattered_blocks, step_batch
from tests.support.models.tiny_adapters import TinyAdapter, merged, merged_tensors, shapes_of
from tests.support.models.tiny_families import build_family
from tests.support.models.tiny_models import TINY_MODELS, build, prompt, write_safetensors
from tests.support.references.llama_reference import logits_after

Array = np.ndarray[Any, Any]

LENGTH = 16
MAX_RANK = 8
# Of each way in which checkpoints lay out projections: fused or not, transposed, reordered, beside experts, biased.
MODELS = (
    "llama",
    "llama-tied-biases",
    "qwen3",
    "phi3",
    "gpt2",
    "qwen2moe-sparse",
    "gptoss-mxfp4",
    "family:gemma2",
    "family:gpt-neox",
    "family:falcon-40b",
    "family:gptj",
    "family:codegen",
    "family:glm4",
    "family:cohere2",
    "family:internlm2",
    "family:baichuan2",
    "family:gpt-bigcode",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


def folder_of(name: str, folder: Path) -> Path:
    if name.startswith("family:"):
        return build_family(name.removeprefix("family:"), folder)
    return build(TINY_MODELS[name], folder)


def tensors_of(folder: Path) -> dict[str, Array]:
    checkpoint = Checkpoint(folder)
    found = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.names}
    return {name: tensor if tensor.dtype == np.uint8 else tensor.astype(np.float32) for name, tensor in found.items()}


def adapter_of(folder: Path, seed: int = 1, **settings: Any) -> TinyAdapter:
    """Of all modules that a model can have adapters of."""
    config = load_config(folder)
    transposed = ARCHITECTURES[config.architecture].transposed
    modules = shapes_of(adaptable_modules(config), tensors_of(folder), transposed=transposed)
    return TinyAdapter(modules, seed, transposed=transposed, **settings)


class AdaptedHarness(DecoderHarness):
    """Computes a sequence by the adapters in the slots that its tokens name."""

    slots: AdapterSlots

    @classmethod
    def with_adapters(cls, folder: Path, *adapters: Path, max_rank: int = MAX_RANK) -> AdaptedHarness:
        config, ops = load_config(folder), make_ops(CPU)
        slots = AdapterSlots(config, float32, CPU, num_slots=len(adapters) + 1, max_rank=max_rank, max_rows=40)
        weights = slots.attach(load_weights(folder, config, float32, ops))
        harness = cls(config, weights, ops, float32, max_model_len=40, selection=slots.selection)
        harness.slots = slots
        for slot, adapter in enumerate(adapters):
            slots.load(slot, read_adapter(adapter, config, max_rank=max_rank))
        return harness

    def adapted(self, token_ids: list[int], slots: list[int]) -> Array:
        """Logits [T, V] of one sequence, each token's by the adapter in a slot."""
        inputs = self.step_inputs(token_ids, 0, scattered_blocks(self.num_blocks))
        rows = AdapterRows(from_numpy(np.array(slots, np.int32), CPU))
        return np.array(self.decoder.forward(*inputs, self.buffers, adapters=StepAdapters(rows, rows)).numpy())


def logits_of(folder: Path, token_ids: list[int]) -> Array:
    return DecoderHarness.of(folder, make_ops(CPU), float32, max_model_len=40).logits(token_ids)


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_gives_what_merged_weights_give(name: str, tmp_path: Path) -> None:
    base = folder_of(name, tmp_path / "base")
    adapter = adapter_of(base)
    assert adapter.modules, "every decoder's attention can have adapters"
    token_ids = prompt()[:LENGTH]
    token_ids = [token_id % 60 + 3 for token_id in token_ids]
    harness = AdaptedHarness.with_adapters(base, adapter.write(tmp_path / "adapter"))
    expected = logits_of(merged(base, adapter, tensors_of(base), tmp_path / "merged"), token_ids)
    unadapted = harness.logits(token_ids)
    np.testing.assert_array_equal(unadapted, logits_of(base, token_ids))
    assert relative_error(harness.adapted(token_ids, [0] * LENGTH), expected) < 2e-5
    assert relative_error(unadapted, expected) > 1e-2, "the adapter changes the logits"
    np.testing.assert_array_equal(harness.adapted(token_ids, [-1] * LENGTH), unadapted)


def test_logits_are_those_of_float64_with_merged_weights(llama: Path, tmp_path: Path) -> None:
    """Ranks and factors by patterns, rsLoRA, and adapters stored in 16 bits."""
    adapter = adapter_of(
        llama,
        rank=3,
        rslora=True,
        rank_pattern={"layers.1.mlp.up_proj": 8, "o_proj": 1},
        alpha_pattern={"k_proj": 2.0},
    )
    token_ids = prompt()[:LENGTH]
    expected = logits_after(TINY_MODELS["llama"].config, merged_tensors(adapter, tensors_of(llama)), token_ids)
    for storage in ("F32", "BF16"):
        folder = adapter.write(tmp_path / storage, storage)
        harness = AdaptedHarness.with_adapters(llama, folder)
        assert relative_error(harness.adapted(token_ids, [0] * LENGTH)[-1], expected) < 1e-5, storage


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_below_may_be_quantised(name: str, tmp_path: Path) -> None:
    """Against the same adapter over the numbers that the tensors stand for."""
    quantised, exact = quantised_model(tmp_path, SCHEMES[name])
    adapter = adapter_of(exact).write(tmp_path / "adapter")
    assert_alike_with(adapter, quantised, exact, 0.2 if SCHEMES[name].rounds_input else 2e-5)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_weights_below_may_be_of_gguf(name: str, tmp_path: Path) -> None:
    """Whose names and orders of rows are others than the adapter's."""
    folder = build(TINY_MODELS[name], tmp_path / "folder")
    path = write_converted(tmp_path / "m.gguf", TINY_MODELS[name])
    assert_alike_with(adapter_of(folder).write(tmp_path / "adapter"), path, folder, 2e-5)


def assert_alike_with(adapter: Path, model: Path, other: Path, tolerance: float) -> None:
    token_ids = prompt()[:LENGTH]
    found, expected = (
        AdaptedHarness.with_adapters(base, adapter).adapted(token_ids, [0] * LENGTH) for base in (model, other)
    )
    assert relative_error(found, expected) < tolerance
    assert relative_error(logits_of(model, token_ids), expected) > 0.5, "the adapter changes the logits"


def test_each_row_of_a_batch_has_its_own_adapter(llama: Path, tmp_path: Path) -> None:
    """The first tokens of a sequence see nothing of what the later ones are computed by."""
    folders = [adapter_of(llama, seed, rank=rank).write(tmp_path / str(seed)) for seed, rank in ((1, 8), (2, 1))]
    harness = AdaptedHarness.with_adapters(llama, *folders)
    token_ids = prompt()[:LENGTH]
    slots = [1, 1, 1, 0, 0, -1, -1, -1, *([-1] * (LENGTH - 8))]
    mixed = harness.adapted(token_ids, slots)
    np.testing.assert_allclose(mixed[:3], harness.adapted(token_ids, [1] * LENGTH)[:3], rtol=2e-5, atol=2e-5)
    assert relative_error(mixed[3:5], harness.adapted(token_ids, [1] * LENGTH)[3:5]) > 1e-2
    harness.slots.load(1, read_adapter(folders[0], harness.config, max_rank=MAX_RANK))
    again = harness.adapted(token_ids, [1] * LENGTH)
    np.testing.assert_array_equal(again, harness.adapted(token_ids, [0] * LENGTH))


def test_base_rows_keep_their_bits_beside_adapters(llama: Path, tmp_path: Path) -> None:
    """In a step with chunks of prompts, and in one with decodes."""
    config = EngineConfig(model=str(llama), block_size=8, max_num_seqs=4, num_kv_blocks=32, max_loras=2)
    model, params = load_config(llama), SamplingParams(max_tokens=8, temperature=0.0)
    adapter = read_adapter(adapter_of(llama).write(tmp_path), model, max_rank=MAX_RANK)

    def logits(slots: list[int] | None) -> list[Array]:
        runner = ModelRunner(config, model, CPU, make_ops(CPU), max_lora_rank=MAX_RANK)
        rows = [Row(slot, scattered_blocks(8, first=8 * slot), prompt()[slot:20], params) for slot in range(3)]
        found = []
        for counts in ([20, 9, 18], [1, 10, 1]):
            batch = step_batch(rows, 8, counts)
            if slots is not None:
                batch.adapter_slots = np.repeat(np.array(slots, np.int32), counts)
                batch.adapter_loads = [(1, adapter)]
            found.append(np.array(runner.start(batch).logits.numpy()))
            for row in rows:
                if row.num_computed == len(row.tokens):
                    row.output.append(5)
        return found

    (first, second), (mixed_first, mixed_second) = logits(None), logits([-1, 1, -1])
    np.testing.assert_array_equal(mixed_first, first)
    np.testing.assert_array_equal(mixed_second[[0, 2]], second[[0, 2]])
    assert relative_error(mixed_second[1], second[1]) > 1e-2


def test_a_part_without_an_adapter_keeps_its_bits(llama: Path, tmp_path: Path) -> None:
    """Of the fused query, key and value only the value is adapted, and a slot keeps nothing of an adapter before."""
    whole = adapter_of(llama)
    value = TinyAdapter({name: shape for name, shape in whole.modules.items() if "v_proj" in name}, seed=3)
    harness = AdaptedHarness.with_adapters(llama, whole.write(tmp_path / "whole"))
    harness.slots.load(0, read_adapter(value.write(tmp_path / "value"), harness.config, max_rank=MAX_RANK))
    token_ids = prompt()[:LENGTH]
    found = harness.adapted(token_ids, [0] * LENGTH)
    expected = logits_of(merged(llama, value, tensors_of(llama), tmp_path / "merged"), token_ids)
    assert relative_error(found, expected) < 2e-5


def test_an_adapter_that_was_trained_here_is_read(llama: Path, tmp_path: Path) -> None:
    f = Functions.on(CPU)
    parameters = load_parameters(llama, f.ops)
    settings = LoraSettings(rank=6, alpha=3.0, targets=("q_proj", "down_proj"), rank_stabilised=True)
    save_adapter(tmp_path, make_adapters(parameters, settings, CPU, seed=1), settings, "tiny/llama")
    adapter = read_adapter(tmp_path, load_config(llama), max_rank=MAX_RANK)
    assert (adapter.rank, adapter.base) == (6, "tiny/llama")
    assert len(adapter.modules) == 2 * TINY_MODELS["llama"].config["num_hidden_layers"]
    assert {round(each.factor, 6) for each in adapter.modules} == {round(3 / 6**0.5, 6)}
    other, _ = load_adapter(tmp_path, parameters, CPU)
    assert len(other) == len(adapter.modules)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type must be "LORA", not "IA3"'),
        ({"task_type": "SEQ_CLS"}, 'task_type must be "CAUSAL_LM", not "SEQ_CLS"'),
        ({"use_dora": True}, "use_dora is true: DoRA cannot be served"),
        ({"use_bdlora": {"nblocks": 2}}, 'use_bdlora is {"nblocks": 2}: block-diagonal LoRA cannot be served'),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA cannot be served"),
        ({"modules_to_save": ["lm_head"]}, "modules that are saved whole cannot be served"),
        ({"bias": "all"}, 'bias must be "none"'),
        ({"init_lora_weights": "pissa"}, "others change the base model's weights"),
        ({"r": 257}, "r must be an integer from 1 to 256, not 257"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": 0}}, 'rank_pattern has "q_proj": 0; it must map regular expressions to ranks'),
        ({"alpha_pattern": {"(": 1.0}}, "must map regular expressions to numbers"),
        ({"target_modules": ["v_proj"]}, 'adapts "model.layers.0.self_attn.q_proj", which target_modules'),
        ({"target_modules": "("}, "target_modules must be names of modules, a regular expression"),
        ({"r": 3}, "has shape [4, 64], but the model and the rank 3 make it [3, 64]"),
        ({"r": 12, "rank_pattern": {".*": 12}}, "but the model and the rank 12"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    adapter = TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, 1, changes=changes).write(tmp_path)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_adapter(adapter, load_config(llama), max_rank=MAX_RANK)


# As Unsloth writes it.
BLOCKS = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
ENDS = "k_proj|o_proj|v_proj|q_proj|gate_proj|down_proj"
UNSLOTH = (
    rf"(?:.*?(?:vision|image|visual|patch|language|text).*?{BLOCKS}.*?(?:{ENDS}).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.{BLOCKS}\.(?:(?:{ENDS})))"
)


@pytest.mark.parametrize(
    ("targets", "fits"),
    [
        ("all-linear", True),
        (r"model\.layers\.\d+\.self_attn\.q_proj", True),
        (UNSLOTH, True),
        (r".*\.k_proj", False),
        (None, True),
    ],
)
def test_forms_of_target_modules(llama: Path, tmp_path: Path, targets: Any, fits: bool) -> None:
    adapter = TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, 1, changes={"target_modules": targets})
    folder = adapter.write(tmp_path)
    if fits:
        assert len(read_adapter(folder, load_config(llama), max_rank=MAX_RANK).modules) == 1
    else:
        with pytest.raises(ModelError, match="which target_modules"):
            read_adapter(folder, load_config(llama), max_rank=MAX_RANK)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.{}.weight", ["q_proj"]),
        ("base_model.model.model.layers.0.self_attn.q_proj.{}.default.weight", ["self_attn.q_proj"]),
        ("model.layers.0.self_attn.q_proj.{}.weight", "all-linear"),
        ("base_model.model.model.language_model.layers.0.self_attn.q_proj.{}.weight", UNSLOTH),
        ("base_model.model.language_model.model.layers.0.self_attn.q_proj.{}.weight", UNSLOTH),
        ("base_model.model.model.text_model.layers.0.self_attn.q_proj.{}.weight", r"model\.text_model\..*q_proj"),
    ],
)
def test_names_that_modules_go_by(llama: Path, tmp_path: Path, name: str, targets: Any) -> None:
    """Those of a multimodal model as well, whose language model may be served by itself."""
    adapter = TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, 1, changes={"target_modules": targets})
    folder = adapter.write(tmp_path)
    tensors = {name.format(key.rpartition(".")[2]): value for key, value in adapter.tensors().items()}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (found,) = read_adapter(folder, load_config(llama), max_rank=MAX_RANK).modules
    assert (found.module.layer, found.module.field, found.module.parts) == (0, "qkv", (0, 1))


Q_A, Q_B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (4, 64)}, 'adapts "lm_head", which cannot have an adapter here'),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 64)}, "adapters of embeddings cannot be served"),
        ({Q_A.replace("lora_A", "lora_magnitude_vector"): (64,)}, "DoRA cannot be served"),
        ({"base_model.model.lm_head.weight": (128, 64)}, "modules that are saved whole cannot be served"),
        ({Q_A: (4, 64)}, 'has no lora_B of "model.layers.0.self_attn.q_proj"'),
        ({Q_A: (4, 32), Q_B: (64, 4)}, "has shape [4, 32], but the model and the rank 4 make it [4, 64]"),
        ({Q_A: (4, 64), Q_B: (32, 4)}, "has shape [32, 4], but the model and the rank 4 make it [64, 4]"),
        ({Q_A.replace("q_proj", "w_proj"): (4, 64)}, "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ({}, "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    llama: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    adapter = TinyAdapter({}, 1, changes={"target_modules": "all-linear"}).write(tmp_path)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_safetensors(tmp_path / "adapter_model.safetensors", arrays)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_adapter(adapter, load_config(llama), max_rank=MAX_RANK)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3.4e38])
def test_values_that_are_not_finite_are_refused(value: float, llama: Path, tmp_path: Path) -> None:
    """The last is, but not in bfloat16."""
    TinyAdapter({}, 1, changes={"target_modules": None}).write(tmp_path)
    arrays = {Q_A: np.zeros((4, 64), np.float32), Q_B: np.full((64, 4), value, np.float32)}
    write_safetensors(tmp_path / "adapter_model.safetensors", arrays)
    with pytest.raises(ModelError, match="has values that are not finite"):
        read_adapter(tmp_path, load_config(llama), max_rank=MAX_RANK)


def test_folders_that_are_none(llama: Path, tmp_path: Path) -> None:
    config = load_config(llama)
    with pytest.raises(ModelError, match="there is no folder"):
        read_adapter(tmp_path / "absent", config, max_rank=MAX_RANK)
    with pytest.raises(ModelError, match="has no adapter_config"):
        read_adapter(llama, config, max_rank=MAX_RANK)
    adapter = adapter_of(llama, rank=8).write(tmp_path)
    with pytest.raises(ModelError, match=r"has rank 8, more than the 4 .*: start the server with --max-lora-rank 8"):
        read_adapter(adapter, config, max_rank=4)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin only, a pickle"):
        read_adapter(adapter, config, max_rank=MAX_RANK)
