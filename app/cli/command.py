"""The command `tessera`: options to settings, and one clear sentence for what is wrong with them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec

from tessera.app.cli.keys import VARIABLE as API_KEY_VARIABLE
from tessera.app.cli.keys import gather_api_keys
from tessera.app.cli.option_types import metric_name, origin
from tessera.app.server.descriptors import MOST_CONNECTIONS
from tessera.app.settings import ReasoningParserName, ToolParserName
from tessera.engine.contract.config import (
    BLOCK_SIZES,
    DEVICE_DEFAULTS,
    DeviceName,
    DTypeName,
    EngineConfig,
    LoadFormat,
    PoolingName,
)
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.logs import LogFormat, LogLevel
from tessera.loadtest.options import add_options as add_bench_options
from tessera.loadtest.ranges import integer, number

EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the process's exit code: 0 after an orderly end, 1 after a fault, 2 for what the user can mend."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        print(f"tessera: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the wall of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_USE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 110))


class ShowVersion(argparse.Action):
    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tessera import __version__

        print(f"tessera {__version__}")
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(prog="tessera", description="A small, fast OpenAI-compatible server for language models.")
    parser.add_argument("--version", action=ShowVersion, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, in the way of the OpenAI API.",
        usage="tessera serve [MODEL] [options]",
        epilog="Example: tessera serve Qwen/Qwen3-0.6B --port 8123",
    )
    serve.set_defaults(run=serve_command)
    _add_model_options(serve)
    _add_embedding_options(serve)
    _add_device_options(serve)
    _add_scheduling_options(serve)
    _add_http_options(serve)
    _add_log_options(serve)
    bench = commands.add_parser(
        "bench",
        help="load a server and measure it",
        description="Load an OpenAI-compatible server and report throughput and latencies. The options bear the "
        "names that `vllm bench serve` gives them.",
        usage="tessera bench [options]",
        epilog="Example: tessera bench --num-prompts 200 --max-concurrency 32 --input-len 512 --output-len 128",
    )
    bench.set_defaults(run=bench_command)
    add_bench_options(bench)
    return parser


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("model")
    group.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder with config.json, tokenizer.json and *.safetensors, or a hub id ORGANISATION/NAME[@REVISION], "
        "which is downloaded once (default: the small demonstration model that comes with Tessera)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="name that requests use; may be given several times (default: the hub id or the folder's name)",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that replaces the model's own chat template",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolParserName),
        default="auto",
        help="how the model writes tool calls; auto: as its chat template shows (default: %(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParserName),
        default="auto",
        help="think: tell <think>...</think> from the answer; auto: if the chat template knows these tags "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        metavar="TOKENS",
        type=integer(1, 2**31 - 1),
        help="longest prompt plus answer (default: the model's own)",
    )
    group.add_argument(
        "--seed",
        metavar="SEED",
        type=integer(0, 2**63 - 1),
        help="seed of requests that bring none: the same request then always has the same answer (default: another "
        "for each answer)",
    )
    group.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default="auto",
        help="auto: read the weights; dummy: make random ones from config.json, for benchmarks (default: %(default)s)",
    )


def _add_embedding_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("embeddings")
    group.add_argument(
        "--embedding-model",
        metavar="MODEL",
        help="folder or hub id of a text encoder (BertModel) that makes embeddings beside the model, under its own "
        "name (default: none; an encoder given as MODEL is served alone)",
    )
    group.add_argument(
        "--pooling",
        choices=get_args(PoolingName),
        default="auto",
        help="how token vectors become an embedding; auto: as the model's folder says, else mean for an encoder and "
        "last for a decoder (default: %(default)s)",
    )


def _add_device_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("device and memory")
    group.add_argument(
        "--device",
        choices=get_args(DeviceName),
        default="auto",
        help="auto: CUDA where a usable device is found, else the CPU (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=get_args(DTypeName),
        default="auto",
        help="of weights and KV cache; auto: the checkpoint's on CUDA (bfloat16 for float32), float32 on the CPU "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=number(0.05, 0.98),
        default=0.9,
        help="share of the GPU's memory for weights, buffers and KV cache (default: %(default)s)",
    )
    group.add_argument(
        "--cpu-kv-cache-gib",
        metavar="GIB",
        type=number(0.001, 4096),
        default=1.0,
        help="size of the KV cache on the CPU, in GiB (default: %(default)s)",
    )
    group.add_argument(
        "--num-kv-blocks",
        metavar="BLOCKS",
        type=integer(1, 2**31 - 1),
        help="size of the KV cache in blocks, whatever the device (default: what memory allows)",
    )
    group.add_argument(
        "--block-size",
        metavar="TOKENS",
        type=integer(min(BLOCK_SIZES), max(BLOCK_SIZES)),
        default=16,
        help=f"tokens in a KV block: {', '.join(map(str, BLOCK_SIZES))} (default: %(default)s)",
    )


def _add_scheduling_options(serve: argparse.ArgumentParser) -> None:
    (cuda_seqs, cuda_tokens), (cpu_seqs, cpu_tokens) = DEVICE_DEFAULTS["cuda"], DEVICE_DEFAULTS["cpu"]
    group = serve.add_argument_group("scheduling")
    group.add_argument(
        "--max-num-seqs",
        metavar="SEQS",
        type=integer(1, 2**16),
        default=0,
        help=f"most sequences in one step (default: {cuda_seqs} on CUDA, {cpu_seqs} on the CPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        metavar="TOKENS",
        type=integer(1, 2**20),
        default=0,
        help=f"most tokens in one step (default: {cuda_tokens} on CUDA, {cpu_tokens} on the CPU)",
    )
    group.add_argument(
        "--max-queue-len",
        metavar="REQUESTS",
        type=integer(1, 2**20),
        default=1024,
        help="most requests waiting; further ones get status 429 (default: %(default)s)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="launch decode steps kernel by kernel instead of replaying recorded graphs (slower; for debugging)",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute equal beginnings of prompts anew each time",
    )
    group.add_argument(
        "--step-timeout",
        metavar="SECONDS",
        type=number(1, 86400),
        help="a longer step counts as hung and the engine is restarted (default: 60 on CUDA, 600 on the CPU)",
    )


def _add_http_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("HTTP")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        help="key that requests must bear; may be given several times, and other users of this machine may see it "
        f"here, so better use --api-key-file or set {API_KEY_VARIABLE} (default: none, open to all)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with further keys, one a line; empty lines and lines that begin with # are skipped",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        type=origin,
        help="origin whose pages may call the server from a browser, as https://example.org, or * for all; may be "
        "given several times (default: none)",
    )
    group.add_argument(
        "--api-workers",
        metavar="N",
        type=integer(1, 64),
        default=1,
        help="processes that speak HTTP (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections",
        metavar="N",
        type=integer(1, 2**20),
        help="most HTTP connections of one app process (default: what the limit of descriptors leaves room for, at "
        f"most {MOST_CONNECTIONS})",
    )
    group.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=number(1, 604800),
        default=3600.0,
        help="longest time for one answer (default: %(default)g)",
    )
    group.add_argument(
        "--drain-timeout",
        metavar="SECONDS",
        type=integer(0, 86400),
        default=30,
        help="how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends at once "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--metrics-prefix",
        metavar="NAME",
        type=metric_name,
        default="tessera",
        help="prefix of the names on /metrics; vllm suits existing dashboards (default: %(default)s)",
    )
    group.add_argument(
        "--no-ui",
        action="store_true",
        help="have no status page at /",
    )


def _add_log_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("log")
    group.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="leave out what matters less; info has one line for each request (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="text for people, json for one object a line (default: %(default)s)",
    )
    group.add_argument(
        "--log-prompts",
        action="store_true",
        help="write each request's prompt into its line; without it nothing that was said is logged",
    )


def serve_command(options: argparse.Namespace) -> int:
    # Imported only here, so that --help and wrong options are answered at once.
    from tessera.app.cli.hub import builtin_model, find_model
    from tessera.app.server.serve import ServerOptions, run_server
    from tessera.app.settings import AppSettings

    config = _engine_config(options)
    config.verify()  # before the model is looked for: a download is long to wait for
    chat_template = _existing_file("--chat-template", options.chat_template)
    api_keys = gather_api_keys(options.api_key, options.api_key_file)
    model = find_model(options.model) if options.model else builtin_model()
    names = tuple(options.served_model_name or [model.name])
    embedding = find_model(options.embedding_model) if options.embedding_model else None
    if embedding is not None and embedding.name in names:
        raise ConfigError(f"--embedding-model and the model are both called {embedding.name}: see --served-model-name")
    return run_server(
        ServerOptions(
            engine=msgspec.structs.replace(
                config,
                model=str(model.path),
                served_name=names[0],
                embedding_model=str(embedding.path) if embedding is not None else "",
            ),
            app=AppSettings(
                model_folder=str(model.path),
                served_model_names=names,
                api_keys=api_keys,
                chat_template=chat_template,
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                embedding_folder=str(embedding.path) if embedding is not None else None,
                embedding_model_names=(embedding.name,) if embedding is not None else (),
                seed=options.seed,
                metrics_prefix=options.metrics_prefix,
                request_timeout=options.request_timeout,
                cors_origins=tuple(options.cors_origin or ()),
                ui=not options.no_ui,
                log_format=options.log_format,
                log_level=options.log_level,
                log_prompts=options.log_prompts,
            ),
            host=options.host,
            port=options.port,
            api_workers=options.api_workers,
            max_connections=options.max_connections,
            drain_timeout=options.drain_timeout,
            step_timeout=options.step_timeout,
        )
    )


def bench_command(options: argparse.Namespace) -> int:
    from tessera.loadtest.command import bench_command as run_bench  # imported late, as above

    return run_bench(options)


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=options.model or "",
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_queue_len=options.max_queue_len,
        block_size=options.block_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        cpu_kv_cache_gib=options.cpu_kv_cache_gib,
        num_kv_blocks=options.num_kv_blocks,
        load_format=options.load_format,
        seed=options.seed,
        prefix_caching=not options.no_prefix_caching,
        cuda_graphs=not options.enforce_eager,
        pooling=options.pooling,
        log_format=options.log_format,
        log_level=options.log_level,
    )


def _existing_file(option: str, path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(f"{option}: there is no file {path}")
    return str(Path(path).resolve())


if __name__ == "__main__":
    sys.exit(main())
