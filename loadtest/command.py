"""`tessera bench`: from options to a load, its figures and its reports."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from typing import Any

import httpx
import orjson
from rich.console import Console

from tessera.loadtest.errors import UsageError
from tessera.loadtest.options import BACKENDS
from tessera.loadtest.report.comparison import comparison_table, read_summary
from tessera.loadtest.report.page import write_page
from tessera.loadtest.report.table import summary_table, sweep_table
from tessera.loadtest.run.progress import LiveProgress
from tessera.loadtest.run.run import ClientProcessError, Outcome, drive
from tessera.loadtest.run.summary import BUSY_CLIENT, summarize
from tessera.loadtest.run.sweep import Level, best, search
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.base import Workload
from tessera.loadtest.workload.file import FileWorkload, read_dialogues
from tessera.loadtest.workload.form import Form
from tessera.loadtest.workload.random_prompts import RandomWorkload

EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
DEFAULT_RANDOM_OUTPUT_LEN = 128


def bench_command(options: argparse.Namespace) -> int:
    """-> exit code: 0 when every request went well, 1 when some did not, 2 for wrong options, 130 after Ctrl-C."""
    try:
        earlier = read_summary(options.compare) if options.compare else None
        bench = Bench(options)
        bench.find_model()
        bench.warm_up()
        summary = bench.measure()
        bench.report(summary, earlier)
    except UsageError as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except (httpx.HTTPError, ClientProcessError) as error:
        print(f"tessera bench: {options.base_url}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:  # while there is nothing to report yet
        return EXIT_INTERRUPTED
    if summary["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if summary["failed"] or not summary["completed"] else 0


class Bench:
    """One call of the command.

    Raises:
        UsageError: options contradict each other, or a file of theirs cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._goodput = dict(options.goodput)
        self._workload = _workload(options)
        self._arrival = _arrival(options)
        if options.sweep is not None and not self._goodput:
            raise UsageError("--sweep needs --goodput: the latencies that requests shall keep to")
        if options.sweep is not None and (options.ramp_up_strategy or math.isfinite(options.request_rate)):
            raise UsageError("--sweep chooses the request rates itself: leave out --request-rate and the ramp")
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = ({"authorization": f"Bearer {key}"} if key else {}) | dict(options.header)
        self._form = Form(
            options.model or "",
            options.endpoint or BACKENDS[options.backend],
            stream=not options.no_stream,
            ignore_eos=options.dataset_name == "random" if options.ignore_eos is None else options.ignore_eos,
            temperature=options.temperature,
            extra=options.extra_body,
        )
        self._outcome: Outcome | None = None
        self._levels: list[Level] = []

    def find_model(self) -> None:
        """Without --model: the first that the server lists.

        Raises:
            httpx.HTTPError: the server cannot be reached, or refuses.
        """
        if self._options.model:
            return
        url = f"{self._options.base_url.rstrip('/')}/v1/models"
        response = httpx.get(url, headers=self._headers, timeout=30)
        response.raise_for_status()
        try:
            name = str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{url} lists no model: name one with --model") from error
        self._form = replace(self._form, model=name)

    def warm_up(self) -> None:
        number = self._options.num_warmups
        if number:
            others = self._workload.resized(number, self._options.seed + 1)
            if self._drive("warm-up", others, self._arrival).interrupted:
                raise KeyboardInterrupt

    def measure(self) -> dict[str, Any]:
        """Run the load, or the sweep; -> the summary, of a sweep that of its best level, with the settings."""
        if self._options.sweep is None:
            summary = self._measure("requests", self._arrival)
        else:
            summary = self._sweep()
        return self._settings() | summary

    def _sweep(self) -> dict[str, Any]:
        outcomes: dict[float, Outcome] = {}

        def measure(rate: float) -> dict[str, Any]:
            title = "all at once" if math.isinf(rate) else f"{rate:.2f} req/s"
            summary = self._measure(title, replace(self._arrival, request_rate=rate))
            assert self._outcome is not None
            outcomes[rate] = self._outcome
            return summary

        for level in search(measure, self._options.sweep):
            self._levels.append(level)
        chosen = best(self._levels)
        shown = chosen or self._levels[-1]
        self._outcome = outcomes[shown.request_rate]
        levels = [
            {"request_rate": _json_rate(level.request_rate), "met": level.met, **level.summary}
            for level in self._levels
        ]
        return {
            **shown.summary,
            "request_rate": _json_rate(shown.request_rate),
            "sweep_target": self._options.sweep,
            "sweep_best_request_rate": chosen.request_rate if chosen else None,
            "interrupted": any(level.summary["interrupted"] for level in self._levels),
            "sweep": levels,
        }

    def _measure(self, title: str, arrival: Arrival) -> dict[str, Any]:
        self._outcome = self._drive(title, self._workload, arrival)
        return summarize(self._outcome, self._goodput, self._options.metric_percentiles)

    def _drive(self, title: str, workload: Workload, arrival: Arrival) -> Outcome:
        options = self._options
        with LiveProgress(title, workload.num_requests, disable=options.no_progress) as live:
            return drive(
                options.base_url,
                self._form,
                workload,
                arrival,
                headers=self._headers,
                timeout=options.request_timeout,
                processes=options.processes,
                seed=options.seed,
                on_progress=live.show,
            )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "base_url": options.base_url,
            "endpoint": self._form.endpoint,
            "model_id": self._form.model,
            "stream": self._form.stream,
            "dataset_name": options.dataset_name,
            "num_prompts": options.num_prompts,
            "input_len": options.input_len if options.dataset_name == "random" else None,
            "output_len": getattr(self._workload, "output_len", None),
            "request_rate": _json_rate(options.request_rate),
            "burstiness": _json_rate(options.burstiness),
            "max_concurrency": options.max_concurrency,
            "goodput": self._goodput,
            "seed": options.seed,
        }

    def report(self, summary: dict[str, Any], earlier: dict[str, Any] | None) -> None:
        """Tables on standard output, warnings on standard error, files where asked for."""
        options = self._options
        console = Console()
        if self._levels:
            console.print(sweep_table(self._levels))
            found = summary["sweep_best_request_rate"]
            if found is None:
                console.print(f"No rate kept {options.sweep:.1%} of the requests within the limits.")
            else:
                console.print(f"Highest rate with {options.sweep:.1%} within the limits: {found:.2f} requests/s.")
        console.print(summary_table(summary, options.percentile_metrics, options.metric_percentiles))
        if earlier is not None:
            console.print(comparison_table(earlier, summary))
        for kind, count in summary["errors"].items():
            print(f"{count} x {kind}: {summary['error_examples'][kind]}", file=sys.stderr)
        if summary["client_cpu_share"] > BUSY_CLIENT:
            print(
                f"tessera bench: a client process used {summary['client_cpu_share']:.0%} of a core, so that its times "
                "may be too long; more --processes would help",
                file=sys.stderr,
            )
        if options.output:
            options.output.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        if options.html:
            assert self._outcome is not None
            write_page(options.html, summary, self._outcome, self._levels, earlier, options.metric_percentiles)


