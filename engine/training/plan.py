"""A whole training of a model folder: what is trained, by which loss, and the files of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np

from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import load_config
from tessera.engine.tensor import CPU, Device, float32
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.device_share import DeviceShare
from tessera.engine.training.examples import AnyItem, Example
from tessera.engine.training.lora import (
    Adapter,
    LoraSettings,
    adapter_parameters,
    make_adapters,
    merge,
    save_adapter,
)
from tessera.engine.training.model_folder import save_model
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import Parameter, Parameters, load_parameters
from tessera.engine.training.preferences import Preference, PreferenceTrainer, with_references
from tessera.engine.training.run import RunSettings, TrainingRun
from tessera.engine.training.trainer import BaseTrainer, Trainer


@dataclass(frozen=True)
class TrainingPlan:
    """Attributes:
    model: folder with the weights.
    name: of the model, which a resumed training must agree on.
    lora: None trains all weights.
    max_length: tokens of the longest sequence.
    eight_bit: see `AdamW`.
    beta: of direct preference optimisation.
    device: where it is trained; `device_share`: most of its time that is taken, from 0 to 1.
    """

    model: Path
    name: str
    lora: LoraSettings | None
    run: RunSettings
    max_length: int
    dtype: np.dtype[Any] = float32
    weight_decay: float = 0.0
    eight_bit: bool = False
    max_gradient_norm: float = 1.0
    micro_batch_tokens: int = 4096
    checkpoint_layers: bool = False
    beta: float = 0.1
    device: Device = CPU
    device_share: float = 1.0


class PlannedTraining(Generic[AnyItem]):
    """Attributes:
    run: its loop.
    num_trained: parameters that change.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        base: _Base,
        trainer: BaseTrainer[AnyItem],
        folder: Path,
        items: Sequence[AnyItem],
        held_out: Sequence[AnyItem],
        identity: Mapping[str, Any],
    ) -> None:
        self.run = TrainingRun(folder, trainer, items, plan.run, validation=held_out, identity=identity)
        self.num_trained = sum(parameter.variable.value.size for parameter in base.trained)
        self._plan = plan
        self._base = base

    def save_adapter(self, folder: Path, base: str) -> None:
        """`base` is the name or path of the model, which PEFT looks for."""
        assert self._plan.lora is not None, "all weights were trained"
        save_adapter(folder, self._base.adapters, self._plan.lora, base)

    def save_model(self, folder: Path) -> None:
        """With an adapter merged into it; the training cannot go on then."""
        base, plan = self._base, self._plan
        if base.adapters:
            merge(base.parameters, base.adapters, base.functions.ops)
        dtype = load_config(plan.model).torch_dtype or plan.dtype
        save_model(folder, plan.model, base.parameters, base.functions.ops, dtype)


def plan_supervised(
    plan: TrainingPlan, folder: Path, examples: Sequence[Example], held_out: Sequence[Example]
) -> PlannedTraining[Example]:
    """Of cross entropy. Raises: ConfigError as `load_parameters` and `make_adapters`."""
    base = _Base(plan)
    trainer = Trainer(
        base.decoder,
        base.optimizer(plan),
        micro_batch_tokens=plan.micro_batch_tokens,
        max_gradient_norm=plan.max_gradient_norm,
    )
    return PlannedTraining(plan, base, trainer, folder, examples, held_out, _identity(plan))


def plan_preferences(
    plan: TrainingPlan, folder: Path, preferences: Sequence[Preference], held_out: Sequence[Preference]
) -> PlannedTraining[Preference]:
    """Of direct preference optimisation, with the untrained model as the reference. Raises as `plan_supervised`."""
    base = _Base(plan)
    trainer = PreferenceTrainer(
        base.decoder,
        base.optimizer(plan),
        micro_batch_tokens=plan.micro_batch_tokens,
        max_gradient_norm=plan.max_gradient_norm,
        beta=plan.beta,
    )
    referred, referred_held_out = (
        with_references(base.decoder, each, plan.micro_batch_tokens) for each in (preferences, held_out)
    )
    identity = {**_identity(plan), "beta": plan.beta}
    return PlannedTraining(plan, base, trainer, folder, referred, referred_held_out, identity)


class _Base:
    """The model, and the part of it that is trained."""

    def __init__(self, plan: TrainingPlan) -> None:
        f = self.functions = Functions.on(plan.device)
        self.parameters: Parameters = load_parameters(plan.model, f.ops, plan.dtype)
        plan.device.keep_large_memory()
        if plan.device_share < 1:
            f.pace = DeviceShare(plan.device, plan.device_share)
        f.training.prepare(plan.dtype, {layer.attention.head_dim for layer in self.parameters.config.layers})
        if self.parameters.quantised and plan.lora is None:
            raise ConfigError(f"{plan.name} is quantised, and of such a model only adapters can be trained")
        self.adapters: dict[str, Adapter] = {}
        self.trained: list[Parameter] = list(self.parameters)
        if plan.lora is not None:
            self.parameters.freeze()
            self.adapters = make_adapters(self.parameters, plan.lora, f.device, plan.dtype, seed=plan.run.seed)
            self.trained = list(adapter_parameters(self.adapters))
        self.decoder = TrainableDecoder(
            self.parameters,
            f,
            max_len=plan.max_length,
            adapters=self.adapters,
            checkpoints_layers=plan.checkpoint_layers,
        )

    def optimizer(self, plan: TrainingPlan) -> AdamW:
        f = self.functions
        settings = AdamWSettings(weight_decay=plan.weight_decay)
        return AdamW(self.trained, f.ops, f.training, settings, eight_bit=plan.eight_bit)


def _identity(plan: TrainingPlan) -> dict[str, Any]:
    lora = plan.lora
    return {
        "micro_batch_tokens": plan.micro_batch_tokens,
        "max_gradient_norm": plan.max_gradient_norm,
        "model": plan.name,
        "dtype": plan.dtype.name,
        "weight_decay": plan.weight_decay,
        **({"optimizer": "adamw_8bit"} if plan.eight_bit else {}),
        "lora": None if lora is None else [lora.rank, lora.alpha, *lora.targets, lora.rank_stabilised],
    }
