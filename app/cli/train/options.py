"""The options of `tessera train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

DATA = "data"
METHOD = "method"
ADAPTER = "adapter"
OPTIMISATION = "optimisation"
RESOURCES = "resources"


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the chats and the place of the result."""

    model: Annotated[
        str | None,
        Option(
            "hub id or folder of the model to train",
            group=DATA,
            metavar="MODEL",
            positional=True,
            default="the demonstration model",
        ),
    ] = None
    data: Annotated[
        Path | None,
        Option(
            "chats to learn, in OpenAI's format: JSON lines with messages, tools and weights; preferences for dpo",
            group=DATA,
            metavar="FILE",
        ),
    ] = None
    validation_data: Annotated[
        Path | None,
        Option("chats of the same format whose loss is measured alone", group=DATA, metavar="FILE", default="none"),
    ] = None
    output: Annotated[
        Path | None, Option("folder for the result, the checkpoints and the losses", group=DATA, metavar="FOLDER")
    ] = None
    resume: Annotated[bool, Option("go on from the newest checkpoint in the output folder", group=DATA)] = False


class MethodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The loss."""

    method: Annotated[
        Literal["supervised", "dpo"],
        Option(
            "supervised learns the assistant's messages of chats; dpo learns which of two completions is better "
            "(direct preference optimisation), from lines with input, preferred_output and non_preferred_output",
            group=METHOD,
        ),
    ] = "supervised"
    beta: Annotated[
        float,
        Option("of dpo: how far the model is held to what it was before", group=METHOD, low=0.0001, high=100),
    ] = 0.1


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA."""

    lora: Annotated[bool, Option("train a LoRA adapter, and leave the model's weights as they are", group=ADAPTER)] = (
        False
    )
    lora_rank: Annotated[int, Option("rank of the adapter", group=ADAPTER, low=1, high=256)] = 16
    lora_alpha: Annotated[
        float, Option("the adapter's product is times alpha / rank", group=ADAPTER, low=0.001, high=10000)
    ] = 32.0
    lora_targets: Annotated[
        tuple[str, ...],
        Option(
            "modules that are adapted, such as q_proj,v_proj; all-linear is every projection of the layers",
            group=ADAPTER,
            metavar="NAMES",
            repetition="commas",
        ),
    ] = ("all-linear",)
    rslora: Annotated[bool, Option("divide alpha by the rank's square root instead", group=ADAPTER)] = False
    merge: Annotated[
        bool, Option("also write the model with the adapter merged into it, which can be served", group=ADAPTER)
    ] = True


class OptimisationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of AdamW."""

    epochs: Annotated[int, Option("times that each chat is seen", group=OPTIMISATION, low=1, high=10000)] = 3
    max_steps: Annotated[
        int | None,
        Option("steps, in the place of epochs", group=OPTIMISATION, low=1, high=10**8, default="as epochs say"),
    ] = None
    batch_size: Annotated[int, Option("chats a step", group=OPTIMISATION, low=1, high=65536)] = 16
    learning_rate: Annotated[
        float | None,
        Option(
            "the highest",
            group=OPTIMISATION,
            low=0,
            high=1,
            default="2e-4 with --lora, else 2e-5",
        ),
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "hold"],
        Option("of the learning rate after the warm-up; hold is level and falls in the last 60 %", group=OPTIMISATION),
    ] = "cosine"
    warmup_share: Annotated[
        float, Option("share of all steps in which the learning rate rises", group=OPTIMISATION, low=0, high=1)
    ] = 0.03
    optimizer: Annotated[
        Literal["adamw", "adamw_8bit"],
        Option(
            "adamw_8bit keeps the averages of matrices' gradients in two bytes a weight instead of eight",
            group=OPTIMISATION,
        ),
    ] = "adamw"
    weight_decay: Annotated[float, Option("of matrices", group=OPTIMISATION, low=0, high=10)] = 0.0
    max_gradient_norm: Annotated[
        float, Option("longer gradients are scaled down to it", group=OPTIMISATION, low=0.000001, high=1000000)
    ] = 1.0
    seed: Annotated[
        int, Option("of the order of the chats and of a new adapter", group=OPTIMISATION, low=0, high=2**32 - 1)
    ] = 0


class TrainResourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, precision and the disk."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        Option("auto: CUDA where a usable device is found, else the CPU", group=RESOURCES),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(
            "of weights and activations; auto is bfloat16 on CUDA and float32 on the CPU; sums, gradients of weights "
            "and the optimiser are float32 in either",
            group=RESOURCES,
        ),
    ] = "auto"
    max_length: Annotated[
        int | None,
        Option(
            "tokens of a chat, which is cut there",
            group=RESOURCES,
            low=2,
            high=2**20,
            default="the model's context, at most 4096",
        ),
    ] = None
    micro_batch_tokens: Annotated[
        int, Option("tokens computed at a time; gradients are added up", group=RESOURCES, low=1, high=2**24)
    ] = 4096
    checkpoint_layers: Annotated[
        bool, Option("keep less in memory, and compute layers a second time in the backward", group=RESOURCES)
    ] = False
    save_every: Annotated[int, Option("steps between checkpoints", group=RESOURCES, low=1, high=10**8)] = 100
    evaluate_every: Annotated[
        int,
        Option(
            "steps between measurements of the validation loss; 0 is at the end alone",
            group=RESOURCES,
            low=0,
            high=10**8,
        ),
    ] = 0


TRAIN_OPTIONS = CommandOptions(
    "TESSERA_TRAIN_",
    (DataOptions, MethodOptions, AdapterOptions, OptimisationOptions, TrainResourceOptions),
    groups=(DATA, METHOD, ADAPTER, OPTIMISATION, RESOURCES, "configuration"),
)
