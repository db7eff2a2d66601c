"""Facts about a model from its files alone: sizes, formats, memory, and whether it can be served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.app.reasoning.families import choose_reasoning
from tessera.app.text.chat_template import load_chat_template, native_template
from tessera.app.text.tokenizer import IdTokenizer, load_tokenizer
from tessera.app.tools.formats.mistral import MISTRAL_MARKED
from tessera.app.tools.formats.registry import FORMATS, choose_format
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.formats import KVFormat
from tessera.engine.gguf.model import stored_bytes
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.config import DTYPES, ModelConfig, read_model_config
from tessera.engine.models.kv_cache import block_bytes
from tessera.engine.models.weights.build import num_weight_bytes
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.tensor import bfloat16, float32


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model; None: not known, or there is none.

    Attributes:
        problem: why it cannot be served; None: nothing in its files stands against it.
        stored: bytes of its weights by their type, most first.
        tool_format: the format of its tool calls, as `--tool-call-parser` names it.
        reasoning: texts that begin and end its reasoning.
        weight_bytes: of weights in memory, in `dtype` or in the blocks of a GGUF file.
        kv_bytes_per_token: of one token in the KV cache, over all layers.
        notes: what the model's configuration has and serving leaves out.
    """

    problem: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    layers: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    chat_template: bool = False
    tool_format: str | None = None
    reasoning: str | None = None
    tokenizer: bool = False
    notes: tuple[str, ...] = ()

    def memory(self, context: int, num_seqs: int) -> int | None:
        """Bytes of weights and of the KV cache of `num_seqs` sequences of `context` tokens."""
        if self.weight_bytes is None:
            return None
        return self.weight_bytes + (self.kv_bytes_per_token or 0) * context * num_seqs


def read_facts(path: Path, dtype: str = "auto", *, weights_present: bool = True) -> ModelFacts:
    """Facts about a model folder or GGUF file.

    Args:
        dtype: of weights and KV cache; auto: the checkpoint's, bfloat16 for float32, as on CUDA.
        weights_present: False: the folder has the small files alone, so that its weights are not looked for.
    """
    try:
        config = read_model_config(path)
    except ModelError as error:
        return ModelFacts(problem=str(error))
    facts = _text_facts(path)
    chosen = _dtype(config, dtype)
    facts = replace(
        facts,
        architecture=config.architecture,
        parameters=_num_parameters(config),
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        context=config.usual_context,
        dtype=chosen.name,
        weight_bytes=num_weight_bytes(config, chosen),
        kv_bytes_per_token=0 if config.is_encoder else block_bytes(config, 1, KVFormat(chosen)),
        notes=config.notes,
    )
    if not weights_present:
        return facts
    try:
        stored = stored_bytes(path) if is_gguf(path) else _stored_in_folder(path)
    except ModelError as error:
        return replace(facts, problem=facts.problem or str(error))
    return replace(facts, stored=stored, weight_bytes=sum(stored.values()) if is_gguf(path) else facts.weight_bytes)


def _dtype(config: ModelConfig, name: str) -> np.dtype[Any]:
    own = config.torch_dtype if name == "auto" else DTYPES[name]
    if name == "auto" and (own is None or own == float32):
        own = bfloat16
    return np.dtype(own)


def _num_parameters(config: ModelConfig) -> int:
    """Counted as bytes of one byte each, which leaves out nothing and rounds nothing."""
    return num_weight_bytes(config, np.dtype(np.int8))


def _stored_in_folder(folder: Path) -> dict[str, int]:
    """Bytes of each dtype. Raises: ModelError: the weights are missing, cut short or no safetensors."""
    checkpoint = Checkpoint(folder)
    counts: Counter[str] = Counter()
    for name in checkpoint.names:
        dtype = checkpoint.dtype(name)
        counts[dtype.name] += math.prod(checkpoint.shape(name)) * dtype.itemsize
    return dict(counts.most_common())


def _text_facts(path: Path) -> ModelFacts:
    """Tokenizer, chat template, and the formats that it shows."""
    try:
        tokenizer = load_tokenizer(path)
        template = load_chat_template(path, None, tokenizer.special_tokens)
        template = template or native_template(tokenizer.special_tokens, tokenizer.added_tokens)
    except ConfigError as error:
        return ModelFacts(problem=str(error))
    sources = list(template.sources.values()) if template is not None else []
    tools, reasoning = choose_format("auto", sources), choose_reasoning("auto", sources)
    found = next((name for name, format in FORMATS.items() if format is tools), None)
    return ModelFacts(
        tokenizer=not isinstance(tokenizer, IdTokenizer),
        chat_template=template is not None,
        tool_format="mistral" if tools is MISTRAL_MARKED else found,
        reasoning=f"{reasoning.begin} ... {reasoning.end}" if reasoning is not None else None,
    )
