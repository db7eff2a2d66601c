"""The report of a run as one HTML page that needs nothing else: figures, plots, errors and settings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tessera.loadtest.metrics import METRICS, PERCENTILES
from tessera.loadtest.report.comparison import compare, differences
from tessera.loadtest.report.findings import findings, headline
from tessera.loadtest.report.load_plots import load_plots
from tessera.loadtest.report.plots import sections
from tessera.loadtest.report.result_table import latency_rows, sweep_columns, sweep_rows, totals
from tessera.loadtest.run.load_run import Outcome
from tessera.loadtest.run.sweep import Level

STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1b2430; --dim: #667085; --rule: #e4e7ec;
  --a: #2f6fed; --b: #e07b39; --good: #17804a; --bad: #c5343c; }
@media (prefers-color-scheme: dark) { :root { --ground: #11151b; --card: #1a2028; --ink: #e7ebf0; --dim: #93a0b1;
  --rule: #2b3440; --a: #6ea0ff; --b: #f0a063; --good: #5fce93; --bad: #ff7f86; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { margin: 0; font-size: 26px; letter-spacing: -.01em; }
h2 { margin: 40px 0 14px; font-size: 17px; }
.under { margin: 4px 0 26px; color: var(--dim); overflow-wrap: anywhere; }
.headline { margin: 0 0 4px; font-size: 32px; font-weight: 680; letter-spacing: -.02em; line-height: 1.2; }
.headline + .under { margin-bottom: 14px; }
.findings { margin: 0 0 24px; padding-left: 20px; max-width: 75ch; } .findings li { margin: 3px 0; }
.findings li::marker { color: var(--dim); } .findings .good, .findings .bad { color: inherit; }
.findings .good::marker { content: "\\2713\\00a0"; color: var(--good); }
.findings .bad::marker { content: "!\\00a0\\00a0"; color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; max-width: 90ch; }
dt { color: var(--dim); } dd { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(205px, 1fr)); gap: 12px; }
.card, figure, .table { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.card { padding: 14px 16px; }
.card b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; letter-spacing: -.02em; }
.card b span { font-size: 15px; font-weight: 500; color: var(--dim); letter-spacing: 0; }
.card small { display: block; color: var(--dim); font-size: 13px; }
.bad { color: var(--bad); } .good { color: var(--good); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 12px 8px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--dim); }
svg text.label { fill: var(--ink); } svg text.mark { fill: var(--ink); font-weight: 600; stroke: var(--card);
  stroke-width: 3px; paint-order: stroke; }
.grid { stroke: var(--rule); } .axis { stroke: var(--dim); } line.mark { stroke: var(--ink); stroke-dasharray: 3 3; }
.bar { fill: var(--a); opacity: .8; } .bar:hover { opacity: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .area { opacity: .16; stroke: none; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .area.a, .dot.a { fill: var(--a); }
.area.b, .dot.b { fill: var(--b); } .dot { opacity: .75; }
.table { overflow-x: auto; } .plots + .table { margin-top: 14px; } .table + .under { margin-top: 14px; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 7px 16px; text-align: right; border-top: 1px solid var(--rule); white-space: nowrap; }
tr:first-child > * { border-top: 0; } th { color: var(--dim); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 14px;
  align-items: start; }
"""


def write_page(
    path: Path,
    summary: dict[str, Any],
    outcome: Outcome,
    levels: Sequence[Level] = (),
    earlier: dict[str, Any] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> None:
    """Write the page of a summary with settings, as `Bench.measure` makes it."""
    columns, rows = latency_rows(summary, METRICS, percentiles)
    _, *others = findings(summary)
    sentences = "".join(f'<li class="{finding.kind}">{escape(finding.text)}</li>' for finding in others)
    parts = [
        f"<h1>Load test of {escape(summary['model_id'])}</h1>",
        f'<p class="under">{escape(_subtitle(summary))}</p>',
        f'<p class="headline">{escape(headline(summary))}</p>',
        f'<p class="under">{escape(load_sentence(summary))}</p>',
        f'<ul class="findings">{sentences}</ul>',
        f'<div class="cards">{"".join(_cards(summary))}</div>',
    ]
    if earlier is not None:
        parts.append(_comparison(earlier, summary))
    if levels:
        figures = "".join(f"<figure>{plot}</figure>" for plot in load_plots(levels, summary))
        parts.append(f'<h2>By load</h2><div class="plots">{figures}</div>')
        parts.append(_table(sweep_columns(levels), sweep_rows(levels)))
        parts.append(f'<p class="under">Below: the level {escape(_level(summary))}.</p>')
    for title, plots in sections(outcome.records, outcome.start, percentiles):
        figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
        parts.append(f'<h2>{title}</h2><div class="plots">{figures}</div>')
    parts.append(
        f'<h2>Figures</h2><div class="pair">{_table(["", ""], totals(summary))}{_table(["", *columns], rows)}</div>'
    )
    if summary["errors"]:
        errors = [[kind, str(count), summary["error_examples"][kind]] for kind, count in summary["errors"].items()]
        parts.append("<h2>Failures</h2>" + _table(["kind", "requests", "message of the first"], errors))
    settings = [[key, str(summary[key])] for key in _SETTINGS if summary.get(key) not in (None, {}, "")]
    parts.append("<h2>Settings</h2>" + _table(["", ""], settings))
    parts.append(f"<h2>Words</h2><dl>{_GLOSSARY}</dl>")
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test of {escape(summary['model_id'])}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n",
        encoding="utf-8",
    )


