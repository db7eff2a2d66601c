"""`tessera train`: from its options to a trained model or adapter."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tessera.app.cli.hub import ModelFolder, builtin_model, find_model
from tessera.app.cli.train.options import AdapterOptions, DataOptions, OptimisationOptions, TrainResourceOptions
from tessera.app.cli.train.plot import svg_plot, terminal_plot
from tessera.app.text.chat_template import load_chat_template
from tessera.app.text.tokenizer import load_tokenizer
from tessera.app.training.conversations import read_conversations
from tessera.app.training.encoder import ConversationEncoder
from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.tensor import CPU, bfloat16, float32
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, ExampleOrder
from tessera.engine.training.lora import LoraSettings, adapter_parameters, make_adapters, merge, save_adapter
from tessera.engine.training.model_folder import save_model
from tessera.engine.training.optimizer import AdamW, AdamWSettings
from tessera.engine.training.parameters import check_trainable, load_parameters
from tessera.engine.training.run import METRICS_FILE, RunSettings, StepRecord, TrainingRun
from tessera.engine.training.trainer import Trainer
from tessera.options.command_options import GivenOptions

EXIT_FAILURE = 1
MODEL, ADAPTER, PLOT = "model", "adapter", "loss.svg"
USUAL_MAX_LENGTH = 4096
FULL_RATE, LORA_RATE = 2e-5, 2e-4


def train_command(given: GivenOptions) -> int:
    """-> exit code: 0, or 1 where the training failed. Raises ConfigError: options, model or data cannot be used."""
    try:
        return _Training(given).run()
    except ConfigError:
        raise
    except (TesseraError, OSError) as error:
        print(f"tessera train: {error}", file=sys.stderr)
        return EXIT_FAILURE


class _Training:
    def __init__(self, given: GivenOptions) -> None:
        self._data = given.make(DataOptions)
        self._adapter = given.make(AdapterOptions)
        self._optimisation = given.make(OptimisationOptions)
        self._resources = given.make(TrainResourceOptions)
        self._console = Console(stderr=True)

    def run(self) -> int:
        chats, output = self._checked_places()
        found = builtin_model() if self._data.model is None else find_model(self._data.model)
        config = load_config(found.path)
        check_trainable(config, found.name)
        max_length = self._resources.max_length or min(config.usual_context, USUAL_MAX_LENGTH)
        if max_length > config.longest_context:
            raise ConfigError(f"--max-length {max_length} is beyond the model's context of {config.longest_context}")
        encoder = _encoder(found, config)
        examples = self._examples(encoder, chats, max_length)
        validation = self._data.validation_data
        held_out = self._examples(encoder, validation, max_length) if validation is not None else []
        return self._train(found, output, examples, held_out, max_length)

    def _checked_places(self) -> tuple[Path, Path]:
        """-> the data and the output folder."""
        data, output = self._data.data, self._data.output
        if data is None or output is None:
            raise ConfigError(f"train: give --{'data FILE' if data is None else 'output FOLDER'}")
        if not self._data.resume and (output / METRICS_FILE).exists():
            raise ConfigError(
                f"train: {output} holds a training already; --resume goes on with it, or give another --output"
            )
        return data, output

    def _examples(self, encoder: ConversationEncoder, path: Path, max_length: int) -> list[Example]:
        """Raises: ConfigError naming the line at fault."""
        examples: list[Example] = []
        cut = dropped = 0
        for number, conversation in read_conversations(path):
            try:
                encoded = encoder.encode(conversation)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            for token_ids, counted in encoded:
                cut += len(token_ids) > max_length
                ids, weights = np.array(token_ids[:max_length], np.int32), np.array(counted[:max_length], np.float32)
                if weights[1:].any():
                    examples.append(Example(ids, weights))
                else:
                    dropped += 1
        if cut:
            total = len(examples) + dropped
            self._say(
                f"{path}: cut at {max_length} tokens: {cut} of {total} chats, "
                f"of which {dropped} have nothing left to learn"
            )
        if not examples:
            raise ConfigError(f"{path}: no chat has anything to learn within {max_length} tokens")
        return examples

    def _train(
        self, found: ModelFolder, output: Path, examples: list[Example], held_out: list[Example], max_length: int
    ) -> int:
        adapter, optimisation, resources = self._adapter, self._optimisation, self._resources
        dtype = bfloat16 if resources.dtype == "bfloat16" else float32
        f = Functions.on(CPU)
        parameters = load_parameters(found.path, f.ops, dtype)
        lora = LoraSettings(adapter.lora_rank, adapter.lora_alpha, adapter.lora_targets, adapter.rslora)
        adapters, trained = {}, list(parameters)
        if adapter.lora:
            parameters.freeze()
            adapters = make_adapters(parameters, lora, f.device, dtype, seed=optimisation.seed)
            trained = list(adapter_parameters(adapters))
        decoder = TrainableDecoder(
            parameters, f, max_len=max_length, adapters=adapters, checkpoints_layers=resources.checkpoint_layers
        )
        optimizer = AdamW(trained, f.ops, f.training, AdamWSettings(weight_decay=optimisation.weight_decay))
        trainer = Trainer(
            decoder,
            optimizer,
            micro_batch_tokens=resources.micro_batch_tokens,
            max_gradient_norm=optimisation.max_gradient_norm,
        )
        identity: dict[str, Any] = {
            "micro_batch_tokens": resources.micro_batch_tokens,
            "max_gradient_norm": optimisation.max_gradient_norm,
            "model": found.name,
            "dtype": resources.dtype,
            "weight_decay": optimisation.weight_decay,
            "lora": [lora.rank, lora.alpha, *lora.targets, lora.rank_stabilised] if adapter.lora else None,
        }
        settings = self._run_settings(len(examples))
        run = TrainingRun(output, trainer, examples, settings, validation=held_out, identity=identity)
        if self._data.resume and run.resume():
            self._say(f"resuming after step {run.step} of {settings.num_steps}")
        num_trained = sum(parameter.variable.value.size for parameter in trained)
        num_tokens = sum(example.num_tokens for example in examples)
        self._say(
            f"{found.name}: {num_trained:,} parameters are trained on {len(examples):,} chats, {num_tokens:,} tokens, "
            f"in {settings.num_steps:,} steps"
        )
        seconds = self._run(run)
        if adapter.lora:
            save_adapter(output / ADAPTER, adapters, lora, self._data.model or found.name)
            if adapter.merge:
                merge(parameters, adapters, f.ops)
        if not adapter.lora or adapter.merge:
            save_model(output / MODEL, found.path, parameters, f.ops, load_config(found.path).torch_dtype or dtype)
        self._report(run, output, seconds)
        return 0

    def _run_settings(self, num_examples: int) -> RunSettings:
        optimisation, resources = self._optimisation, self._resources
        order = ExampleOrder(num_examples, optimisation.batch_size, optimisation.seed)
        rate = optimisation.learning_rate
        return RunSettings(
            num_steps=optimisation.max_steps or optimisation.epochs * order.steps_per_epoch,
            batch_size=optimisation.batch_size,
            learning_rate=rate if rate is not None else LORA_RATE if self._adapter.lora else FULL_RATE,
            schedule=optimisation.schedule,
            warmup_share=optimisation.warmup_share,
            seed=optimisation.seed,
            save_every=resources.save_every,
            evaluate_every=resources.evaluate_every,
        )

    def _run(self, run: TrainingRun) -> float:
        """With a bar on a terminal, else a line now and then; -> seconds."""
        start = time.perf_counter()
        if not self._console.is_terminal:
            every = max(run.settings.num_steps // 20, 1)

            def print_line(record: StepRecord) -> None:
                if record.step % every == 0 or record.step == run.settings.num_steps:
                    self._say(f"step {record.step} of {run.settings.num_steps}: {_described(record)}")

            run.run(print_line)
            return time.perf_counter() - start
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("", total=run.settings.num_steps, completed=run.step)
            run.run(lambda record: progress.update(task, completed=record.step, description=_described(record)))
        return time.perf_counter() - start

    def _report(self, run: TrainingRun, output: Path, seconds: float) -> None:
        points = [(record.step, record.loss) for record in run.records]
        validation = [
            (record.step, record.validation_loss) for record in run.records if record.validation_loss is not None
        ]
        (output / PLOT).write_text(svg_plot(f"Loss of {output.name}", {"training": points, "validation": validation}))
        self._say(terminal_plot(points))
        self._say(f"done in {seconds:.0f} s; losses are in {output / METRICS_FILE} and {output / PLOT}")
        if self._adapter.lora:
            self._say(f"the adapter is in {output / ADAPTER}")
        if (output / MODEL).is_dir():
            self._say(f"serve it: tessera serve {output / MODEL}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _encoder(found: ModelFolder, config: ModelConfig) -> ConversationEncoder:
    tokenizer = load_tokenizer(found.path)
    template = load_chat_template(found.path, None, tokenizer.special_tokens)
    if template is None:
        raise ConfigError(f"{found.name} has no chat template, so chats cannot be written as it reads them")
    return ConversationEncoder(template, tokenizer, config.eos_token_ids)


def _described(record: StepRecord) -> str:
    rate = record.num_tokens / record.seconds if record.seconds else 0.0
    held_out = "" if record.validation_loss is None else f", validation {record.validation_loss:.4f}"
    return f"loss {record.loss:.4f}{held_out}, {rate:,.0f} tokens/s"
