"""`tessera serve`: from its options to a running server."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.app.cli.api_keys import gather_api_keys
from tessera.app.cli.serve_options import KeyOptions, ModelOptions, ResidenceOptions
from tessera.app.engines.messages import EngineLaunch
from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.keys.keys_file import read_keys_file, with_slots
from tessera.app.model_settings import ModelSettings
from tessera.app.settings import AppSettings, ServerOptions
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions
from tessera.options.parser import EXIT_WRONG_USE

logger = logging.getLogger("tessera.serve")

if TYPE_CHECKING:
    from tessera.app.cli.hub import ModelFolder

DEFAULT_KEEP_ALIVE = 300.0  # seconds, of one of several models
SHARE_MARGIN = 1e-6  # sums of shares are sums of floats


def serve_command(given: GivenOptions) -> int:
    """Serve until a signal; -> exit code.

    Raises:
        ConfigError: an option or the model cannot be used. With `--log-format json` the server itself logs it instead.
    """
    # Imported late, so that --help and wrong options are answered at once.
    from tessera.app.server.serve import run_server

    options = server_options(given)
    try:
        return run_server(options, read_keys=partial(_accepted_keys, given))
    except ConfigError as error:
        if options.app.log_format != "json":
            raise
        logger.critical("%s", error)
        return EXIT_WRONG_USE


def server_options(given: GivenOptions) -> ServerOptions:
    """Read the files that the options name, and find the models, which may download them.

    Raises:
        ConfigError: an option, a file or a model cannot be used.
    """
    from tessera.app.sockets.tls import make_context

    entries: tuple[dict[str, Any], ...] = given.value("models")
    if entries and given.source("model") != "default":
        raise ConfigError("a MODEL and the list `models` of the --config file were given: leave one of them out")
    each = [given.with_entry(entry) for entry in entries] or [given]
    for one in each:  # before a model is looked for: a download takes long
        one.make(EngineConfig, model="").verify()
        _existing_file("--chat-template", one.value("chat_template"))
    make_context(given.make(AppSettings, model_folder="", served_model_names=()))
    keys = _accepted_keys(given)
    found = [_find_models(one) for one in each]
    _check_names([name for models in found for name in models.names])
    keep_alive: float | None = given.make(ResidenceOptions).model_keep_alive
    settings = [models.settings(one) for models, one in zip(found, each, strict=True)]
    launches = tuple(
        EngineLaunch(
            config=models.engine(one, beside_others=len(entries) > 1),
            keep_alive=_keep_alive(one, DEFAULT_KEEP_ALIVE if entries else None),
            preload=entry.get("preload", False) if entries else True,
            num_engines=one.value("data_parallel_size"),
        )
        for models, one, entry in zip(found, each, entries or ({},), strict=True)
    )
    share = _check_shares(given, launches) if entries else 1.0
    first = {field: getattr(settings[0], field) for field in ModelSettings.__struct_fields__}
    return given.make(
        ServerOptions,
        keys_file=_keys_file(given),
        engines=launches,
        device_share=share,
        app=given.make(
            AppSettings,
            **first,
            api_keys=keys.plain,
            keys=keys.named,
            other_models=tuple(settings[1:]),
            is_static=not entries and keep_alive is None,
        ),
    )


@dataclass(frozen=True)
class FoundModels:
    """A model and what is served beside it, as folders or files of this machine."""

    model: ModelFolder
    embedding: ModelFolder | None
    reranker: ModelFolder | None
    drafter: ModelFolder | None
    served_names: tuple[str, ...]
    adapters: tuple[tuple[str, str], ...]  # names and folders

    @property
    def names(self) -> tuple[str, ...]:
        beside = (each.name for each in (self.embedding, self.reranker) if each is not None)
        return (*self.served_names, *beside, *(name for name, _ in self.adapters))

    def engine(self, given: GivenOptions, *, beside_others: bool) -> EngineConfig:
        made = given.make(
            EngineConfig,
            model=str(self.model.path),
            served_name=self.served_names[0],
            embedding_model=_path(self.embedding) or "",
            embedding_name="".join(_names(self.embedding)),
            reranker_model=_path(self.reranker) or "",
            reranker_name="".join(_names(self.reranker)),
            beside_others=beside_others,
            can_sleep=given.value("sleep_host_gib") is not None,
            lora=tuple(f"{name}={folder}" for name, folder in self.adapters),
            fine_tuned=given.value("enable_fine_tuning"),
        )
        if self.drafter is not None:
            made = made.with_draft_model(str(self.drafter.path))
        made.verify()
        return made

    def settings(self, given: GivenOptions) -> ModelSettings:
        return given.make(
            ModelSettings,
            model_folder=str(self.model.path),
            served_model_names=self.served_names,
            chat_template=_existing_file("--chat-template", given.value("chat_template")),
            embedding_folder=_path(self.embedding),
            embedding_model_names=_names(self.embedding),
            reranker_folder=_path(self.reranker),
            reranker_model_names=_names(self.reranker),
            adapter_names=tuple(name for name, _ in self.adapters),
        )


def _find_models(given: GivenOptions) -> FoundModels:
    from tessera.app.cli.hub import builtin_model, find_model

    models = given.make(ModelOptions)
    model = find_model(models.model) if models.model else builtin_model()
    embedding = find_model(models.embedding_model) if models.embedding_model else None
    reranker = find_model(models.reranker_model) if models.reranker_model else None
    names = models.served_model_name or (model.name,)
    taken = names
    for option, beside in (("--embedding-model", embedding), ("--reranker-model", reranker)):
        if beside is not None and beside.name in taken:
            raise ConfigError(f"{option} and another model are both called {beside.name}: see --served-model-name")
        taken += (beside.name,) if beside is not None else ()
    speculation = given.make(EngineConfig, model="").speculation_settings
    drafter = find_model(speculation.model) if speculation is not None and speculation.model else None
    return FoundModels(model, embedding, reranker, drafter, names, _find_adapters(given, taken))


def _find_adapters(given: GivenOptions, taken: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names and absolute folders of --lora; `taken` are names of models."""
    found: dict[str, str] = {}
    for name, folder in given.make(EngineConfig, model="").adapters:
        if name in taken or name in found:
            raise ConfigError(f"--lora: two models are called {name}")
        if not Path(folder).is_dir():
            raise ConfigError(f"--lora {name}: there is no folder {folder}")
        found[name] = str(Path(folder).resolve())
    return tuple(found.items())


