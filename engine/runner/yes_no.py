"""The tokens by which a model that generates text says whether a document meets a query."""

from __future__ import annotations

import logging
from pathlib import Path

import tokenizers

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.models.config import ModelConfig
from tessera.engine.tokens.folder import tokenizer_json

NAME = "qwen3-reranker"

logger = logging.getLogger("tessera.engine.runner")


def yes_no_tokens(config: EngineConfig, model: ModelConfig) -> tuple[int, int] | None:
    """The ids of yes and no; None where the model does not score pairs by them.

    Raises: ConfigError where it is asked to, and its tokenizer has no such tokens.
    """
    if config.scoring == "none":
        return None
    if config.scoring == "auto":
        names = f"{config.served_name} {config.model}".lower().replace("_", "-")
        if NAME not in names or model.architecture != "Qwen3ForCausalLM":
            return None
    try:
        inner = tokenizers.Tokenizer.from_str(tokenizer_json(Path(config.model)))
        yes, no = inner.token_to_id("yes"), inner.token_to_id("no")
        reason = "its tokenizer has no tokens yes and no"
    except ModelError as error:
        yes, no, reason = None, None, str(error)
    if yes is not None and no is not None:
        return yes, no
    if config.scoring == "yes-no":
        raise ConfigError(f"--scoring yes-no: {config.model} cannot score pairs: {reason}")
    logger.warning("%s looks like a Qwen3-Reranker, but cannot score pairs: %s", config.model, reason)
    return None
