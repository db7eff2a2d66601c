"""The draft model that the settings ask for, refused before anything is loaded where it cannot draft."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

import msgspec

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.drafters.eagle3 import Eagle3
from tessera.engine.drafters.eagle3_config import read_eagle3
from tessera.engine.drafters.predictor import Predictor
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.weights.build import num_parameters
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.model_runner import resolve_dtype
from tessera.engine.tokens.folder import read_folder_tokenizer


def make_drafter(config: EngineConfig, model: ModelConfig, ops: Ops) -> DraftModel | None:
    """None where the settings ask for none. `model` is the served one, and `ops` are of its device.

    Raises: ConfigError.
    """
    settings = config.speculation_settings
    if settings is None or not settings.uses_model:
        return None
    config = msgspec.structs.replace(config, dtype=resolve_dtype(config, model, ops.device).name)
    if settings.method == "eagle3":
        return Eagle3(config, read_eagle3(Path(settings.model), model), ops.device, ops)
    if settings.method == "mtp":
        return Predictor(config, model, ops.device, ops)
    try:
        own = load_config(Path(settings.model))
    except ModelError as error:
        raise ConfigError(f"the draft model cannot be used: {error}") from None
    _check_pair(Path(config.model), model, Path(settings.model), own)
    return DraftModel(config, own, ops.device, ops)


def _check_pair(folder: Path, model: ModelConfig, draft_folder: Path, draft: ModelConfig) -> None:
    """Raises: ConfigError where `draft` cannot draft for `model`."""
    name = f"the draft model {draft_folder}"
    if draft.is_encoder or draft.classifier is not None:
        raise ConfigError(f"{name} is a {draft.architecture}, which generates no text")
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {draft.vocab_size} tokens, and the served model one of {model.vocab_size}: "
            "they must be the same"
        )
    size, served_size = num_parameters(draft), num_parameters(model)
    if size > served_size:
        raise ConfigError(f"{name} has {size} parameters, more than the served model with {served_size}")
    served = _vocabulary(folder)
    for token, token_id in sorted(_vocabulary(draft_folder).items(), key=itemgetter(1)):
        if served.get(token, token_id) != token_id:
            raise ConfigError(
                f"{name} has another vocabulary than the served model: {token!r} is its token {token_id}, and token "
                f"{served[token]} of the served model"
            )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Ids of tokens; {} of a GGUF file, and where a folder has no tokenizer that is read."""
    found = None if is_gguf(folder) else read_folder_tokenizer(folder)
    return {} if found is None else found.inner.get_vocab(with_added_tokens=True)