def _json_rate(rate: float) -> float | str:
    """As `vllm bench serve` writes it: JSON has no infinity."""
    return rate if math.isfinite(rate) else "inf"


def _workload(options: argparse.Namespace) -> Workload:
    if options.dataset_name != "random":
        if options.dataset_path is None:
            raise UsageError(f"--dataset-name {options.dataset_name} needs --dataset-path")
        dialogues = read_dialogues(options.dataset_path)
        return FileWorkload(dialogues, options.num_prompts, options.output_len, options.num_turns, options.seed)
    if options.dataset_path is not None:
        raise UsageError("--dataset-path needs --dataset-name sharegpt or custom")
    if options.num_turns > 1 and not (options.endpoint or BACKENDS[options.backend]).endswith("chat/completions"):
        raise UsageError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
    return RandomWorkload(
        options.num_prompts,
        options.input_len,
        options.output_len or DEFAULT_RANDOM_OUTPUT_LEN,
        options.vocab_size,
        options.seed,
        options.random_range_ratio,
        options.random_prefix_len,
        options.num_prefixes,
        options.num_turns,
    )


def _arrival(options: argparse.Namespace) -> Arrival:
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        raise UsageError("a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
    if all(ramp) and math.isfinite(options.request_rate):
        raise UsageError("--request-rate and --ramp-up-strategy exclude each other")
    return Arrival(
        options.request_rate,
        options.burstiness,
        options.max_concurrency,
        options.ramp_up_strategy,
        options.ramp_up_start_rps or 0.0,
        options.ramp_up_end_rps or 0.0,
    )
