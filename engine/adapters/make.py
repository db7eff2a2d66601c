"""The catalog that an engine's settings call for."""

from __future__ import annotations

from pathlib import Path

from tessera.engine.adapters.catalog import AdapterCatalog
from tessera.engine.adapters.config import read_adapter_config
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError, RequestError
from tessera.engine.models.config import ModelConfig
from tessera.engine.tensor import Device

LEAST_MAX_RANK = 16


def make_catalog(config: EngineConfig, model: ModelConfig, device: Device) -> tuple[AdapterCatalog | None, int]:
    """-> the adapters of --lora, or None where none are served or loaded later, and the largest rank, 0 with None.

    Raises: ConfigError where adapters cannot be served, or one of them cannot be read.
    """
    if not config.serves_adapters:
        return None, 0
    if model.is_encoder or model.classifier is not None:
        if not config.lora and not config.allow_lora_loading:
            return None, 0  # other models of the server are fine-tuned
        raise ConfigError("--lora and --allow-lora-loading are for models that generate text")
    max_rank = config.max_lora_rank
    if max_rank is None:
        configs = [read_adapter_config(Path(folder)) for _, folder in config.adapters]
        ranks = (rank for each in configs for rank in (each.rank, *each.rank_patterns.values()))
        max_rank = max(LEAST_MAX_RANK, *ranks) if configs else LEAST_MAX_RANK
    catalog = AdapterCatalog(model, max_rank=max_rank, max_in_memory=config.max_cpu_loras)
    for name, folder in config.adapters:
        try:
            catalog.register(name, Path(folder), catalog.read(Path(folder)).result())
        except (ModelError, RequestError, OSError) as error:
            raise ConfigError(f"--lora {name}: {error}") from None
    return catalog, max_rank
