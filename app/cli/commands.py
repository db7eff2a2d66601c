"""The table of commands: names, help, options, and the functions that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.app.cli.cache.options import LIST_OPTIONS, PULL_OPTIONS, RM_OPTIONS, SHOW_OPTIONS
from tessera.app.cli.chat.options import CHAT_OPTIONS
from tessera.app.cli.completion.options import COMPLETION_OPTIONS
from tessera.app.cli.doctor.options import DOCTOR_OPTIONS
from tessera.app.cli.keys_options import KEYS_OPTIONS
from tessera.app.cli.serve_command import serve_command
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.app.cli.train.options import TRAIN_OPTIONS
from tessera.loadtest.bench_options import BENCH_OPTIONS
from tessera.options.command_options import CommandOptions, GivenOptions


@dataclass(frozen=True)
class Command:
    """A command of `tessera`.

    Attributes:
        name: the word after `tessera`.
        help: a phrase for the list of commands.
        description: a sentence or two for its own help.
        usage: of its command line, without `tessera NAME`.
        options: what it takes.
        run: -> exit code.
        example: a command line that works.
        setting: an option and a value, for the sentence about variables and files; None where there are none.
    """

    name: str
    help: str
    description: str
    usage: str
    options: CommandOptions
    run: Callable[[GivenOptions], int]
    example: str
    setting: tuple[str, str] | None = None


# What runs a command is imported late, so that --help and wrong options are answered at once.


def _chat(given: GivenOptions) -> int:
    from tessera.app.cli.chat.command import chat_command

    return chat_command(given)


def _pull(given: GivenOptions) -> int:
    from tessera.app.cli.cache.commands import pull_command

    return pull_command(given)


def _list(given: GivenOptions) -> int:
    from tessera.app.cli.cache.commands import list_command

    return list_command(given)


def _show(given: GivenOptions) -> int:
    from tessera.app.cli.cache.commands import show_command

    return show_command(given)


def _rm(given: GivenOptions) -> int:
    from tessera.app.cli.cache.commands import rm_command

    return rm_command(given)


def _bench(given: GivenOptions) -> int:
    from tessera.loadtest.bench import run_bench

    return run_bench(given)


def _doctor(given: GivenOptions) -> int:
    from tessera.app.cli.doctor.command import doctor_command

    return doctor_command(given)


def _keys(given: GivenOptions) -> int:
    from tessera.app.cli.keys_command import keys_command

    return keys_command(given)


def _train(given: GivenOptions) -> int:
    from tessera.app.cli.train.command import train_command

    return train_command(given)


def _completion(given: GivenOptions) -> int:
    from tessera.app.cli.completion_command import completion_command

    return completion_command(given)


_TABLE = (
    Command(
        "serve",
        "serve a model over HTTP",
        "Serve a model over HTTP, in the way of the OpenAI API.",
        "[MODEL] [options]",
        SERVE_OPTIONS,
        serve_command,
        "tessera serve Qwen/Qwen3-0.6B --port 8123",
        ("max-num-seqs", "64"),
    ),
    Command(
        "chat",
        "talk to a model in the terminal",
        "Talk to a model in the terminal: to that of a running server, or to one that is started for the chat. A "
        "question that comes through a pipe is answered without a prompt or colours. /help lists the commands of the "
        "chat.",
        "[MODEL] [options]",
        CHAT_OPTIONS,
        _chat,
        "tessera chat Qwen/Qwen3-0.6B --set temperature=0.6",
        ("base-url", "http://gpu1:8000"),
    ),
    Command(
        "pull",
        "download models into the cache",
        "Download models into the cache of the Hugging Face libraries. A download that broke off goes on from where "
        "it was.",
        "MODEL... [options]",
        PULL_OPTIONS,
        _pull,
        "tessera pull Qwen/Qwen3-0.6B unsloth/Qwen3-4B-GGUF:Q4_K_M",
    ),
    Command(
        "list",
        "list the models in the cache",
        "List the models in the cache with their sizes.",
        "[NAME] [options]",
        LIST_OPTIONS,
        _list,
        "tessera list",
    ),
    Command(
        "show",
        "describe a model: sizes, formats, memory, whether it can be served",
        "Describe a model: its sizes and formats, the memory that it needs, and whether it can be served. Of a model "
        "that is not in the cache the small files are read from the hub.",
        "[MODEL] [options]",
        SHOW_OPTIONS,
        _show,
        "tessera show Qwen/Qwen3-0.6B --context 8192",
    ),
    Command(
        "rm",
        "remove models from the cache",
        "Remove models from the cache. After a hub id :NAME removes one of its GGUF files.",
        "MODEL... [options]",
        RM_OPTIONS,
        _rm,
        "tessera rm unsloth/Qwen3-4B-GGUF:Q4_K_M",
    ),
    Command(
        "bench",
        "load a server and measure it",
        "Load an OpenAI-compatible server and report throughput and latencies. The options bear the names that "
        "`vllm bench serve` gives them.",
        "[options]",
        BENCH_OPTIONS,
        _bench,
        "tessera bench --num-prompts 200 --max-concurrency 32 --input-len 512 --output-len 128",
        ("num-prompts", "200"),
    ),
    Command(
        "train",
        "fine-tune a model on a file of chats",
        "Fine-tune a model, or a LoRA adapter for it, on a file of chats in OpenAI's format.",
        "[MODEL] --data FILE --output FOLDER [options]",
        TRAIN_OPTIONS,
        _train,
        "tessera train Qwen/Qwen3-0.6B --data chats.jsonl --output tuned --lora",
        ("batch-size", "32"),
    ),
    Command(
        "doctor",
        "check what works on this machine, and why the rest does not",
        "Check the GPU and its driver, memory, disks, limits, packages and caches. The exit status is 1 if something "
        "is broken.",
        "[options]",
        DOCTOR_OPTIONS,
        _doctor,
        "tessera doctor --port 8000",
    ),
    Command(
        "keys",
        "make, list and revoke API keys",
        "Make, list and revoke the API keys of a keys file, which `tessera serve --api-keys-file` reads.",
        "{add,list,revoke} [NAME] [options]",
        KEYS_OPTIONS,
        _keys,
        "tessera keys add alice --api-keys-file keys.yaml --tokens-per-minute 100000",
        ("api-keys-file", "keys.yaml"),
    ),
    Command(
        "completion",
        "print the completion script of a shell",
        "Print a script by which a shell completes commands, options and models.",
        "{bash,zsh,fish}",
        COMPLETION_OPTIONS,
        _completion,
        'eval "$(tessera completion bash)"',
    ),
)
COMMANDS = {command.name: command for command in _TABLE}
