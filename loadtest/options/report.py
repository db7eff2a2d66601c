"""Options about figures, and where they are written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from tessera.loadtest.metrics import GOODPUT_METRICS, METRICS, PERCENTILES, MetricName
from tessera.options.declaration import Option
from tessera.options.errors import OptionError

REPORT, UNUSED = "report", "accepted without effect"


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


def _metadata(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise OptionError(f"must be KEY=VALUE, not {text!r}")
    return name.strip(), value.strip()


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Figures, and where they are written."""

    goodput: Annotated[
        tuple[tuple[str, float], ...],
        Option(
            f"latencies to keep to, as ttft:500 tpot:30; of {', '.join(GOODPUT_METRICS)}",
            group=REPORT,
            metavar="METRIC:MS",
            parse=_objective,
            repetition="words",
        ),
    ] = ()
    percentile_metrics: Annotated[
        tuple[MetricName, ...],
        Option("shown, by comma", group=REPORT, metavar="METRICS", repetition="commas"),
    ] = METRICS
    metric_percentiles: Annotated[
        tuple[float, ...],
        Option("shown, by comma", group=REPORT, metavar="PERCENTILES", low=0, high=100, repetition="commas"),
    ] = PERCENTILES
    output: Annotated[
        Path | None, Option("write the figures as JSON", group=REPORT, metavar="FILE", default="none")
    ] = None
    html: Annotated[
        Path | None,
        Option("write a report with plots, one page by itself", group=REPORT, metavar="FILE", default="none"),
    ] = None
    save_result: Annotated[
        bool, Option("write the figures as JSON, named by --result-filename in --result-dir", group=REPORT)
    ] = False
    save_detailed: Annotated[bool, Option("with the lengths, times and error of each request", group=REPORT)] = False
    append_result: Annotated[
        bool, Option("as --save-result, with the figures as a line at the end of the file", group=REPORT)
    ] = False
    result_dir: Annotated[
        Path | None, Option("made where it is missing", group=REPORT, metavar="FOLDER", default="the current folder")
    ] = None
    result_filename: Annotated[
        str | None,
        Option("of --save-result", group=REPORT, metavar="NAME", default="LABEL-RATEqps-MODEL-DATE.json"),
    ] = None
    label: Annotated[
        str | None, Option("first part of the file's name", group=REPORT, metavar="TEXT", default="the backend")
    ] = None
    metadata: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "further fields of the JSON, such as gpu=H100 commit=abc",
            group=REPORT,
            metavar="KEY=VALUE",
            parse=_metadata,
            repetition="words",
        ),
    ] = ()
    compare: Annotated[
        Path | None,
        Option("JSON of an earlier run: show the ratios to it", group=REPORT, metavar="FILE", default="none"),
    ] = None
    progress: Annotated[bool, Option("show the run live on a terminal", group=REPORT)] = True
    disable_tqdm: Annotated[bool, Option("the same as --no-progress", group=REPORT)] = False


class UnusedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted for command lines of `vllm bench serve`; they have no effect."""

    tokenizer_mode: Annotated[str, Option("no effect: tokenizer.json is read", group=UNUSED, metavar="MODE")] = "auto"
    trust_remote_code: Annotated[bool, Option("no effect: no code of models is run", group=UNUSED)] = False
    skip_tokenizer_init: Annotated[bool, Option("no effect: without --tokenizer there is none", group=UNUSED)] = False
    skip_chat_template: Annotated[bool, Option("no effect: the server applies it", group=UNUSED)] = False
