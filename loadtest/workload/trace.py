"""Requests as a service once had them: their times, lengths and common beginnings, with random tokens as texts."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.random_tokens import job_of_tokens, random_tokens
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.options.errors import OptionError

BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
BURSTGPT_MODEL = "GPT-4"  # as `vllm bench serve` has it


@dataclass(frozen=True)
class TraceRow:
    """A request.

    Attributes:
        seconds: after the first one.
        hash_ids: of its prompt's blocks; equal ids are equal blocks.
    """

    seconds: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceWorkload:
    """The first `num_prompts` rows, or so many drawn from them, with random tokens.

    Attributes:
        output_len: tokens to generate; None: as the row says.
        timed: requests are due at the rows' times, `speed` times as fast.
        drawn: rows are drawn at random instead of in their order, again and again where there are too few.
        first: number of the first prompt; another one gives other tokens.
        block_size: tokens that one of the `hash_ids` stands for.
    """

    rows: tuple[TraceRow, ...]
    num_prompts: int
    vocab_size: int
    seed: int = 0
    output_len: int | None = None
    timed: bool = False
    speed: float = 1.0
    drawn: bool = False
    block_size: int = 512
    first: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_prompts

    def jobs(self, template: RequestTemplate) -> Iterator[Job]:
        for index, row in enumerate(self._chosen()):
            tokens = self._prompt(row, index, template)
            yield job_of_tokens(template, tokens, self.output_len or row.output_len)

    def part(self, first: int, num_prompts: int) -> TraceWorkload:
        return replace(self, first=first, num_prompts=min(num_prompts, self._most))

    def due_times(self) -> Sequence[float] | None:
        return [row.seconds / self.speed for row in self._chosen()] if self.timed else None

    @property
    def _most(self) -> int:
        return 2**31 if self.drawn else len(self.rows)

    def _chosen(self) -> list[TraceRow]:
        if not self.drawn:
            return list(self.rows[: self.num_prompts])
        rng = random.Random(f"{self.seed}-{self.first}")
        return rng.choices(self.rows, k=self.num_prompts)

    def _prompt(self, row: TraceRow, index: int, template: RequestTemplate) -> list[int]:
        tokens: list[int] = []
        for hash_id in row.hash_ids[: -(-row.input_len // self.block_size)]:
            rng = np.random.default_rng([self.seed, self.first, 0, hash_id])
            tokens += random_tokens(rng, self.block_size, template, self.vocab_size)
        rest = row.input_len - len(tokens)
        if rest > 0:
            rng = np.random.default_rng([self.seed, self.first, 1, index])
            tokens += random_tokens(rng, rest, template, self.vocab_size)
        return tokens[: row.input_len]


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """JSON lines with timestamp (milliseconds), input_length, output_length and hash_ids (may be absent).

    The form is that of Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    Raises: OptionError naming the line that is not so.
    """
    rows = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            try:
                rows.append(_row(orjson.loads(line)))
            except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise OptionError(
                    f"--dataset-path: {path} line {number} must be an object with timestamp, input_length and "
                    f"output_length: {type(error).__name__} {error}"
                ) from None
    return _ordered(rows, path)


def _row(value: Any) -> TraceRow:
    hash_ids = tuple(int(each) for each in value.get("hash_ids") or ())
    if any(each < 0 for each in hash_ids):
        raise ValueError("hash_ids must not be negative")
    row = TraceRow(value["timestamp"] / 1000, int(value["input_length"]), int(value["output_length"]), hash_ids)
    if row.input_len < 1 or row.output_len < 1:
        raise ValueError("lengths must be at least 1")
    return row


def read_burstgpt(path: Path) -> tuple[TraceRow, ...]:
    """BurstGPT's CSV (https://github.com/HPMLL/BurstGPT): rows of GPT-4 with a response.

    Raises: OptionError: a column is missing, or no row is left.
    """
    rows = []
    reader = csv.DictReader(_read(path).splitlines())
    missing = [column for column in BURSTGPT_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise OptionError(f"--dataset-path: {path} is not BurstGPT's CSV: it has no column {', '.join(missing)}")
    for record in reader:
        try:
            seconds, input_len, output_len = (float(record[name]) for name in BURSTGPT_COLUMNS if name != "Model")
        except (TypeError, ValueError):
            raise OptionError(f"--dataset-path: {path} line {reader.line_num} has no numbers") from None
        if record["Model"] == BURSTGPT_MODEL and input_len >= 1 and output_len >= 1:
            rows.append(TraceRow(seconds, int(input_len), int(output_len)))
    return _ordered(rows, path)


def _ordered(rows: list[TraceRow], path: Path) -> tuple[TraceRow, ...]:
    if not rows:
        raise OptionError(f"--dataset-path: {path} has no request")
    first = min(row.seconds for row in rows)
    return tuple(replace(row, seconds=row.seconds - first) for row in sorted(rows, key=lambda row: row.seconds))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--dataset-path: {error.strerror}: {path}") from error
    except UnicodeDecodeError:
        raise OptionError(f"--dataset-path: {path} is not UTF-8 text") from None
