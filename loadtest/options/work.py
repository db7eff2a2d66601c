"""Options about prompts and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from tessera.options.declaration import Option

DatasetName = Literal["random", "prefix_repetition", "sharegpt", "custom", "sonnet", "burstgpt", "timed_trace"]
FILE_DATASETS: tuple[DatasetName, ...] = ("sharegpt", "custom", "sonnet", "burstgpt", "timed_trace")
WORK = "work"
MAX_COUNT = 2**31


class Lengths(NamedTuple):
    """Defaults of a dataset, in tokens; None: as the file says, or does not apply."""

    input_len: int | None
    output_len: int | None
    prefix_len: int
    num_prefixes: int


DEFAULT_LENGTHS: dict[DatasetName, Lengths] = {
    "random": Lengths(512, 128, 0, 1),
    "prefix_repetition": Lengths(256, 128, 256, 10),
    "sonnet": Lengths(550, 150, 200, 1),
    "sharegpt": Lengths(None, None, 0, 1),
    "custom": Lengths(None, None, 0, 1),
    "burstgpt": Lengths(None, None, 0, 1),
    "timed_trace": Lengths(None, None, 0, 1),
}


class WorkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts and lengths."""

    dataset_name: Annotated[
        DatasetName,
        Option(
            "random, prefix_repetition: tokens for completions, words for chat; sharegpt, custom, sonnet, burstgpt, "
            "timed_trace: from --dataset-path",
            group=WORK,
            metavar="NAME",
        ),
    ] = "random"
    dataset_path: Annotated[
        Path | None,
        Option(
            "sharegpt: its JSON; custom: JSON lines with prompt or messages; sonnet: lines of text; burstgpt: its CSV; "
            "timed_trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids, as Mooncake's",
            group=WORK,
            metavar="FILE",
            default="none",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option(
            "requests, or conversations with --num-turns; at most, with --max-seconds",
            group=WORK,
            metavar="N",
            low=1,
            high=MAX_COUNT,
            default="100; with --max-seconds as many as it takes",
        ),
    ] = None
    input_len: Annotated[
        int | None,
        Option(
            "of a prompt, beside its prefix",
            group=WORK,
            metavar="TOKENS",
            low=1,
            high=MAX_COUNT,
            aliases=("random-input-len", "sonnet-input-len", "prefix-repetition-suffix-len"),
            default="512; sonnet: 550, prefix_repetition: 256",
        ),
    ] = None
    output_len: Annotated[
        int | None,
        Option(
            "of a completion",
            group=WORK,
            metavar="TOKENS",
            low=1,
            high=MAX_COUNT,
            aliases=(
                "random-output-len",
                "sharegpt-output-len",
                "custom-output-len",
                "sonnet-output-len",
                "prefix-repetition-output-len",
            ),
            default="128; sonnet: 150; else as the file says",
        ),
    ] = None
    random_range_ratio: Annotated[
        float,
        Option("spread of both lengths, up and down", group=WORK, metavar="SHARE", low=0, high=0.999),
    ] = 0.0
    random_prefix_len: Annotated[
        int | None,
        Option(
            "further tokens that prompts begin with in common",
            group=WORK,
            metavar="TOKENS",
            low=0,
            high=MAX_COUNT,
            aliases=("prefix-repetition-prefix-len", "sonnet-prefix-len"),
            default="0; prefix_repetition: 256, sonnet: 200",
        ),
    ] = None
    num_prefixes: Annotated[
        int | None,
        Option(
            "different common beginnings",
            group=WORK,
            metavar="N",
            low=1,
            high=MAX_COUNT,
            aliases=("prefix-repetition-num-prefixes",),
            default="1; prefix_repetition: 10",
        ),
    ] = None
    random_batch_size: Annotated[
        int, Option("texts in each request for embeddings", group=WORK, metavar="N", low=1, high=2**16)
    ] = 1
    num_turns: Annotated[
        int,
        Option(
            "requests in each conversation, every one with all that was said before; chat only",
            group=WORK,
            metavar="N",
            low=1,
            high=MAX_COUNT,
        ),
    ] = 1
    vocab_size: Annotated[
        int | None,
        Option(
            "random token ids are below it",
            group=WORK,
            metavar="N",
            low=17,
            high=MAX_COUNT,
            default="500, or that of --tokenizer",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "folder, tokenizer.json or hub id, by which texts of files are counted",
            group=WORK,
            metavar="TOKENIZER",
            default="four characters a token",
        ),
    ] = None
    disable_shuffle: Annotated[bool, Option("take a file's prompts in their order", group=WORK)] = False
    no_oversample: Annotated[
        bool, Option("send no prompt of a file twice, and so fewer than --num-prompts", group=WORK)
    ] = False
    self_timed: Annotated[
        bool | None,
        Option("send requests at the times in the file", group=WORK, default="with timed_trace"),
    ] = None
    trace_speed: Annotated[
        float,
        Option("play the times of a file so many times as fast", group=WORK, metavar="FACTOR", low=1e-6, high=1e6),
    ] = 1.0
    trace_block_size: Annotated[
        int, Option("tokens for each of a trace's hash_ids", group=WORK, metavar="TOKENS", low=1, high=2**20)
    ] = 512
    fresh_prompts: Annotated[
        bool,
        Option(
            "other prompts for each run and each level of a sweep, so that no prefix cache helps; without it all have "
            "the same",
            group=WORK,
        ),
    ] = True
    seed: Annotated[
        int | None,
        Option(
            "of prompts and arrivals: runs with the same one send the same",
            group=WORK,
            metavar="N",
            low=0,
            high=2**63 - 1,
            default="another for each run",
        ),
    ] = None
