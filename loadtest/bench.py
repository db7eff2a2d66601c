"""`tessera bench`: from options to a load, its figures and its reports."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson
from rich.console import Console

from tessera.loadtest.bench_options import (
    ENDPOINTS,
    ArrivalOptions,
    ReportOptions,
    ServerUnderTest,
    WorkOptions,
)
from tessera.loadtest.report.comparison import comparison_table, read_summary
from tessera.loadtest.report.report_page import write_page
from tessera.loadtest.report.result_table import summary_table, sweep_table
from tessera.loadtest.run.load_run import ClientProcessError, Outcome, drive
from tessera.loadtest.run.progress import LiveProgress
from tessera.loadtest.run.summary import BUSY_CLIENT, summarize
from tessera.loadtest.run.sweep import Level, best, search
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.dialogue_file import FileWorkload, read_dialogues
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.workload import Workload
from tessera.options.command_options import GivenOptions
from tessera.options.errors import OptionError

EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
DEFAULT_RANDOM_OUTPUT_LEN = 128


@dataclass(frozen=True)
class Options:
    """The command's options, in the groups that declare them."""

    server: ServerUnderTest
    work: WorkOptions
    arrival: ArrivalOptions
    report: ReportOptions

    @property
    def endpoint(self) -> str:
        return self.server.endpoint or ENDPOINTS[self.server.backend]


