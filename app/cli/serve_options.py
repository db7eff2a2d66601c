"""The options of `tessera serve`: those of the settings structs, and those that are resolved before a server starts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tessera.app.engines import keep_alive
from tessera.app.model_settings import ModelSettings
from tessera.app.settings import AppSettings, ServerOptions, parse_keep_alive
from tessera.engine.contract.config import EngineConfig
from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

PREFIX = "TESSERA_"
# Kernels; other commands.
OTHER_VARIABLES = ("TESSERA_CACHE_DIR", "TESSERA_BENCH_", "TESSERA_CHAT_", "TESSERA_KEYS_", "TESSERA_TRAIN_")


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Models as the user names them, before hub ids become folders."""

    model: Annotated[
        str | None,
        Option(
            "folder with config.json, tokenizer.json and *.safetensors, GGUF file, or hub id "
            "ORGANISATION/NAME[:QUANTISATION][@REVISION], which is downloaded once; QUANTISATION, for example Q4_K_M, "
            "chooses among GGUF files, also after a folder",
            group="model",
            metavar="MODEL",
            positional=True,
            default="the small demonstration model that comes with Tessera",
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Option(
            "name that requests use; may be given several times",
            group="model",
            metavar="NAME",
            default="the hub id, or the name of the folder or GGUF file",
        ),
    ] = ()
    embedding_model: Annotated[
        str | None,
        Option(
            "folder or hub id of a text encoder that makes embeddings beside the model, under its own name; an encoder "
            "given as MODEL is served alone",
            group="embeddings",
            metavar="MODEL",
            default="none",
        ),
    ] = None
    reranker_model: Annotated[
        str | None,
        Option(
            "folder or hub id of a cross-encoder (...ForSequenceClassification) that scores pairs beside the model, "
            "under its own name; one given as MODEL is served alone",
            group="embeddings",
            metavar="MODEL",
            default="none",
        ),
    ] = None


class ResidenceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a model is unloaded."""

    model_keep_alive: Annotated[
        float | None,
        Option(
            "how long a model stays loaded after its last request; it is loaded again for the next",
            group="models",
            metavar="DURATION",
            parse=parse_keep_alive,
            form=keep_alive.FORM,
            default="for ever; with a list of models 5m",
        ),
    ] = None


class EntryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the entries of `models` alone."""

    preload: Annotated[
        bool, Option("load the model when the server starts, rather than for its first request", group="models")
    ] = False


class KeyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """API keys as the user gives them, before the file is read."""

    api_key: Annotated[
        tuple[str, ...],
        Option(
            "key that requests must bear; may be given several times, and other users of this machine may see it on "
            "the command line, so better use --api-key-file or set TESSERA_API_KEY",
            group="HTTP",
            metavar="KEY",
            secret=True,
            default="none, open to all",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Option(
            "file with further keys, one a line; empty lines and lines that begin with # are skipped",
            group="HTTP",
            metavar="FILE",
            default="none",
        ),
    ] = None
    api_keys_file: Annotated[
        str | None,
        Option(
            "YAML or JSON file with named keys, as digests, and their limits and rights; `tessera keys` edits it, and "
            "a change takes effect at once",
            group="HTTP",
            metavar="FILE",
            default="none",
        ),
    ] = None


SERVE_OPTIONS = CommandOptions(
    PREFIX,
    (ModelOptions, EngineConfig, ServerOptions, ResidenceOptions, KeyOptions, AppSettings),
    other_variables=OTHER_VARIABLES,
    lists={"models": (ModelOptions, EntryOptions, ResidenceOptions, EngineConfig, ModelSettings)},
    groups=(
        "model",
        "embeddings",
        "models",
        "device and memory",
        "scheduling",
        "speculation",
        "HTTP",
        "TLS",
        "storage",
        "fine-tuning",
        "log",
        "configuration",
    ),
)
