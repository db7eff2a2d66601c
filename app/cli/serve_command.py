"""`tessera serve`: from its options to a running server."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from tessera.app.cli.api_keys import gather_api_keys
from tessera.app.cli.serve_options import KeyOptions, ModelOptions
from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.keys.keys_file import read_keys_file, with_slots
from tessera.app.settings import AppSettings, ServerOptions
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions
from tessera.options.parser import EXIT_WRONG_USE

logger = logging.getLogger("tessera.serve")


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
    from tessera.app.cli.hub import builtin_model, find_model

    given.make(EngineConfig, model="").verify()  # before the model is looked for: a download takes long
    models = given.make(ModelOptions)
    chat_template = _existing_file("--chat-template", given.value("chat_template"))
    keys = _accepted_keys(given)
    model = find_model(models.model) if models.model else builtin_model()
    names = models.served_model_name or (model.name,)
    embedding = find_model(models.embedding_model) if models.embedding_model else None
    reranker = find_model(models.reranker_model) if models.reranker_model else None
    taken = names
    for option, beside in (("--embedding-model", embedding), ("--reranker-model", reranker)):
        if beside is not None and beside.name in taken:
            raise ConfigError(f"{option} and another model are both called {beside.name}: see --served-model-name")
        taken += (beside.name,) if beside is not None else ()
    embedding_folder, reranker_folder = (
        str(beside.path) if beside is not None else None for beside in (embedding, reranker)
    )
    embedding_names, reranker_names = ((beside.name,) if beside is not None else () for beside in (embedding, reranker))
    return given.make(
        ServerOptions,
        keys_file=_keys_file(given),
        engine=given.make(
            EngineConfig,
            model=str(model.path),
            served_name=names[0],
            embedding_model=embedding_folder or "",
            embedding_name="".join(embedding_names),
            reranker_model=reranker_folder or "",
            reranker_name="".join(reranker_names),
        ),
        app=given.make(
            AppSettings,
            model_folder=str(model.path),
            served_model_names=names,
            api_keys=keys.plain,
            keys=keys.named,
            chat_template=chat_template,
            embedding_folder=embedding_folder,
            embedding_model_names=embedding_names,
            reranker_folder=reranker_folder,
            reranker_model_names=reranker_names,
        ),
    )


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
