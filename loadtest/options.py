"""The options of `tessera bench`, named as `vllm bench serve` names them."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from tessera.loadtest.ranges import integer, number

METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DEFAULT_TARGET = 0.95


def add_options(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser.add_argument_group("server"))
    _add_work_options(parser.add_argument_group("work"))
    _add_arrival_options(parser.add_argument_group("arrival"))
    _add_report_options(parser.add_argument_group("report"))


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        metavar="URL",
        type=_base_url,
        default="http://127.0.0.1:8000",
        help="server to drive, any with an OpenAI API (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="openai",
        help="openai-chat: chat completions; openai, vllm: completions (default: %(default)s)",
    )
    group.add_argument("--endpoint", metavar="PATH", help="default: as the backend says")
    group.add_argument("--no-stream", action="store_true", help="wait for whole answers; only E2EL is measured then")
    group.add_argument("--api-key", metavar="KEY", help="sent as bearer token (default: from OPENAI_API_KEY)")
    group.add_argument(
        "--header", metavar="NAME=VALUE", action="append", type=_pair, default=[], help="of each request; repeatable"
    )
    group.add_argument(
        "--extra-body", metavar="JSON", type=_json_object, default={}, help="further fields of each request"
    )
    group.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=number(0.001, 1e6),
        default=6 * 3600.0,
        help="longest time for one answer (default: %(default)g)",
    )


def _add_work_options(group: argparse._ArgumentGroup) -> None:
    positive = integer(1, 2**31)
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "custom"),
        default="random",
        help="random: tokens for completions, words for chat; sharegpt, custom: --dataset-path (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        type=Path,
        help="JSON list or JSON lines with conversations (ShareGPT), messages or prompt",
    )
    group.add_argument("--num-prompts", metavar="N", type=positive, default=100, help="requests (default: %(default)s)")
    group.add_argument(
        "--input-len",
        "--random-input-len",
        metavar="TOKENS",
        type=positive,
        default=512,
        help="of a random prompt (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        metavar="TOKENS",
        type=positive,
        help="of an answer (default: 128 with random prompts, else as the file says)",
    )
    group.add_argument(
        "--random-range-ratio",
        metavar="SHARE",
        type=number(0, 0.999),
        default=0.0,
        help="spread of both lengths, up and down (default: %(default)s)",
    )
    group.add_argument(
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        metavar="TOKENS",
        type=integer(0, 2**31),
        default=0,
        help="further tokens that prompts begin with in common (default: %(default)s)",
    )
    group.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        metavar="N",
        type=positive,
        default=1,
        help="different common beginnings (default: %(default)s)",
    )
    group.add_argument(
        "--num-turns",
        metavar="N",
        type=positive,
        default=1,
        help="requests in each conversation, every one with all that was said before; chat only (default: %(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        metavar="N",
        type=integer(17, 2**31),
        default=500,
        help="random token ids are below it (default: %(default)s)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="let answers have their full length, for servers that know the field (default: with random prompts)",
    )
    group.add_argument(
        "--temperature", metavar="T", type=number(0, 100), default=0.0, help="of sampling (default: %(default)g)"
    )
    group.add_argument("--seed", metavar="N", type=integer(0, 2**63), default=0, help="of prompts and arrivals")


def _add_arrival_options(group: argparse._ArgumentGroup) -> None:
    rate = number(1e-6, math.inf)
    group.add_argument(
        "--max-concurrency", metavar="N", type=integer(1, 2**20), help="most requests under way (default: no bound)"
    )
    group.add_argument(
        "--request-rate",
        metavar="RPS",
        type=rate,
        default=math.inf,
        help="requests per second; inf: each as soon as --max-concurrency lets it (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        metavar="SHAPE",
        type=rate,
        default=1.0,
        help="1: Poisson; below: in bursts; above: more even; inf: constant rate (default: %(default)g)",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate change from start to end"
    )
    group.add_argument("--ramp-up-start-rps", metavar="RPS", type=rate, help="first rate of a ramp")
    group.add_argument("--ramp-up-end-rps", metavar="RPS", type=rate, help="last rate of a ramp")
    group.add_argument(
        "--sweep",
        metavar="SHARE",
        nargs="?",
        type=number(0.001, 1),
        const=DEFAULT_TARGET,
        help="find the highest request rate at which this share of the requests meets --goodput "
        "(default with --sweep alone: %(const)s)",
    )
    group.add_argument(
        "--num-warmups",
        metavar="N",
        type=integer(0, 2**31),
        default=0,
        help="requests that are sent first and not counted (default: %(default)s)",
    )
    group.add_argument(
        "--processes",
        metavar="N",
        type=integer(1, 1024),
        help="of the client (default: as many as streams and cores suggest)",
    )


def _add_report_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        metavar="METRIC:MS",
        nargs="+",
        type=_objective,
        default=[],
        help=f"latencies to keep to, as ttft:500 tpot:30; of {', '.join(GOODPUT_NAMES)}",
    )
    group.add_argument(
        "--percentile-metrics",
        metavar="METRICS",
        type=_metrics,
        default=METRIC_NAMES,
        help=f"shown, by comma (default: {','.join(METRIC_NAMES)})",
    )
    group.add_argument(
        "--metric-percentiles",
        metavar="PERCENTILES",
        type=_percentiles,
        default=(90.0, 99.0),
        help="shown, by comma (default: 90,99)",
    )
    group.add_argument("--output", metavar="FILE", type=Path, help="write the figures as JSON")
    group.add_argument("--html", metavar="FILE", type=Path, help="write a report with plots, one page by itself")
    group.add_argument("--compare", metavar="FILE", type=Path, help="JSON of an earlier run: show the ratios to it")
    group.add_argument("--no-progress", action="store_true", help="no live display")


def _base_url(text: str) -> str:
    """Without the /v1 that OpenAI's clients want at its end."""
    if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", text):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https:// and a host, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_NAMES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(GOODPUT_NAMES)}, then : and ms, not {text!r}")
    return name, number(0, math.inf)(limit)


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(METRIC_NAMES):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(METRIC_NAMES)}, not {text!r}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(number(0, 100)(part) for part in text.split(","))
