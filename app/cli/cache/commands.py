"""`tessera pull`, `list`, `show` and `rm`: what they do and print."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tessera.app.cli.cache.cached_models import CachedModel, cache_folder, cached_models, models_named, remove_models
from tessera.app.cli.cache.options import ListOptions, PullOptions, RmOptions, ShowOptions
from tessera.app.cli.cache.units import ago, size
from tessera.app.cli.hub import builtin_model, find_model
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions

EXIT_PROBLEM = 1
YES = ("y", "yes")


def pull_command(given: GivenOptions) -> int:
    """-> exit code. Raises ConfigError: a model cannot be found, downloaded or served."""
    options = given.make(PullOptions)
    if not options.models:
        raise ConfigError("pull: name a model, such as Qwen/Qwen3-0.6B")
    pulled = []
    for model in options.models:
        begin = time.monotonic()
        found = find_model(model)
        nbytes = _bytes_of(found.path)
        pulled.append({"name": found.name, "path": str(found.path), "bytes": nbytes})
        if not options.json:
            print(f"{found.name}: {size(nbytes)} in {found.path} ({time.monotonic() - begin:.1f} s)")
    if options.json:
        _print_json(pulled)
    return 0


def _bytes_of(path: Path) -> int:
    """Of a model's folder, or of a GGUF file with its further parts."""
    if path.is_file():
        from tessera.engine.gguf.names import split_paths

        return sum(part.stat().st_size for part in split_paths(path) if part.is_file())
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def list_command(given: GivenOptions) -> int:
    """-> exit code."""
    options = given.make(ListOptions)
    cache = cache_folder()
    models = [model for model in cached_models(cache) if (options.name or "").lower() in model.name.lower()]
    if options.names:
        for model in models:
            print(model.name)
    elif options.json:
        _print_json([_fields(model) for model in models])
    elif not models:
        named = f" whose name has {options.name!r}" if options.name else ""
        print(f"There is no model{named} in {cache}. `tessera pull Qwen/Qwen3-0.6B` downloads one.")
    else:
        _print_models(models, cache)
    return 0


def _print_models(models: list[CachedModel], cache: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("format", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    for model in models:
        state = "" if model.complete else ", incomplete"
        table.add_row(model.name, size(model.nbytes), model.format + state, ago(time.time() - model.modified))
    console = Console(highlight=False)
    console.print(table)
    blobs = {file.resolve(): 0 for model in models for file in model.files}
    total = sum(blob.stat().st_size for blob in blobs)
    console.print(f"{size(total)} in {cache}", style="dim", soft_wrap=True)


def _fields(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "format": model.format,
        "bytes": model.nbytes,
        "complete": model.complete,
        "revision": model.revision,
        "path": str(model.path),
        "modified": int(model.modified),
    }


def rm_command(given: GivenOptions) -> int:
    """-> exit code: 1 if the user says no. Raises ConfigError: a model is not in the cache or cannot be removed."""
    options = given.make(RmOptions)
    if not options.models:
        raise ConfigError("rm: name a model, as `tessera list` shows it")
    cache = cache_folder()
    chosen = [models_named(cache, model) for model in options.models]
    found = [model for _, models in chosen for model in models]
    if not options.yes:
        _ask(found)
    for repository, models in chosen:
        remove_models(repository, models)
    if options.json:
        _print_json([_fields(model) for model in found])
    else:
        for model in found:
            print(f"removed {model.name}, {size(model.nbytes)}")
    return 0


def _ask(models: list[CachedModel]) -> None:
    """Raises ConfigError without a terminal; SystemExit where the user says no."""
    if not sys.stdin.isatty():
        raise ConfigError("rm: there is no terminal to ask on; add --yes")
    for model in models:
        print(f"  {model.name}, {size(model.nbytes)}", file=sys.stderr)
    print("Remove? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in YES:
        raise SystemExit(EXIT_PROBLEM)


def show_command(given: GivenOptions) -> int:
    """-> exit code: 1 if the model cannot be served. Raises ConfigError: there is no such model."""
    logging.getLogger("tessera").addHandler(logging.NullHandler())  # its notes are part of what is shown
    from tessera.app.cli.cache.model_facts import read_facts

    options = given.make(ShowOptions)
    model = find_model(options.model, weights=False) if options.model else builtin_model()
    present = _has_weights(model.path)
    facts = read_facts(model.path, options.dtype, weights_present=present)
    context = options.context or facts.context or 0
    if options.json:
        memory = {
            "context": context,
            "num_seqs": options.num_seqs,
            "kv_cache_bytes": (facts.kv_bytes_per_token or 0) * context * options.num_seqs,
            "memory_bytes": facts.memory(context, options.num_seqs),
        }
        fields = asdict(facts)
        problem = fields.pop("problem")
        found = {"name": model.name, "path": str(model.path), "weights_present": present}
        _print_json({**found, **fields, **memory, "servable": problem is None, "problem": problem})
    else:
        from tessera.app.cli.cache.facts_table import facts_rows

        _print_rows(facts_rows(model.name, model.path, facts, context, options.num_seqs, weights_present=present))
    return 0 if facts.problem is None else EXIT_PROBLEM


def _has_weights(path: Path) -> bool:
    """Whether the folder has weights, or should have: one in the cache may have the small files alone."""
    in_cache = cache_folder() in path.parents
    return path.is_file() or not in_cache or any(path.glob("*.safetensors"))


def _print_rows(rows: list[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))  # which may have brackets, as marks of reasoning do
    Console(highlight=False).print(table)


def _print_json(value: Any) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
