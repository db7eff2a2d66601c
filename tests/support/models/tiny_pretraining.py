"""A tiny relative of the built-in model, which learns from random weights what the built-in model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tessera.engine.autograd.functions import Functions
from tessera.engine.builtin.training.render import FOLDER
from tessera.engine.builtin.training.rows import RowMaker
from tessera.engine.builtin.training.train import TOKENIZER, Pretraining, Settings
from tessera.engine.training.stream import ExampleStream

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


def make_base(folder: Path, **config: Any) -> Path:
    """The model's folder without weights."""
    folder.mkdir()
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", TOKENIZER):
        shutil.copyfile(FOLDER / name, folder / name)
    built_in = json.loads((FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**built_in, **CONFIG, **config}))
    return folder


def settings_in(folder: Path, base: Path, **changed: Any) -> Settings:
    """Of a training in a folder, which is made with the built-in model's tokenizer."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(FOLDER / TOKENIZER, folder / TOKENIZER)
    values: dict[str, Any] = {"num_rows": 2, "length": 128, "micro_batch_tokens": 1024, "evaluate_every": 0, **changed}
    return Settings(out=folder, base=base, **values)


def trained(settings: Settings, f: Functions, stop: int | None = None) -> tuple[dict[str, bytes], list[float]]:
    """From the newest checkpoint on, until after the step `stop`; -> the optimisers' bits and all losses."""
    maker = RowMaker(settings.out / TOKENIZER, settings.num_rows, settings.length, settings.seed)
    with ExampleStream(maker, maker.digest, 0) as stream:
        training = Pretraining(settings, f, stream)
        training.run.resume()
        training.run.run(is_stopped=lambda: training.run.step == stop)
        state = {name: tensor.numpy().tobytes() for name, tensor in training.trainer.optimizer.tensors()}
        return state, [record.loss for record in training.run.records]
