"""The workload that the options ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tessera.loadtest.options.arrival import ArrivalOptions
from tessera.loadtest.options.work import DEFAULT_LENGTHS, FILE_DATASETS, WorkOptions
from tessera.loadtest.workload.dialogue_file import FileWorkload, read_dialogues
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.sonnet import SonnetWorkload, read_lines
from tessera.loadtest.workload.token_count import TokenCounter
from tessera.loadtest.workload.trace import TraceRow, TraceWorkload, read_burstgpt, read_trace
from tessera.loadtest.workload.workload import Workload
from tessera.options.errors import OptionError

DEFAULT_NUM_PROMPTS = 100
DEFAULT_VOCAB_SIZE = 500
MOST_PER_SECOND = 200  # requests, for a run that only --max-seconds ends


@dataclass(frozen=True)
class ChosenWork:
    """The workload, and whether its requests have random tokens and so no end of their own."""

    workload: Workload
    random_tokens: bool


def choose_workload(work: WorkOptions, arrival: ArrivalOptions, endpoint: str, seed: int) -> ChosenWork:
    """Raises: OptionError: options contradict each other, or a file cannot be used."""
    name = work.dataset_name
    if name in FILE_DATASETS and work.dataset_path is None:
        raise OptionError(f"--dataset-name {name} needs --dataset-path")
    if name not in FILE_DATASETS and work.dataset_path is not None:
        raise OptionError(f"--dataset-path needs --dataset-name, one of {', '.join(FILE_DATASETS)}")
    if work.num_turns > 1 and not endpoint.endswith("chat/completions"):
        raise OptionError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
    if work.self_timed is not None and name not in ("timed_trace", "burstgpt"):
        raise OptionError("--self-timed needs --dataset-name timed_trace or burstgpt, whose files have times")
    counter = TokenCounter(work.tokenizer)
    vocab_size = work.vocab_size or counter.vocab_size or DEFAULT_VOCAB_SIZE
    number = work.num_prompts or default_num_prompts(arrival)
    defaults = DEFAULT_LENGTHS[name]
    output_len = work.output_len or defaults.output_len
    prefix_len = defaults.prefix_len if work.random_prefix_len is None else work.random_prefix_len
    path = work.dataset_path or Path()
    if name in ("timed_trace", "burstgpt"):
        rows = read_trace(path) if name == "timed_trace" else read_burstgpt(path)
        trace = _trace(work, rows, work.num_prompts, arrival, vocab_size, seed)
        return ChosenWork(trace, random_tokens=True)
    if name == "sonnet":
        lines = read_lines(path, counter)
        input_len = work.input_len or defaults.input_len or 0
        if prefix_len >= input_len:
            raise OptionError(f"--sonnet-prefix-len {prefix_len} must be below --sonnet-input-len {input_len}")
        return ChosenWork(
            SonnetWorkload(lines, number, input_len, output_len or 0, prefix_len, seed), random_tokens=False
        )
    if name in FILE_DATASETS:
        dialogues = read_dialogues(path, counter)
        once, shuffled = work.no_oversample, not work.disable_shuffle
        number = min(number, len(dialogues)) if once else number
        file = FileWorkload(dialogues, number, output_len, work.num_turns, seed, shuffled, once)
        return ChosenWork(file, random_tokens=False)
    return ChosenWork(
        RandomWorkload(
            number,
            work.input_len or defaults.input_len or 0,
            output_len or 0,
            vocab_size,
            seed,
            work.random_range_ratio,
            prefix_len,
            work.num_prefixes or defaults.num_prefixes,
            work.num_turns,
            work.random_batch_size,
        ),
        random_tokens=True,
    )


def default_num_prompts(arrival: ArrivalOptions) -> int:
    """100, or with --max-seconds more than are sent by then."""
    if arrival.max_seconds is None:
        return DEFAULT_NUM_PROMPTS
    rate = max(arrival.request_rate, 0) if math.isfinite(arrival.request_rate) else arrival.ramp_up_end_rps
    return max(DEFAULT_NUM_PROMPTS, math.ceil(arrival.max_seconds * (rate or MOST_PER_SECOND)))


def _trace(
    work: WorkOptions,
    rows: tuple[TraceRow, ...],
    number: int | None,
    arrival: ArrivalOptions,
    vocab_size: int,
    seed: int,
) -> TraceWorkload:
    timed = work.self_timed if work.self_timed is not None else work.dataset_name == "timed_trace"
    if timed and (math.isfinite(arrival.request_rate) or arrival.ramp_up_strategy or arrival.sweep is not None):
        raise OptionError("the file has the times of requests: leave out --request-rate, or add --no-self-timed")
    drawn = work.dataset_name == "burstgpt" and not timed
    count = number or (default_num_prompts(arrival) if drawn else len(rows))
    return TraceWorkload(
        rows,
        count if drawn else min(count, len(rows)),
        vocab_size,
        seed,
        work.output_len,
        timed,
        work.trace_speed,
        drawn,
        work.trace_block_size,
    )
