"""A training in a process of its own, which a test kills.

python -m tests.support.processes.training_child MODEL OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tessera.engine.autograd.functions import Functions
from tessera.engine.tensor import CPU
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import load_parameters
from tessera.engine.training.run import RunSettings, TrainingRun
from tessera.engine.training.trainer import Trainer

SETTINGS = RunSettings(num_steps=15, batch_size=4, learning_rate=1e-3, seed=3, save_every=3)


def examples(count: int = 10) -> list[Example]:
    rng = np.random.default_rng(7)
    lengths = rng.integers(2, 20, count)
    return [Example(rng.integers(3, 90, n).astype(np.int32), np.ones(n, np.float32)) for n in lengths]


def training(model: Path, output: Path, settings: RunSettings = SETTINGS) -> tuple[TrainingRun[Example], AdamW]:
    f = Functions.on(CPU)
    parameters = load_parameters(model, f.ops)
    decoder = TrainableDecoder(parameters, f, max_len=64)
    optimizer = AdamW(list(parameters), f.ops, f.training, AdamWSettings(weight_decay=0.1))
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=24, max_gradient_norm=1.0)
    return TrainingRun(output, trainer, examples(), settings), optimizer


def main() -> None:
    run, _ = training(Path(sys.argv[1]), Path(sys.argv[2]))
    run.resume()
    run.run(lambda record: print(record.step, flush=True))


if __name__ == "__main__":
    main()
