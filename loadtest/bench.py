"""`tessera bench`: from options to a load, its figures and its reports."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console

from tessera.loadtest.options.arrival import DEFAULT_TARGET, ArrivalOptions
from tessera.loadtest.options.report import ReportOptions
from tessera.loadtest.options.server import SamplingOptions, ServerUnderTest
from tessera.loadtest.options.work import WorkOptions
from tessera.loadtest.report.comparison import comparison_table, differences, read_summary
from tessera.loadtest.report.findings import findings
from tessera.loadtest.report.report_page import write_page
from tessera.loadtest.report.result_file import check_places, write_results
from tessera.loadtest.report.result_table import summary_table, sweep_table
from tessera.loadtest.run.load_run import ClientProcessError, Outcome, drive
from tessera.loadtest.run.progress import LiveProgress
from tessera.loadtest.run.server_check import first_model, wait_until_ready
from tessera.loadtest.run.summary import BUSY_CLIENT, details, summarize
from tessera.loadtest.run.sweep import Level, best, most_within, saturation, search, sweep_concurrency
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.choose import choose_workload
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.workload import Workload
from tessera.options.command_options import GivenOptions
from tessera.options.errors import OptionError

EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
FIXED_SEED = 0  # of runs whose prompts shall not be fresh
MAX_SEED = 2**31
LEVEL_PROMPTS = 4  # for each request under way, at least, in a sweep over these


@dataclass(frozen=True)
class Options:
    """The command's options, in the groups that declare them."""

    server: ServerUnderTest
    sampling: SamplingOptions
    work: WorkOptions
    arrival: ArrivalOptions
    report: ReportOptions


