"""adapter_config.json of PEFT (https://huggingface.co/docs/peft/package_reference/lora)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.engine.contract.config import MAX_LORA_RANK
from tessera.engine.contract.errors import ModelError
from tessera.engine.models.fields import Fields, is_number, read_json_object, shown
from tessera.engine.models.weights.files import ADAPTER_CONFIG

ALL_LINEAR = "all-linear"
MAX_ALPHA = 1e6
MAX_PATTERNS = 4096
MAX_PATTERN = 4096  # characters; Unsloth writes expressions of several hundred
DEFAULTS = {"lora_alpha": 8, "use_rslora": False, "bias": "none", "init_lora_weights": True}
# Keys that must be false, empty or absent, and what they ask for.
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole",
    "lora_bias": "biases of adapters",
    "layer_replication": "layers that occur several times",
    "trainable_token_indices": "embeddings of single tokens",
    "target_parameters": "adapters of single parameters, such as experts",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow's routing between adapters",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# Of init_lora_weights: those that leave the base model's weights as they are.
INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class AdapterConfig:
    """Attributes:
    source: the file, for errors.
    rank, alpha: of modules that no pattern names.
    rank_patterns, alpha_patterns: by regular expressions that match the end of a module's name, from a dot on.
    targets: ends of modules' names, or a regular expression for whole names; None: whatever has tensors.
    rank_stabilised: factors are alpha / sqrt(r) instead of alpha / r (Kalajdzievski 2023).
    base: the model that the adapter was trained for, as the file has it; may be empty.
    """

    source: str
    rank: int
    alpha: float
    rank_patterns: dict[str, int]
    alpha_patterns: dict[str, float]
    targets: tuple[str, ...] | str | None
    rank_stabilised: bool
    base: str

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_patterns, module, self.rank))

    def factor_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = float(_matching(self.alpha_patterns, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def is_target(self, module: str) -> bool:
        if self.targets is None or self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == target or module.endswith("." + target) for target in self.targets)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises: ModelError naming the key at fault, or what is not supported."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelError(f"{folder} has no {ADAPTER_CONFIG}, so it is not the folder of a LoRA adapter")
    config = Fields(str(path), read_json_object(path), DEFAULTS)
    if config.raw("peft_type") != "LORA":
        config.refuse("peft_type", '"LORA"')
    if config.raw("task_type") not in (None, "CAUSAL_LM"):
        config.refuse("task_type", '"CAUSAL_LM"')
    for key, meaning in REFUSED.items():
        if config.raw(key) not in (None, False) and config.raw(key) != [] and config.raw(key) != {}:
            raise ModelError(f"{path}: {key} is {shown(config.raw(key))}: {meaning} cannot be served")
    if config.raw("bias") != "none":
        config.refuse("bias", '"none": biases of adapters cannot be served')
    if config.raw("init_lora_weights") not in INITS:
        accepted = 'true, false, "gaussian", "eva", "orthogonal" or "mica": others change the base model\'s weights'
        config.refuse("init_lora_weights", accepted)
    base = config.raw("base_model_name_or_path")
    return AdapterConfig(
        source=str(path),
        rank=config.integer("r", 1, MAX_LORA_RANK),
        alpha=config.number("lora_alpha", 1e-6, MAX_ALPHA),
        rank_patterns=_patterns(config, "rank_pattern", _is_rank, f"ranks from 1 to {MAX_LORA_RANK}"),
        alpha_patterns=_patterns(config, "alpha_pattern", _is_alpha, f"numbers up to {MAX_ALPHA:g}"),
        targets=_targets(config),
        rank_stabilised=config.boolean("use_rslora"),
        base=base if isinstance(base, str) else "",
    )


def _targets(config: Fields) -> tuple[str, ...] | str | None:
    value = config.raw("target_modules")
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= MAX_PATTERN and _is_expression(value):
        return value
    if isinstance(value, list) and 0 < len(value) <= MAX_PATTERNS and all(isinstance(item, str) for item in value):
        return tuple(value)
    config.refuse("target_modules", f'names of modules, a regular expression or "{ALL_LINEAR}"')


def _patterns(config: Fields, key: str, fits: Any, values: str) -> dict[str, Any]:
    found = config.section(key).values
    if len(found) > MAX_PATTERNS:
        raise ModelError(f"{config.source}: {key} has {len(found)} entries, more than the {MAX_PATTERNS} accepted")
    for pattern, value in found.items():
        if len(pattern) > MAX_PATTERN or not _is_expression(pattern) or not fits(value):
            raise ModelError(
                f"{config.source}: {key} has {shown(pattern)}: {shown(value)}; it must map regular expressions to "
                f"{values}"
            )
    return found


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LORA_RANK


def _is_alpha(value: Any) -> bool:
    return is_number(value) and 0 < value <= MAX_ALPHA


def _is_expression(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches, as PEFT looks it up."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)