def _path(found: ModelFolder | None) -> str | None:
    return str(found.path) if found is not None else None


def _names(found: ModelFolder | None) -> tuple[str, ...]:
    return (found.name,) if found is not None else ()


def _check_names(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"models: two are called {twice}: give each a served-model-name of its own")


def _keep_alive(given: GivenOptions, default: float | None) -> float | None:
    """As `EngineLaunch` has it."""
    asked = given.make(ResidenceOptions).model_keep_alive
    return default if asked is None else None if asked == math.inf else asked


def _check_shares(given: GivenOptions, launches: Sequence[EngineLaunch]) -> float:
    """-> what the loaded models may take together. Raises ConfigError where one, or those at the start, take more."""
    budget: float = given.value("gpu_memory_utilization")
    for launch in launches:
        share = launch.config.gpu_memory_utilization
        if share > budget:
            raise ConfigError(
                f"models: {launch.config.served_name} has a gpu-memory-utilization of {share:g}, more than the "
                f"{budget:g} of all models together"
            )
    preloaded = sum(launch.config.gpu_memory_utilization for launch in launches if launch.preload)
    if preloaded > budget + SHARE_MARGIN:
        raise ConfigError(
            f"models: those with preload have a gpu-memory-utilization of {preloaded:g} together, more than the "
            f"{budget:g} of all models: give each a smaller one"
        )
    return budget


KEY_FIELDS = ("api_key", "api_key_file", "api_keys_file")


def _accepted_keys(given: GivenOptions) -> AcceptedKeys:
    """Keys and key files of the same source count together; those of a lower source do not."""
    options = given.make(KeyOptions)
    plain = gather_api_keys(
        options.api_key if _counts(given, "api_key") else (),
        options.api_key_file if _counts(given, "api_key_file") else None,
        "TESSERA_API_KEY" if given.source("api_key") == "environment" else "--api-key",
    )
    file = _keys_file(given)
    if file is None:
        return AcceptedKeys(plain)
    keys = AcceptedKeys(plain, with_slots(read_keys_file(Path(file))))
    if not keys:
        raise ConfigError(f"--api-keys-file {file} has no keys: make one with `tessera keys add`")
    return keys


def _counts(given: GivenOptions, field: str) -> bool:
    return given.rank(field) == min(map(given.rank, KEY_FIELDS))


def _keys_file(given: GivenOptions) -> str | None:
    return given.make(KeyOptions).api_keys_file if _counts(given, "api_keys_file") else None


def _existing_file(option: str, path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(f"{option}: there is no file {path}")
    return str(Path(path).resolve())
