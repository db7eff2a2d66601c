"""The served models as Ollama describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import ServedModels
from tessera.app.ollama.names import tagged
from tessera.engine.contract.messages import EmbeddingInfo
from tessera.engine.gguf.names import is_gguf

FOREVER = "9999-12-31T23:59:59Z"
QUANTIZATION = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))

# The names that Ollama has for sampling parameters.
PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


class ModelCard:
    """One served name: the generating model's, or that of the encoder beside it."""

    def __init__(self, model: ServedModel, name: str) -> None:
        self.name = name
        self._model = model
        self._is_beside = name in model.settings.embedding_model_names
        self._info = model.client.info

    @property
    def _embedding(self) -> EmbeddingInfo | None:
        role = "beside" if self._is_beside else "main"
        return next((found for found in self._info.embeddings if found.role == role), None) if self._info else None

    @property
    def _architecture(self) -> str:
        if self._is_beside:
            return self._embedding.architecture if self._embedding is not None else ""
        return self._info.architecture if self._info is not None else ""

    @property
    def _family(self) -> str:
        return self._architecture.split("For")[0].removesuffix("Model").lower()

    @property
    def context_length(self) -> int:
        """In tokens; 0 while the model is being loaded."""
        if self._is_beside:
            return self._embedding.max_input_tokens if self._embedding is not None else 0
        return self._info.max_model_len if self._info is not None else 0

    @property
    def capabilities(self) -> list[str]:
        model = self._model
        found = []
        if not self._is_beside and self._info is not None and self._info.generates:
            found.append("completion")
            found += ["tools"] if model.template is not None and model.tool_format is not None else []
            found += ["thinking"] if model.reasoning is not None else []
        return found + (["embedding"] if self._embedding is not None else [])

    def details(self) -> dict[str, Any]:
        settings = self._model.settings
        folder = settings.embedding_folder if self._is_beside else settings.model_folder
        return {
            "parent_model": self._model.default_name if self.name in self._model.adapter_names else "",
            "format": "gguf" if folder is not None and is_gguf(Path(folder)) else "safetensors",
            "family": self._family,
            "families": [self._family] if self._family else [],
            "parameter_size": "" if self._is_beside or self._info is None else short_count(self._info.num_parameters),
            "quantization_level": self._quantization(),
        }

    def listed(self) -> dict[str, Any]:
        """The fields that /api/tags and /api/ps share."""
        name = tagged(self.name)
        size = 0 if self._is_beside or self._info is None else self._info.weight_bytes
        details = self.details()
        # The same at every start and in every replica: clients know a model by it.
        told = f"{name}|{size}|{self._architecture}|{details['parameter_size']}|{details['quantization_level']}"
        digest = hashlib.sha256(told.encode()).hexdigest()
        return {"name": name, "model": name, "size": size, "digest": digest, "details": details}

    def modified_at(self) -> str:
        return _utc(self._model.created)

    def running(self) -> dict[str, Any]:
        """As /api/ps has it."""
        listed = self.listed()
        on_gpu = self._info is not None and self._info.device == "cuda"
        return {
            **listed,
            "expires_at": self._expires_at(),
            "size_vram": listed["size"] if on_gpu else 0,
            "context_length": self.context_length,
        }

    @property
    def is_loaded(self) -> bool:
        return self._model.engine.status.state == "loaded"

    def _expires_at(self) -> str:
        expires = self._model.engine.status.expires_at
        return _utc(expires) if expires else FOREVER

    def shown(self) -> dict[str, Any]:
        """As /api/show has it."""
        template = self._model.template
        return {
            "modelfile": f"FROM {self.name}\n",
            "parameters": "" if self._is_beside else "\n".join(self._parameters()),
            "template": "" if self._is_beside or template is None else template.sources["default"],
            "details": self.details(),
            "model_info": self._model_info(),
            "capabilities": self.capabilities,
            "modified_at": self.modified_at(),
        }

    def _parameters(self) -> Iterator[str]:
        """The model's own sampling parameters, a line each."""
        for name, value in msgspec.structs.asdict(self._model.defaults).items():
            yield f"{PARAMETERS[name]:<30} {value:g}"

    def _model_info(self) -> dict[str, Any]:
        family, info, embedding = self._family, self._info, self._embedding
        found: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": self.context_length}
        if info is not None and not self._is_beside:
            found["general.parameter_count"] = info.num_parameters
            found[f"{family}.vocab_size"] = info.vocab_size
        if embedding is not None:
            found[f"{family}.embedding_length"] = embedding.dimension
        return found

    def _quantization(self) -> str:
        """The type of most of a GGUF file's bytes, or else the type that the model computes in."""
        if self._is_beside or self._info is None:
            return ""
        stored = self._info.stored_bytes
        if stored:
            return max(stored, key=lambda kind: stored[kind]).upper()
        return QUANTIZATION.get(self._info.dtype, self._info.dtype.upper())


def model_cards(models: ServedModels, tenant: str) -> list[ModelCard]:
    """Of those that make text or embeddings, and that a tenant may know of."""
    return [
        ModelCard(model, name)
        for model in models
        for name in models.names_for(tenant, model)
        if name not in model.settings.reranker_model_names
    ]


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def short_count(count: int) -> str:
    """A number of parameters as `7.6B`."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
