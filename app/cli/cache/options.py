"""The options of `tessera pull`, `list`, `show` and `rm`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

GROUP = "models"
OUTPUT = "output"
MAX_CONTEXT = 2**31 - 1


class JsonOutput(msgspec.Struct, frozen=True, kw_only=True):
    json: Annotated[bool, Option("print JSON, for programs", group=OUTPUT)] = False


class PullOptions(JsonOutput, frozen=True, kw_only=True):
    """Models to download."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "hub id ORGANISATION/NAME[:QUANTISATION][@REVISION]; QUANTISATION, for example Q4_K_M, chooses among GGUF "
            "files",
            group=GROUP,
            metavar="MODEL",
            name="model",
            positional=True,
        ),
    ] = ()


class ListOptions(JsonOutput, frozen=True, kw_only=True):
    """Models to list."""

    name: Annotated[
        str | None,
        Option("list those alone whose name has this text", group=GROUP, metavar="NAME", positional=True),
    ] = None
    names: Annotated[bool, Option("print names alone, one a line", group=OUTPUT)] = False


class ShowOptions(JsonOutput, frozen=True, kw_only=True):
    """The model to describe, and how it would be served."""

    model: Annotated[
        str | None,
        Option(
            "hub id, folder or GGUF file",
            group=GROUP,
            metavar="MODEL",
            positional=True,
            default="the small demonstration model that comes with Tessera",
        ),
    ] = None
    context: Annotated[
        int | None,
        Option(
            "tokens of one sequence, for the memory of its KV cache",
            group=GROUP,
            metavar="TOKENS",
            low=1,
            high=MAX_CONTEXT,
            default="the model's own context",
        ),
    ] = None
    num_seqs: Annotated[int, Option("sequences of that length", group=GROUP, metavar="N", low=1, high=2**20)] = 1
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Option("of weights and KV cache; auto: as on CUDA", group=GROUP),
    ] = "auto"


class RmOptions(JsonOutput, frozen=True, kw_only=True):
    """Models to remove."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "hub id as `tessera list` shows it; without :QUANTISATION and @REVISION all of the repository",
            group=GROUP,
            metavar="MODEL",
            name="model",
            positional=True,
        ),
    ] = ()
    yes: Annotated[bool, Option("do not ask", group=GROUP)] = False


PULL_OPTIONS = CommandOptions(None, (PullOptions,), groups=(GROUP, OUTPUT))
LIST_OPTIONS = CommandOptions(None, (ListOptions,), groups=(GROUP, OUTPUT))
SHOW_OPTIONS = CommandOptions(None, (ShowOptions,), groups=(GROUP, OUTPUT))
RM_OPTIONS = CommandOptions(None, (RmOptions,), groups=(GROUP, OUTPUT))