def run_bench(given: GivenOptions) -> int:
    """-> exit code: 0 if every request succeeded, 1 if some failed, 2 for wrong options, 130 after Ctrl-C."""
    options = Options(
        given.make(ServerUnderTest), given.make(WorkOptions), given.make(ArrivalOptions), given.make(ReportOptions)
    )
    try:
        earlier = read_summary(options.report.compare) if options.report.compare else None
        bench = Bench(options)
        bench.find_model()
        bench.warm_up()
        summary = bench.measure()
        bench.report(summary, earlier)
    except OptionError as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except (httpx.HTTPError, ClientProcessError) as error:
        print(f"tessera bench: {options.server.base_url}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:  # while there is nothing to report yet
        return EXIT_INTERRUPTED
    if summary["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if summary["failed"] or not summary["completed"] else 0


class Bench:
    """One call of the command.

    Raises:
        OptionError: options contradict each other, or a file of theirs cannot be used.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._goodput = dict(options.report.goodput)
        self._workload = _workload(options)
        self._arrival = _arrival(options.arrival)
        if options.arrival.sweep is not None:
            _check_sweep(options.arrival, self._goodput)
        server, work = options.server, options.work
        key = server.api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = ({"authorization": f"Bearer {key}"} if key else {}) | dict(server.header)
        self._template = RequestTemplate(
            server.model or "",
            options.endpoint,
            stream=server.stream,
            ignore_eos=work.dataset_name == "random" if work.ignore_eos is None else work.ignore_eos,
            temperature=work.temperature,
            extra=server.extra_body,
        )
        self._outcome: Outcome | None = None
        self._levels: list[Level] = []

    def find_model(self) -> None:
        """Without --model: the first that the server lists.

        Raises:
            httpx.HTTPError: the server cannot be reached, or refuses.
        """
        server = self._options.server
        if server.model:
            return
        url = f"{server.base_url}/v1/models"
        response = httpx.get(url, headers=self._headers, timeout=30)
        response.raise_for_status()
        try:
            name = str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise OptionError(f"{url} lists no model: name one with --model") from error
        self._template = replace(self._template, model=name)

    def warm_up(self) -> None:
        number = self._options.arrival.num_warmups
        if number:
            others = self._workload.resized(number, self._options.work.seed + 1)
            if self._drive("warm-up", others, self._arrival).interrupted:
                raise KeyboardInterrupt

    def measure(self) -> dict[str, Any]:
        """Run the load, or the sweep; -> the summary, of a sweep that of its best level, with the settings."""
        target = self._options.arrival.sweep
        if target is None:
            summary = self._measure("requests", self._arrival)
        else:
            summary = self._sweep(target)
        return self._settings() | summary

    def _sweep(self, target: float) -> dict[str, Any]:
        outcomes: dict[float, Outcome] = {}

        def measure(rate: float) -> dict[str, Any]:
            title = "all at once" if math.isinf(rate) else f"{rate:.2f} req/s"
            summary = self._measure(title, replace(self._arrival, request_rate=rate))
            assert self._outcome is not None
            outcomes[rate] = self._outcome
            return summary

        for level in search(measure, target):
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
            "sweep_target": target,
            "sweep_best_request_rate": chosen.request_rate if chosen else None,
            "interrupted": any(level.summary["interrupted"] for level in self._levels),
            "sweep": levels,
        }

    def _measure(self, title: str, arrival: Arrival) -> dict[str, Any]:
        self._outcome = self._drive(title, self._workload, arrival)
        return summarize(self._outcome, self._goodput, self._options.report.metric_percentiles)

    def _drive(self, title: str, workload: Workload, arrival: Arrival) -> Outcome:
        options = self._options
        with LiveProgress(title, workload.num_requests, disable=not options.report.progress) as live:
            return drive(
                options.server.base_url,
                self._template,
                workload,
                arrival,
                headers=self._headers,
                timeout=options.server.request_timeout,
                processes=options.arrival.processes,
                seed=options.work.seed,
                on_progress=live.show,
            )

    def _settings(self) -> dict[str, Any]:
        server, work, arrival = self._options.server, self._options.work, self._options.arrival
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "base_url": server.base_url,
            "endpoint": self._template.endpoint,
            "model_id": self._template.model,
            "stream": self._template.stream,
            "dataset_name": work.dataset_name,
            "num_prompts": work.num_prompts,
            "input_len": work.input_len if work.dataset_name == "random" else None,
            "output_len": getattr(self._workload, "output_len", None),
            "request_rate": _json_rate(arrival.request_rate),
            "burstiness": _json_rate(arrival.burstiness),
            "max_concurrency": arrival.max_concurrency,
            "goodput": self._goodput,
            "seed": work.seed,
        }

    def report(self, summary: dict[str, Any], earlier: dict[str, Any] | None) -> None:
        """Tables on standard output, warnings on standard error, files where asked for."""
        options = self._options.report
        console = Console()
        if self._levels:
            self._print_sweep(console, summary)
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

    def _print_sweep(self, console: Console, summary: dict[str, Any]) -> None:
        console.print(sweep_table(self._levels))
        target, found = summary["sweep_target"], summary["sweep_best_request_rate"]
        if found is None:
            console.print(f"No rate kept {target:.1%} of the requests within the limits.")
        else:
            console.print(f"Highest rate with {target:.1%} within the limits: {found:.2f} requests/s.")


def _json_rate(rate: float) -> float | str:
    """As `vllm bench serve` writes it: JSON has no infinity."""
    return rate if math.isfinite(rate) else "inf"


def _workload(options: Options) -> Workload:
    work = options.work
    if work.dataset_name != "random":
        if work.dataset_path is None:
            raise OptionError(f"--dataset-name {work.dataset_name} needs --dataset-path")
        dialogues = read_dialogues(work.dataset_path)
        return FileWorkload(dialogues, work.num_prompts, work.output_len, work.num_turns, work.seed)
    if work.dataset_path is not None:
        raise OptionError("--dataset-path needs --dataset-name sharegpt or custom")
    if work.num_turns > 1 and not options.endpoint.endswith("chat/completions"):
        raise OptionError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
    return RandomWorkload(
        work.num_prompts,
        work.input_len,
        work.output_len or DEFAULT_RANDOM_OUTPUT_LEN,
        work.vocab_size,
        work.seed,
        work.random_range_ratio,
        work.random_prefix_len,
        work.num_prefixes,
        work.num_turns,
    )


def _arrival(options: ArrivalOptions) -> Arrival:
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        raise OptionError("a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
    if all(ramp) and math.isfinite(options.request_rate):
        raise OptionError("--request-rate and --ramp-up-strategy exclude each other")
    return Arrival(
        options.request_rate,
        options.burstiness,
        options.max_concurrency,
        options.ramp_up_strategy,
        options.ramp_up_start_rps or 0.0,
        options.ramp_up_end_rps or 0.0,
    )


def _check_sweep(options: ArrivalOptions, goodput: dict[str, float]) -> None:
    if not goodput:
        raise OptionError("--sweep needs --goodput: the latencies that requests shall keep to")
    if options.ramp_up_strategy or math.isfinite(options.request_rate):
        raise OptionError("--sweep chooses the request rates itself: leave out --request-rate and the ramp")
