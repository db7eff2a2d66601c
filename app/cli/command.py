"""The command `tessera`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from tessera.app.cli.keys_options import KEYS_OPTIONS
from tessera.app.cli.serve_command import serve_command
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.engine.contract.errors import ConfigError
from tessera.loadtest.bench_options import BENCH_OPTIONS
from tessera.options.command_options import CommandOptions, GivenOptions
from tessera.options.parser import EXIT_WRONG_USE, Parser
from tessera.options.suggestions import did_you_mean

EXIT_INTERRUPTED = 130
EPILOG = """Each option is also an environment variable (--{option}: {variable}) and a key of the --config FILE (the \
line {option}: {value}). The command line overrides the environment, the environment the file.

Example: {example}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the process's exit code: 0 after an orderly end, 1 after a fault, 2 for what the user can mend."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = build_parser()
    if not words:
        parser.print_help()
        return 0
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in commands:
        parser.error(f"invalid choice: {name!r} (choose from {', '.join(commands)}){did_you_mean(name, commands)}")
    namespace, unknown = parser.parse_known_args(words)
    command = namespace.command
    given = _OPTIONS[command].read_or_exit(commands[command], namespace, unknown, os.environ)
    try:
        return _RUN[command](given)
    except ConfigError as error:
        print(f"tessera: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class ShowVersion(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tessera import __version__

        print(f"tessera {__version__}")
        parser.exit()


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """-> the parser of `tessera`, and that of each command."""
    parser = Parser(
        prog="tessera",
        description="A small, fast OpenAI-compatible server for language models.",
        epilog="`tessera COMMAND --help` explains a command's options.",
    )
    parser.add_argument("--version", action=ShowVersion, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, in the way of the OpenAI API.",
        usage="tessera serve [MODEL] [options]",
        epilog=EPILOG.format(
            option="max-num-seqs",
            variable="TESSERA_MAX_NUM_SEQS",
            value=64,
            example="tessera serve Qwen/Qwen3-0.6B --port 8123",
        ),
    )
    bench = commands.add_parser(
        "bench",
        help="load a server and measure it",
        description="Load an OpenAI-compatible server and report throughput and latencies. The options bear the "
        "names that `vllm bench serve` gives them.",
        usage="tessera bench [options]",
        epilog=EPILOG.format(
            option="num-prompts",
            variable="TESSERA_BENCH_NUM_PROMPTS",
            value=200,
            example="tessera bench --num-prompts 200 --max-concurrency 32 --input-len 512 --output-len 128",
        ),
    )
    keys = commands.add_parser(
        "keys",
        help="make, list and revoke API keys",
        description="Make, list and revoke the API keys of a keys file, which `tessera serve --api-keys-file` reads.",
        usage="tessera keys {add,list,revoke} [NAME] [options]",
        epilog=EPILOG.format(
            option="api-keys-file",
            variable="TESSERA_KEYS_API_KEYS_FILE",
            value="keys.yaml",
            example="tessera keys add alice --api-keys-file keys.yaml --tokens-per-minute 100000",
        ),
    )
    parsers = {"serve": serve, "bench": bench, "keys": keys}
    for name, options in _OPTIONS.items():
        options.add_to(parsers[name])
    return parser, parsers


def bench_command(given: GivenOptions) -> int:
    from tessera.loadtest.bench import run_bench  # imported late, so that --help is answered at once

    return run_bench(given)


def keys_command(given: GivenOptions) -> int:
    from tessera.app.cli.keys_command import keys_command as run  # imported late, so that --help is answered at once

    return run(given)


_OPTIONS: dict[str, CommandOptions] = {"serve": SERVE_OPTIONS, "bench": BENCH_OPTIONS, "keys": KEYS_OPTIONS}
_RUN: dict[str, Callable[[GivenOptions], int]] = {
    "serve": serve_command,
    "bench": bench_command,
    "keys": keys_command,
}


if __name__ == "__main__":
    sys.exit(main())
