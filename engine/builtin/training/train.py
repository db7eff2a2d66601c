"""Makes the built-in model: `python -m tessera.engine.builtin.training.train --out FOLDER`.

Conversations are generated while training, by worker processes, in an order that depends on the seed alone. Matrices are
trained with Muon, embeddings and norms with AdamW; the learning rate is held, then falls linearly to zero. A
held-out case counts as right if every token of its answer is the most probable one given the tokens before it, which is
what greedy decoding would give.

The folder gets `tokenizer.json`, `metrics.jsonl`, `checkpoints` and `model`, which is written with every evaluation, and
at the end `evaluation.json`. A training that was killed goes on by the same command. `--minutes` is the time of the whole
command: when it is nearly over, the training stops wherever it is, and its model is written and evaluated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from tessera.engine.autograd.functions import Functions
from tessera.engine.builtin.training.conversation import Split
from tessera.engine.builtin.training.corpus import skills_of
from tessera.engine.builtin.training.exact_match import exact_match
from tessera.engine.builtin.training.render import FOLDER
from tessera.engine.builtin.training.rows import RowMaker
from tessera.engine.builtin.training.tokenizer import write as write_tokenizer
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.models.config import load_config
from tessera.engine.runner.devices import select_device
from tessera.engine.tensor import CPU, bfloat16, float32
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.model_folder import save_model
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.optimizers.groups import OptimizerGroups
from tessera.engine.training.optimizers.muon import Muon, MuonSettings
from tessera.engine.training.parameters import initial_parameters, load_parameters
from tessera.engine.training.run import RunSettings, StepRecord, TrainingRun
from tessera.engine.training.stream import ExampleStream
from tessera.engine.training.trainer import Trainer

TOKENIZER, MODEL, EVALUATION = "tokenizer.json", "model", "evaluation.json"
NUM_WARMUP_STEPS = 100
NUM_TIMED_STEPS = 60  # of which the second half is timed
VALIDATION_SEED = 1_000_000  # added to the seed
FINAL_COUNT = 300  # cases a skill at the end
CASE_SECONDS = 0.003  # of a case that is evaluated, most of them for making it
TIMED_SHARE = 0.97  # of the time that is left for steps, which is planned
SPLITS: dict[str, Split] = {"held-out words": "test", "held-out phrasings": "phrasings"}


@dataclass(frozen=True)
class Settings:
    """See `main` for all of them.

    Attributes:
        base: a folder with config.json and what else a model has beside weights.
        keeps_weights: the base's weights are trained further, rather than random ones.
    """

    out: Path
    base: Path = FOLDER
    keeps_weights: bool = False
    num_steps: int = 6000
    num_rows: int = 64
    length: int = 2048
    micro_batch_tokens: int = 64 * 2048
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    seed: int = 1
    num_workers: int = 0
    save_every: int = 1000
    evaluate_every: int = 1000
    num_cases: int = 100


class Pretraining:
    """The model, its optimisers and its loop.

    Attributes:
        decoder: what is trained.
        trainer: takes steps.
        run: all of them.
    """

    def __init__(self, settings: Settings, f: Functions, stream: ExampleStream) -> None:
        dtype = float32 if f.device is CPU else bfloat16
        config = load_config(settings.base)
        self._tokenizer = Tokenizer.from_file(str(settings.out / TOKENIZER))
        if self._tokenizer.get_vocab_size() > config.vocab_size:
            raise ConfigError(
                f"{settings.out / TOKENIZER} has {self._tokenizer.get_vocab_size()} tokens, "
                f"more than the {config.vocab_size} of {settings.base / 'config.json'}"
            )
        f.device.keep_large_memory()
        f.training.prepare(dtype, {layer.attention.head_dim for layer in config.layers})
        self._settings = settings
        if settings.keeps_weights:
            self._parameters = load_parameters(settings.base, f.ops, dtype)
        else:
            self._parameters = initial_parameters(config, f.ops, dtype, seed=settings.seed)
        max_len = max(settings.length, config.max_position_embeddings)
        self.decoder = TrainableDecoder(self._parameters, f, max_len=max_len)
        adamw = AdamW(
            [each for each in self._parameters if not each.is_projection],
            f.ops,
            f.training,
            AdamWSettings(beta2=0.98),
        )
        muon = Muon([each for each in self._parameters if each.is_projection], f.ops, f.training, MuonSettings())
        groups = OptimizerGroups([(muon, 1.0), (adamw, settings.adam_rate / settings.muon_rate)], f.ops)
        self.trainer = Trainer(
            self.decoder, groups, micro_batch_tokens=settings.micro_batch_tokens, max_gradient_norm=math.inf
        )
        self.run = TrainingRun(
            settings.out,
            self.trainer,
            stream,
            RunSettings(
                num_steps=settings.num_steps,
                batch_size=settings.num_rows,
                learning_rate=settings.muon_rate,
                schedule="hold",
                warmup_share=min(NUM_WARMUP_STEPS / settings.num_steps, 0.1),
                seed=settings.seed,
                save_every=settings.save_every,
                evaluate_every=settings.evaluate_every,
            ),
            validation=self._validation(),
            identity={"adam_rate": settings.adam_rate, "dtype": dtype.name, "micro_batch": settings.micro_batch_tokens},
        )

    def shares(self, split: Split, count: int) -> dict[str, float]:
        """Exact match by skill."""
        return exact_match(self.decoder, self._tokenizer, split, count, self._settings.micro_batch_tokens)

    def save(self) -> Path:
        """-> the model's folder."""
        folder = self._settings.out / MODEL
        save_model(folder, self._settings.base, self._parameters, self.decoder.functions.ops, bfloat16)
        shutil.copyfile(self._settings.out / TOKENIZER, folder / TOKENIZER)
        return folder

    def _validation(self) -> list[Example]:
        """Rows of other conversations of the kinds that are trained."""
        settings = self._settings
        num_rows = max(1, settings.num_rows // 8)
        return RowMaker(settings.out / TOKENIZER, num_rows, settings.length, settings.seed + VALIDATION_SEED)(0)


def _stream(settings: Settings) -> ExampleStream:
    maker = RowMaker(settings.out / TOKENIZER, settings.num_rows, settings.length, settings.seed)
    return ExampleStream(maker, maker.digest, settings.num_workers)


def seconds_per_step(settings: Settings, f: Functions) -> float:
    """Measured with the stream's worker processes at work, on a model that is dropped."""
    with _stream(settings) as stream:
        trainer = Pretraining(settings, f, stream).trainer
        start = 0.0
        for step in range(NUM_TIMED_STEPS):
            if step == NUM_TIMED_STEPS // 2:
                start = time.perf_counter()
            trainer.step(stream.batch(step), 1e-4)
    return (time.perf_counter() - start) / (NUM_TIMED_STEPS - NUM_TIMED_STEPS // 2)


def seconds_of_evaluation(num_cases: int) -> float:
    """About; of so many cases a skill."""
    return sum(len(skills_of(split)) for split in SPLITS.values()) * num_cases * CASE_SECONDS


def steps_within(seconds: float, per_step: float, settings: Settings) -> int:
    """Steps, with the evaluations among them, that take so long; at least one."""
    if settings.evaluate_every:
        per_step += seconds_of_evaluation(settings.num_cases) / settings.evaluate_every
    return max(1, int(seconds * TIMED_SHARE / per_step))


def train(settings: Settings, f: Functions, say: Callable[[str], None], stop_at: float = math.inf) -> Pretraining:
    """All steps, from the newest checkpoint on where there is one, and the model's folder.

    Args:
        stop_at: of `time.perf_counter`: when no further step is taken.

    Raises: TesseraError; OSError.
    """
    with _stream(settings) as stream:
        training = Pretraining(settings, f, stream)
        resumed = training.run.resume()
        if resumed:
            say(f"resuming after step {resumed} of {settings.num_steps}")
        line_every = max(1, settings.num_steps // 50)
        last_step, last_time = resumed, time.perf_counter()

        def on_step(record: StepRecord) -> None:
            nonlocal last_step, last_time
            is_last = record.step == settings.num_steps
            if record.step % line_every == 0 or is_last or record.validation_loss is not None:
                passed, now = record.step - last_step, time.perf_counter()
                rate = passed * settings.num_rows * settings.length / (now - last_time)
                held_out = "" if record.validation_loss is None else f", held-out {record.validation_loss:.4f}"
                say(
                    f"step {record.step} of {settings.num_steps}: loss {record.loss:.4f}{held_out}, {rate:,.0f} tokens/s"
                )
                last_step, last_time = record.step, now
            if settings.evaluate_every and record.step % settings.evaluate_every == 0 and not is_last:
                training.save()
                for name, split in SPLITS.items():
                    say(_described(name, training.shares(split, settings.num_cases)))
                last_time = time.perf_counter()

        training.run.run(on_step, is_stopped=lambda: time.perf_counter() > stop_at)
    if training.run.step < settings.num_steps:
        say(f"time is up after step {training.run.step} of {settings.num_steps}")
    say(f"the model is in {training.save()}")
    return training


def _described(name: str, shares: dict[str, float]) -> str:
    """A line of figures."""
    mean = sum(shares.values()) / len(shares)
    return f"{name}: mean {mean:.1%}; " + ", ".join(f"{skill} {share:.0%}" for skill, share in shares.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tessera.engine.builtin.training.train",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", type=Path, default=Settings.base, help="folder with config.json and chat template")
    base.add_argument("--from", dest="start", type=Path, help="model to train further, with its own tokenizer")
    parser.add_argument("--steps", type=int, default=Settings.num_steps)
    parser.add_argument(
        "--minutes", type=float, help=f"of the command; {NUM_TIMED_STEPS} steps are timed, then as many as fit"
    )
    parser.add_argument("--rows", type=int, default=Settings.num_rows, help="rows a step")
    parser.add_argument("--length", type=int, default=Settings.length, help="tokens a row")
    parser.add_argument("--micro-batch-tokens", type=int, default=Settings.micro_batch_tokens, help="at a time")
    parser.add_argument("--muon-rate", type=float, default=Settings.muon_rate, help="learning rate of matrices")
    parser.add_argument("--adam-rate", type=float, default=Settings.adam_rate, help="of embeddings and norms")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that make conversations"
    )
    parser.add_argument("--save-every", type=int, default=Settings.save_every, help="steps between checkpoints")
    parser.add_argument("--evaluate-every", type=int, default=Settings.evaluate_every, help="steps; 0: at the end")
    parser.add_argument("--cases", type=int, default=Settings.num_cases, help="held-out cases a skill, on the way")
    options = parser.parse_args()
    try:
        return _run(options)
    except (TesseraError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {text}", flush=True)

    device, reason = select_device(options.device)
    say(f"on {device}: {reason}")
    f = Functions.on(device)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start is not None:
        shutil.copyfile(options.start / TOKENIZER, options.out / TOKENIZER)
    elif not (options.out / TOKENIZER).exists():
        write_tokenizer(options.out)
        say("the tokenizer is trained")
    settings = Settings(
        out=options.out,
        base=options.start or options.base,
        keeps_weights=options.start is not None,
        num_steps=options.steps,
        num_rows=options.rows,
        length=options.length,
        micro_batch_tokens=options.micro_batch_tokens,
        muon_rate=options.muon_rate,
        adam_rate=options.adam_rate,
        seed=options.seed,
        num_workers=options.workers,
        save_every=options.save_every,
        evaluate_every=options.evaluate_every,
        num_cases=options.cases,
    )
    stop_at = math.inf
    if options.minutes is not None:
        stop_at = start + options.minutes * 60 - seconds_of_evaluation(FINAL_COUNT)
        seconds = seconds_per_step(settings, f)
        num_steps = steps_within(stop_at - time.perf_counter(), seconds, settings)
        say(f"a step takes {seconds * 1000:.1f} ms, so there are {num_steps}: to resume, --steps {num_steps}")
        settings = replace(settings, num_steps=num_steps)
    training = train(settings, f, say, stop_at)
    found: dict[str, dict[str, float]] = {}
    for name, split in SPLITS.items():
        found[name] = training.shares(split, FINAL_COUNT)
        say(_described(name, found[name]))
        (settings.out / EVALUATION).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