def run_bench(given: GivenOptions) -> int:
    """-> exit code: 0 if every request succeeded, 1 if some failed, 2 for wrong options, 130 after Ctrl-C."""
    structs = (ServerUnderTest, SamplingOptions, WorkOptions, ArrivalOptions, ReportOptions)
    options = Options(*(given.make(struct) for struct in structs))  # type: ignore[arg-type]
    try:
        earlier = read_summary(options.report.compare) if options.report.compare else None
        check_places(options.report)
        bench = Bench(options)
        bench.find_server()
        bench.warm_up()
        summary = bench.measure()
        bench.report(summary, earlier)
    except OptionError as error:
        print(f"tessera bench: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except (httpx.HTTPError, ClientProcessError) as error:
        print(f"tessera bench: {options.server.url}: {error}", file=sys.stderr)
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
        server, sampling, work = options.server, options.sampling, options.work
        self._goodput = dict(options.report.goodput)
        fresh = secrets.randbelow(MAX_SEED) if work.fresh_prompts else FIXED_SEED
        self._seed = fresh if work.seed is None else work.seed
        chosen = choose_workload(work, options.arrival, server.path, self._seed)
        self._workload = chosen.workload
        self._arrival = _arrival(options.arrival)
        _check_sweeps(options.arrival, self._goodput)
        key = server.api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = ({"authorization": f"Bearer {key}"} if key else {}) | dict(server.header)
        chat = server.path.endswith("chat/completions")
        self._template = RequestTemplate(
            server.served_model_name or server.model or "",
            server.path,
            stream=server.stream,
            ignore_eos=chosen.random_tokens if sampling.ignore_eos is None else sampling.ignore_eos,
            temperature=sampling.temperature if sampling.temperature >= 0 else None,
            extra=sampling.fields(chat=chat),
        )
        self._num_taken = 0  # prompts of the workload so far
        self._outcome: Outcome | None = None
        self._levels: list[Level] = []

    def find_server(self) -> None:
        """The model without --model, and whether the server is ready, where that is asked for.

        Raises:
            httpx.HTTPError: the server cannot be reached, or refuses.
        """
        server = self._options.server
        seconds = server.ready_check_timeout_sec
        if not self._template.model:
            if seconds:
                models = f"{server.url}/v1/models"
                wait_until_ready(models, self._headers, None, seconds, insecure=server.insecure)
            name = first_model(server.url, self._headers, insecure=server.insecure)
            self._template = replace(self._template, model=name)
        if seconds:
            job = next(iter(self._next(1).jobs(replace(self._template, stream=False))))
            url = server.url + self._template.endpoint
            wait_until_ready(url, self._headers, job, seconds, insecure=server.insecure)

    def warm_up(self) -> None:
        number = self._options.arrival.num_warmups
        if number and self._drive("warm-up", self._next(number), self._arrival).interrupted:
            raise KeyboardInterrupt

    def measure(self) -> dict[str, Any]:
        """Run the load, or a sweep; -> the summary, of a sweep that of its best level, with the settings."""
        arrival = self._options.arrival
        if arrival.sweep is not None:
            summary = self._sweep_rates(arrival.sweep)
        elif arrival.sweep_concurrency is not None:
            summary = self._sweep_concurrency(arrival.sweep_concurrency)
        else:
            summary = self._measure("requests", self._arrival, self._workload.num_prompts)
        return {**dict(self._options.report.metadata), **self._settings(), **summary}

    def _sweep_rates(self, target: float) -> dict[str, Any]:
        outcomes: dict[float, Outcome] = {}

        def measure(rate: float) -> dict[str, Any]:
            title = "all at once" if math.isinf(rate) else f"{rate:.2f} req/s"
            arrival = replace(self._arrival, request_rate=rate)
            summary = self._measure(title, arrival, self._workload.num_prompts)
            assert self._outcome is not None
            outcomes[rate] = self._outcome
            return summary

        self._levels.extend(search(measure, target))
        chosen = best(self._levels)
        shown = chosen or self._levels[-1]
        self._outcome = outcomes[shown.request_rate]
        return {
            **shown.summary,
            "request_rate": _json_rate(shown.request_rate),
            "sweep_kind": "rate",
            "sweep_target": target,
            "sweep_best_request_rate": chosen.request_rate if chosen else None,
            "sweep_best_throughput": chosen.throughput if chosen else None,
            **self._sweep_levels(),
        }

    def _sweep_concurrency(self, given: tuple[int, ...]) -> dict[str, Any]:
        outcomes: dict[int, Outcome] = {}

        def measure(concurrency: int) -> dict[str, Any]:
            arrival = replace(self._arrival, max_concurrency=concurrency)
            number = max(self._workload.num_prompts, LEVEL_PROMPTS * concurrency)
            summary = self._measure(f"{concurrency} under way", arrival, number)
            assert self._outcome is not None
            outcomes[concurrency] = self._outcome
            return summary

        self._levels.extend(sweep_concurrency(measure, given, DEFAULT_TARGET))
        place = saturation(self._levels)
        within = most_within(self._levels) if self._goodput else None
        shown = within or place or max(self._levels, key=lambda level: level.throughput)
        self._outcome = outcomes[shown.concurrency or 0]
        return {
            **shown.summary,
            "max_concurrency": shown.concurrency,
            "sweep_kind": "concurrency",
            "saturation_concurrency": place.concurrency if place else None,
            "saturation_throughput": place.throughput if place else None,
            "sweep_target": DEFAULT_TARGET if self._goodput else None,
            "sweep_best_concurrency": within.concurrency if within else None,
            "sweep_best_throughput": within.throughput if within else None,
            **self._sweep_levels(),
        }

    def _sweep_levels(self) -> dict[str, Any]:
        levels = [
            {
                "request_rate": _json_rate(level.request_rate),
                "max_concurrency": level.concurrency or self._arrival.max_concurrency,
                "met": level.met,
                **level.summary,
            }
            for level in self._levels
        ]
        return {"interrupted": any(level.summary["interrupted"] for level in self._levels), "sweep": levels}

    def _measure(self, title: str, arrival: Arrival, num_prompts: int) -> dict[str, Any]:
        self._outcome = self._drive(title, self._next(num_prompts), arrival)
        return summarize(self._outcome, self._goodput, self._options.report.metric_percentiles)

    def _next(self, num_prompts: int) -> Workload:
        """Prompts that have not been sent yet; always the same without --fresh-prompts."""
        part = self._workload.part(self._num_taken, num_prompts)
        if self._options.work.fresh_prompts:
            self._num_taken += part.num_prompts
        return part

    def _drive(self, title: str, workload: Workload, arrival: Arrival) -> Outcome:
        server, report = self._options.server, self._options.report
        shown = report.progress and not report.disable_tqdm
        with LiveProgress(title, workload.num_requests, disable=not shown) as live:
            return drive(
                server.url,
                self._template,
                workload,
                arrival,
                headers=self._headers,
                timeout=server.request_timeout,
                processes=self._options.arrival.processes,
                seed=self._seed,
                on_progress=live.show,
                request_id=server.request_id_prefix,
                insecure=server.insecure,
            )

    def _settings(self) -> dict[str, Any]:
        server, work, arrival = self._options.server, self._options.work, self._options.arrival
        workload = self._workload
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "label": self._options.report.label or server.backend,
            "backend": server.backend,
            "base_url": server.url,
            "endpoint": self._template.endpoint,
            "model_id": self._template.model,
            "tokenizer_id": work.tokenizer,
            "stream": self._template.stream and not self._template.embeds,
            "sampling": {"temperature": self._template.temperature, **self._template.extra},
            "ignore_eos": self._template.ignore_eos,
            "dataset_name": work.dataset_name,
            "dataset_path": str(work.dataset_path) if work.dataset_path else None,
            "num_prompts": workload.num_prompts,
            "input_len": getattr(workload, "input_len", None),
            "output_len": getattr(workload, "output_len", None),
            "range_ratio": getattr(workload, "range_ratio", None),
            "prefix_len": getattr(workload, "prefix_len", None),
            "num_prefixes": getattr(workload, "num_prefixes", None),
            "num_turns": work.num_turns,
            "batch_size": work.random_batch_size if self._template.embeds else None,
            "self_timed": workload.due_times() is not None,
            "trace_speed": work.trace_speed,
            "request_rate": _json_rate(arrival.request_rate),
            "burstiness": _json_rate(arrival.burstiness),
            "ramp_up_strategy": arrival.ramp_up_strategy,
            "ramp_up_start_rps": arrival.ramp_up_start_rps,
            "ramp_up_end_rps": arrival.ramp_up_end_rps,
            "max_concurrency": arrival.max_concurrency,
            "max_seconds": arrival.max_seconds,
            "goodput": self._goodput,
            "fresh_prompts": work.fresh_prompts,
            "shares_prefixes": bool(getattr(workload, "prefix_len", 0)) or work.num_turns > 1 or _is_trace(work),
            "seed": self._seed,
        }

    def report(self, summary: dict[str, Any], earlier: dict[str, Any] | None) -> None:
        """Tables on standard output, warnings on standard error, files where asked for."""
        options = self._options.report
        assert self._outcome is not None
        written = write_results(options, summary, details(self._outcome))
        if options.html:
            write_page(options.html, summary, self._outcome, self._levels, earlier, options.metric_percentiles)
            written.append(options.html)
        console = Console(highlight=False)
        if self._levels:
            console.print(sweep_table(self._levels))
        console.print(summary_table(summary, options.percentile_metrics, options.metric_percentiles))
        for finding in findings(summary):
            console.print(finding.text, style={"good": "green", "bad": "yellow", "note": ""}[finding.kind])
        if earlier is not None:
            console.print(comparison_table(earlier, summary))
            for difference in differences(earlier, summary):
                print(f"tessera bench: not the same load: {difference}", file=sys.stderr)
        for kind, count in summary["errors"].items():
            print(f"{count} x {kind}: {summary['error_examples'][kind]}", file=sys.stderr)
        if summary["client_cpu_share"] > BUSY_CLIENT:
            print(
                f"tessera bench: a client process used {summary['client_cpu_share']:.0%} of a core, so that its times "
                "may be too long; more --processes would help",
                file=sys.stderr,
            )
        if written:
            console.print(f"Written: {', '.join(map(str, written))}", style="dim", soft_wrap=True)


def _is_trace(work: WorkOptions) -> bool:
    return work.dataset_name == "timed_trace"


def _json_rate(rate: float) -> float | str:
    """As `vllm bench serve` writes it: JSON has no infinity."""
    return rate if math.isfinite(rate) else "inf"


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
        options.max_seconds,
    )


def _check_sweeps(options: ArrivalOptions, goodput: dict[str, float]) -> None:
    if options.sweep is not None and not goodput:
        raise OptionError("--sweep needs --goodput: the latencies that requests shall keep to")
    if options.sweep is not None and (options.ramp_up_strategy or math.isfinite(options.request_rate)):
        raise OptionError("--sweep chooses the request rates itself: leave out --request-rate and the ramp")
    if options.sweep_concurrency is not None:
        if options.sweep is not None:
            raise OptionError("--sweep and --sweep-concurrency exclude each other")
        if options.max_concurrency is not None:
            raise OptionError("--sweep-concurrency chooses the requests under way: leave out --max-concurrency")