_SETTINGS = (
    *("base_url", "endpoint", "stream", "sampling", "ignore_eos", "dataset_name", "dataset_path", "tokenizer_id"),
    *("num_prompts", "input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes", "num_turns", "batch_size"),
    *("request_rate", "burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "self_timed"),
    *("trace_speed", "max_concurrency", "max_seconds", "goodput", "sweep_target", "fresh_prompts", "seed"),
)
_GLOSSARY = "".join(
    f"<dt>{word}</dt><dd>{meaning}</dd>"
    for word, meaning in (
        ("TTFT", "time to first token: how long a user waits before the answer begins"),
        ("TPOT", "time per output token after the first: how fast the answer is written; 50 ms are 20 tokens/s"),
        ("ITL", "inter-token latency: the gap between two parts of a stream; its P99 shows stutter"),
        ("E2EL", "end-to-end latency: until the last token"),
        ("P99", "99 of 100 are below it"),
        ("goodput", "requests per second that kept to all limits"),
        ("under way", "requests that the server has and has not answered in full"),
    )
)


def load_sentence(summary: dict[str, Any]) -> str:
    """The load in words."""
    turns = f" conversations of {summary['num_turns']} requests" if summary["num_turns"] > 1 else " requests"
    if summary["input_len"]:
        prefix = f" after {summary['prefix_len']:,} shared ones" if summary["prefix_len"] else ""
        lengths = f" with prompts of {summary['input_len']:,} tokens{prefix}"
        if summary["output_len"]:
            lengths += f" and completions of {summary['output_len']:,}"
    else:
        lengths = f" from {summary['dataset_name']}"
    rate = summary["request_rate"]
    arrival = f", {rate:.3g} a second" if isinstance(rate, int | float) else ""
    if summary["self_timed"]:
        arrival = ", at the times of the file"
    bound = f", at most {summary['max_concurrency']} under way" if summary["max_concurrency"] else ""
    return (
        f"{summary['completed'] + summary['failed']:,}{turns}{lengths}{arrival}{bound}, in {summary['duration']:.1f} s."
    )


def _level(summary: dict[str, Any]) -> str:
    if summary["sweep_kind"] == "concurrency":
        return f"of {summary['max_concurrency']} requests under way"
    rate = summary["request_rate"]
    return f"of {rate:.3g} requests/s" if isinstance(rate, int | float) else "with all requests at once"


def _subtitle(summary: dict[str, Any]) -> str:
    date = summary["date"]
    when = f"{date[:4]}-{date[4:6]}-{date[6:8]} {date[9:11]}:{date[11:13]}"
    stopped = ", stopped before its end" if summary["interrupted"] else ""
    return f"{summary['base_url']}{summary['endpoint']}, {when}{stopped}"


def _cards(summary: dict[str, Any]) -> list[str]:
    cards = []  # value, unit, words below, class
    best = summary.get("sweep_best_throughput")
    if best:
        at = (
            f"{summary['sweep_best_request_rate']:.3g} asked for"
            if summary["sweep_kind"] == "rate"
            else f"{summary['sweep_best_concurrency']} under way"
        )
        cards.append((f"{best:.2f}", "req/s", f"reached within the limits; {at}", "good"))
    if summary.get("saturation_concurrency"):
        cards.append((f"{summary['saturation_concurrency']}", "under way", "saturate the server", "good"))
    if summary["total_output_tokens"]:
        total = f"output, {summary['total_token_throughput']:,.0f} with input"
        cards.append((f"{summary['output_throughput']:,.0f}", "tok/s", total, ""))
    else:
        cards.append((f"{summary['total_token_throughput']:,.0f}", "tok/s", "input", ""))
    cards.append((f"{summary['request_throughput']:.2f}", "req/s", f"{summary['completed']:,} completions", ""))
    if "request_goodput" in summary:
        share = f"goodput, {summary['goodput_share']:.1%} of requests"
        cards.append((f"{summary['request_goodput']:.2f}", "req/s", share, ""))
    cached = summary["total_cached_tokens"]
    if cached:
        share = cached / max(summary["total_input_tokens"], 1)
        cards.append((f"{share:.1%}", "", "of prompt tokens from the prefix cache", ""))
    for metric in METRICS:
        if summary[f"mean_{metric}_ms"]:
            detail = f"median {metric.upper()}, P99 {summary[f'p99_{metric}_ms']:,.1f}"
            cards.append((f"{summary[f'median_{metric}_ms']:,.1f}", "ms", detail, ""))
    cards.append((f"{summary['failed']:,}", "", "requests failed", "bad" if summary["failed"] else ""))
    return [
        f'<div class="card"><b class="{style}">{value} <span>{unit}</span></b><small>{escape(detail)}</small></div>'
        for value, unit, detail, style in cards
    ]


def _comparison(earlier: dict[str, Any], summary: dict[str, Any]) -> str:
    """Verdicts only where the loads are the same; otherwise what they differ in."""
    different = differences(earlier, summary)
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{before:,.2f}</td><td>{after:,.2f}</td>"
        + (
            f"<td>{ratio:.3f}</td></tr>"
            if different
            else f'<td class="{_VERDICT_STYLE[verdict]}">{ratio:.3f} {verdict}</td></tr>'
        )
        for name, before, after, ratio, verdict in compare(earlier, summary)
    )
    head = "<tr><th></th><th>earlier</th><th>now</th><th>now / earlier</th></tr>"
    items = "".join(f'<li class="bad">{escape(difference)}</li>' for difference in different)
    warning = f'<p class="bad">Not the same load:</p><ul class="findings">{items}</ul>' if different else ""
    return f'<h2>Compared with the earlier run</h2>{warning}<div class="table"><table>{head}{rows}</table></div>'


_VERDICT_STYLE = {"better": "good", "worse": "bad", "same": ""}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr>" if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table>{head}{body}</table></div>'
