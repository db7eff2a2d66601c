"""The options of `tessera bench`, named as `vllm bench serve` names them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tessera.loadtest.metrics import GOODPUT_METRICS, METRICS, PERCENTILES, MetricName
from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option
from tessera.options.errors import OptionError

Backend = Literal["openai", "vllm", "openai-chat"]
DatasetName = Literal["random", "sharegpt", "custom"]

ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
DEFAULT_TARGET = 0.95
MAX_COUNT = 2**31
MIN_RATE = 1e-6  # requests per second


def _base_url(text: str) -> str:
    """Without the /v1 that OpenAI's clients want at its end."""
    if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", text):
        raise OptionError(f"must begin with http:// or https:// and a host, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise OptionError("must be NAME=VALUE")  # the value may be a key, so it is not shown
    return name, value


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_METRICS:
        raise OptionError(f"must be one of {', '.join(GOODPUT_METRICS)}, then : and ms, not {text!r}")
    try:
        milliseconds = float(limit)
    except ValueError:
        milliseconds = math.nan
    if not milliseconds >= 0:  # true for nan
        raise OptionError(f"must have a number of ms from 0 after {name}:, not {limit!r}")
    return name, milliseconds


class ServerUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and what each of them has."""

    base_url: Annotated[
        str,
        Option("server to drive, any with an OpenAI API", group="server", metavar="URL", parse=_base_url),
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        Option("name that requests use", group="server", metavar="NAME", default="the first that the server lists"),
    ] = None
    backend: Annotated[Backend, Option("openai-chat: chat completions; openai, vllm: completions", group="server")] = (
        "openai"
    )
    endpoint: Annotated[
        str | None,
        Option("path of the endpoint", group="server", metavar="PATH", default="as the backend says"),
    ] = None
    stream: Annotated[
        bool, Option("receive tokens as they are made; without it only E2EL is measured", group="server")
    ] = True
    api_key: Annotated[
        str | None,
        Option("sent as bearer token", group="server", metavar="KEY", secret=True, default="from OPENAI_API_KEY"),
    ] = None
    header: Annotated[
        tuple[tuple[str, str], ...],
        Option("of each request; repeatable", group="server", metavar="NAME=VALUE", parse=_header, secret=True),
    ] = ()
    extra_body: Annotated[dict[str, Any], Option("further fields of each request", group="server", metavar="JSON")] = {}
    request_timeout: Annotated[
        float,
        Option("longest time for one request", group="server", metavar="SECONDS", low=0.001, high=1e6),
    ] = 6 * 3600.0


class WorkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts and lengths."""

    dataset_name: Annotated[
        DatasetName,
        Option(
            "random: tokens for completions, words for chat; sharegpt, custom: --dataset-path",
            group="work",
        ),
    ] = "random"
    dataset_path: Annotated[
        Path | None,
        Option(
            "JSON list or JSON lines with conversations (ShareGPT), messages or prompt", group="work", metavar="FILE"
        ),
    ] = None
    num_prompts: Annotated[
        int,
        Option("requests, or conversations with --num-turns", group="work", metavar="N", low=1, high=MAX_COUNT),
    ] = 100
    input_len: Annotated[
        int,
        Option(
            "of a random prompt", group="work", metavar="TOKENS", low=1, high=MAX_COUNT, aliases=("random-input-len",)
        ),
    ] = 512
    output_len: Annotated[
        int | None,
        Option(
            "of a completion",
            group="work",
            metavar="TOKENS",
            low=1,
            high=MAX_COUNT,
            aliases=("random-output-len",),
            default="128 with random prompts, else as the file says",
        ),
    ] = None
    random_range_ratio: Annotated[
        float,
        Option("spread of both lengths, up and down", group="work", metavar="SHARE", low=0, high=0.999),
    ] = 0.0
    random_prefix_len: Annotated[
        int,
        Option(
            "further tokens that prompts begin with in common",
            group="work",
            metavar="TOKENS",
            low=0,
            high=MAX_COUNT,
            aliases=("prefix-repetition-prefix-len",),
        ),
    ] = 0
    num_prefixes: Annotated[
        int,
        Option(
            "different common beginnings",
            group="work",
            metavar="N",
            low=1,
            high=MAX_COUNT,
            aliases=("prefix-repetition-num-prefixes",),
        ),
    ] = 1
    num_turns: Annotated[
        int,
        Option(
            "requests in each conversation, every one with all that was said before; chat only",
            group="work",
            metavar="N",
            low=1,
            high=MAX_COUNT,
        ),
    ] = 1
    vocab_size: Annotated[
        int, Option("random token ids are below it", group="work", metavar="N", low=17, high=MAX_COUNT)
    ] = 500
    ignore_eos: Annotated[
        bool | None,
        Option(
            "let completions have their full length, for servers that know the field",
            group="work",
            default="with random prompts",
        ),
    ] = None
    temperature: Annotated[float, Option("of sampling", group="work", metavar="T", low=0, high=100)] = 0.0
    seed: Annotated[int, Option("of prompts and arrivals", group="work", metavar="N", low=0, high=2**63)] = 0


class ArrivalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are sent."""

    max_concurrency: Annotated[
        int | None,
        Option("most requests under way", group="arrival", metavar="N", low=1, high=2**20, default="no bound"),
    ] = None
    request_rate: Annotated[
        float,
        Option(
            "requests per second; inf: each as soon as --max-concurrency lets it",
            group="arrival",
            metavar="RPS",
            low=MIN_RATE,
        ),
    ] = math.inf
    burstiness: Annotated[
        float,
        Option(
            "1: Poisson; below: in bursts; above: more even; inf: constant rate",
            group="arrival",
            metavar="SHAPE",
            low=MIN_RATE,
        ),
    ] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        Option("let the rate change from start to end", group="arrival"),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, Option("first rate of a ramp", group="arrival", metavar="RPS", low=MIN_RATE)
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, Option("last rate of a ramp", group="arrival", metavar="RPS", low=MIN_RATE)
    ] = None
    sweep: Annotated[
        float | None,
        Option(
            "find the highest request rate at which this share of the requests meets --goodput",
            group="arrival",
            metavar="SHARE",
            low=0.001,
            high=1,
            bare=DEFAULT_TARGET,
            default=f"no sweep; {DEFAULT_TARGET} with --sweep alone",
        ),
    ] = None
    num_warmups: Annotated[
        int,
        Option("requests that are sent first and not counted", group="arrival", metavar="N", low=0, high=MAX_COUNT),
    ] = 0
    processes: Annotated[
        int | None,
        Option(
            "of the client",
            group="arrival",
            metavar="N",
            low=1,
            high=1024,
            default="as many as streams and cores suggest",
        ),
    ] = None


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Figures, and where they are written."""

    goodput: Annotated[
        tuple[tuple[str, float], ...],
        Option(
            f"latencies to keep to, as ttft:500 tpot:30; of {', '.join(GOODPUT_METRICS)}",
            group="report",
            metavar="METRIC:MS",
            parse=_objective,
            repetition="words",
        ),
    ] = ()
    percentile_metrics: Annotated[
        tuple[MetricName, ...],
        Option("shown, by comma", group="report", metavar="METRICS", repetition="commas"),
    ] = METRICS
    metric_percentiles: Annotated[
        tuple[float, ...],
        Option("shown, by comma", group="report", metavar="PERCENTILES", low=0, high=100, repetition="commas"),
    ] = PERCENTILES
    output: Annotated[Path | None, Option("write the figures as JSON", group="report", metavar="FILE")] = None
    html: Annotated[
        Path | None, Option("write a report with plots, one page by itself", group="report", metavar="FILE")
    ] = None
    compare: Annotated[
        Path | None, Option("JSON of an earlier run: show the ratios to it", group="report", metavar="FILE")
    ] = None
    progress: Annotated[bool, Option("show the run live on a terminal", group="report")] = True


BENCH_OPTIONS = CommandOptions(
    "TESSERA_BENCH_",
    (ServerUnderTest, WorkOptions, ArrivalOptions, ReportOptions),
    groups=("server", "work", "arrival", "report", "configuration"),
)
