"""Forms of a model folder: its weights as they are, and quantised in every way that is evaluated; and its cache.

Every scheme rounds to nearest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import DenseFormat, KVFormat, WeightFormat, WeightPart
from tessera.engine.formats.format import Float32Array, TensorLayout
from tessera.engine.models.config import load_config
from tessera.engine.models.quantised.rounded import RoundingName
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.models.weights.safetensors import SafetensorsFile
from tessera.engine.ops.cuda.linear.quantize_rows import INT8_GROUP
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, bfloat16, float32, from_numpy, uint8
from tests.evaluation.scoring import Form, StepMemory
from tests.support.cases import quantisers
from tests.support.cases.op_cases import Array
from tests.support.cases.quantisers import SCHEMES, Scheme, gptq_config, pack_tensors, packed_config, write_tensors
from tests.support.references.int8_codes import Int8Codes
from tests.support.references.rounded_queries import RoundedQueryOps

BLOCKS = {**SCHEMES["deepseek"].config, "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class Int8Products:
    """Of weights that are quantised so while they load, as `--prompt-activations int8` rounds both."""

    quantization: RoundingName


@dataclass(frozen=True)
class E4m3Cache:
    """Of keys and values, without scales, beside plain weights in float32."""

    rounds_queries: bool


# How a folder of it is made, what is asked for at the start, or the dtype of plain weights and of activations.
Way: TypeAlias = "Scheme | RoundingName | Int8Products | E4m3Cache | np.dtype[Any]"
PLAIN, SIXTEEN_BITS = "float32", "bfloat16"
WAYS: dict[str, Way] = {  # by the name in the table
    PLAIN: float32,
    SIXTEEN_BITS: bfloat16,
    "FP8 by row, activations by token; `--quantization fp8`": "fp8",
    "FP8 by tensor, activations by token": Scheme(PER_TENSOR, lambda w: quantisers.fp8(w, None)),
    "FP8 in blocks of 128 x 128, activations in 128": Scheme(
        BLOCKS, lambda w: quantisers.fp8(w, (128, 128), name="weight_scale_inv")
    ),
    "INT8 by row, activations by token": SCHEMES["w8a8"],
    "8 bits in groups of 128": Scheme(
        packed_config(8, 128, symmetric=True), lambda w: quantisers.compressed(w, 8, 128, symmetric=True)
    ),
    "GPTQ, 8 bits in rows": Scheme(gptq_config(8, -1), lambda w: quantisers.gptq(w, 8, -1, symmetric=True)),
    "4 bits in groups of 128": Scheme(
        packed_config(4, 128, symmetric=True), lambda w: quantisers.compressed(w, 4, 128, symmetric=True)
    ),
    "4 bits in groups of 32, with zeros": SCHEMES["w4a16-asymmetric"],
    "AWQ's form, groups of 64": Scheme({**SCHEMES["awq"].config, "group_size": 64}, lambda w: quantisers.awq(w, 64)),
    "GPTQ's form, groups of 32, order of activations": SCHEMES["gptq-actorder"],
    "NF4 in blocks of 64, quantised twice": Scheme(SCHEMES["nf4"].config, lambda w: quantisers.nf4(w, 64, nested=True)),
    "MLX, 4 bits in groups of 64": Scheme(
        {"group_size": 64, "bits": 4}, lambda w: quantisers.mlx(w, 4, 64), "quantization", embeddings=True
    ),
    "`--quantization int4`": "int4",
    "the same with `--prompt-activations int8`": Int8Products("int4"),
    "FP8 keys and values; `--kv-cache-dtype fp8`": E4m3Cache(rounds_queries=False),
    "FP8 keys, values and queries": E4m3Cache(rounds_queries=True),
}
PROMISED = [PLAIN, SIXTEEN_BITS, *(name for name in WAYS if name.startswith("FP8"))]  # to be within half a point


class Loaded(NamedTuple):
    form: Form
    nbytes: int  # of weights


class Forms:
    """Those of the model in the folder `source`; files of quantised ones are written to `work`."""

    def __init__(self, source: Path, work: Path) -> None:
        self._source, self._work = source, work
        self._memories: dict[tuple[np.dtype[Any], KVFormat], StepMemory] = {}

    def load(self, way: Way) -> Loaded | None:
        """None where the model's sizes do not fit the scheme."""
        try:
            if isinstance(way, Scheme):
                return self._load(_quantised_folder(self._source, self._work, way))
            if isinstance(way, str):
                return self._load(self._source, quantization=way)
            if isinstance(way, Int8Products):
                return self._load(self._source, quantization=way.quantization, rounds_products=True)
            if isinstance(way, E4m3Cache):
                ops = RoundedQueryOps(CPU) if way.rounds_queries else make_ops(CPU)
                return self._load(self._source, ops=ops, cache=KVFormat(uint8))
            return self._load(self._source, way)
        except (ValueError, ModelError):
            return None

    def _load(
        self,
        folder: Path,
        dtype: np.dtype[Any] = float32,
        *,
        quantization: RoundingName | None = None,
        ops: Ops | None = None,
        cache: KVFormat | None = None,
        rounds_products: bool = False,
    ) -> Loaded:
        config, ops = load_config(folder), ops or make_ops(CPU)
        if quantization is not None:
            config = rounded_while_loading(config, quantization, folder)
        weights = load_weights(folder, config, dtype, ops)
        nbytes = weights.nbytes
        for weight in weights.linear_weights():
            parts = tuple(_dequantised(part, rounds_products=rounds_products) for part in weight.parts)
            object.__setattr__(weight, "parts", parts)
        key = dtype, cache or KVFormat(dtype)
        if key not in self._memories:
            self._memories[key] = StepMemory(config, *key)
        return Loaded(Form(config, weights, ops, self._memories[key]), nbytes)


def _quantised_folder(source: Path, work: Path, scheme: Scheme) -> Path:
    """The last one's files are replaced: they have been read."""
    file = SafetensorsFile(source / "model.safetensors")
    tensors, _ = pack_tensors({name: file.tensor(name).astype(np.float32) for name in sorted(file.names)}, scheme)
    config = json.loads((source / "config.json").read_text())
    (work / "config.json").write_text(json.dumps({**config, scheme.key: scheme.config}))
    (work / "model.safetensors").unlink(missing_ok=True)
    write_tensors(work / "model.safetensors", tensors)
    return work


@dataclass(frozen=True)
class Dequantised(WeightFormat, abstract=True):
    """`values` [R, K] float32, and activations as `inner` takes them: a text does not dequantise weights again.

    `rounds_input`: to int8 then.
    """

    inner: WeightFormat
    rounds_input: bool

    name = "dequantised"
    tensor_names = ("values",)

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout((rows, columns), float32),)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        found: Float32Array = arrays["values"][rows]
        return found

    def input_of(self, x: Float32Array) -> Float32Array:
        taken = self.inner.input_of(x)
        return Int8Codes.of(taken, INT8_GROUP).numbers if self.rounds_input else taken


def _dequantised(part: WeightPart, *, rounds_products: bool) -> WeightPart:
    arrays = {name: tensor.numpy() for name, tensor in part.tensors.items()}
    numbers = part.format.dequantize(arrays, slice(None))
    rounds = rounds_products and not isinstance(part.format, DenseFormat)
    if rounds:
        numbers = Int8Codes.of(numbers, numbers.shape[1]).numbers
    return WeightPart(Dequantised(part.format, rounds), part.shape, {"values": from_numpy(numbers, CPU)})
