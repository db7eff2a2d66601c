"""A run in sentences: what was reached, what was kept to, and what to be careful with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

MAX_STRAY_CACHE = 0.05  # share of prompt tokens; more flatters where prompts should be fresh
MIN_SECONDS = 20.0  # of a run; the queues of a shorter one may not have reached their length


class Finding(NamedTuple):
    """A sentence, and whether it is good news, bad news, or neither."""

    text: str
    kind: Literal["good", "bad", "note"]


def headline(summary: Mapping[str, Any]) -> str:
    """The one figure: what was reached, never what was asked for."""
    embeds = str(summary["endpoint"]).endswith("/embeddings")
    tokens = summary["total_token_throughput"] if embeds else summary["output_throughput"]
    kind = "input" if embeds else "output"
    best = summary.get("sweep_best_throughput")
    if best:
        return f"{best:.3g} requests/s within the limits"
    return f"{summary['request_throughput']:.3g} requests/s, {tokens:,.0f} {kind} tokens/s"


def findings(summary: Mapping[str, Any]) -> list[Finding]:
    """In the order of importance; the first is the headline."""
    found = [Finding(f"Reached: {headline(summary)}.", "note")]
    found += _sweeps(summary)
    asked = summary.get("request_rate")
    if "sweep" not in summary and isinstance(asked, int | float):
        found.append(_rate(summary, float(asked)))
    if summary.get("goodput"):
        limits = ", ".join(f"{metric.upper()} {limit:g} ms" for metric, limit in summary["goodput"].items())
        share = summary["goodput_share"]
        kind: Literal["good", "bad"] = "good" if share >= (summary.get("sweep_target") or 0.95) else "bad"
        found.append(Finding(f"{share:.1%} of the requests kept to the limits ({limits}).", kind))
    if summary["failed"]:
        total = summary["failed"] + summary["completed"]
        found.append(Finding(f"{summary['failed']} of {total} requests failed; the figures are of the others.", "bad"))
    found += _cache(summary)
    if summary["interrupted"]:
        found.append(Finding("The run was stopped before its end.", "bad"))
    elif "sweep" not in summary and summary["duration"] < MIN_SECONDS:
        found.append(
            Finding(f"It took {summary['duration']:.1f} s: too short for queues to reach their length.", "note")
        )
    return found


def _sweeps(summary: Mapping[str, Any]) -> list[Finding]:
    if summary.get("sweep_kind") == "rate":
        target = f"{summary['sweep_target']:.0%} of the requests within the limits"
        best = summary["sweep_best_throughput"]
        if best is None:
            return [Finding(f"No rate had {target}.", "bad")]
        asked = summary["sweep_best_request_rate"]
        return [Finding(f"Highest rate with {target}: {best:.3g} requests/s reached, {asked:.3g} asked for.", "good")]
    if summary.get("sweep_kind") == "concurrency":
        place, within = summary["saturation_concurrency"], summary["sweep_best_concurrency"]
        found: list[Finding] = []
        if summary["goodput"]:
            text = f"Up to {within} requests under way" if within else "No number of requests under way"
            share = f"{summary['sweep_target']:.0%} of the requests"
            found = [Finding(f"{text}: {share} within the limits.", "good" if within else "bad")]
        if place is None:
            return [
                *found,
                Finding("The throughput still grew at the last level: the server is not saturated.", "note"),
            ]
        return [
            *found,
            Finding(
                f"Saturated at {place} requests under way: more of them wait longer and add no throughput "
                f"({summary['saturation_throughput']:.3g} requests/s).",
                "good",
            ),
        ]
    return []


def _rate(summary: Mapping[str, Any], asked: float) -> Finding:
    if summary["saturated"]:
        reached = summary["steady_request_throughput"]
        return Finding(
            f"The server does not keep up with {asked:.3g} requests/s: it completes {reached:.3g} and its queue grows.",
            "bad",
        )
    return Finding(f"The server keeps up with the {asked:.3g} requests/s asked for.", "good")


def _cache(summary: Mapping[str, Any]) -> list[Finding]:
    cached, total = summary["total_cached_tokens"], summary["total_input_tokens"]
    if cached is None and not summary["total_output_tokens"]:
        return []  # embeddings, of which none are cached
    if cached is None:
        return [Finding("The server does not say how many prompt tokens came from its prefix cache.", "note")]
    share = cached / max(total, 1)
    expected = summary.get("shares_prefixes") or not summary.get("fresh_prompts", True)
    if share > MAX_STRAY_CACHE and not expected:
        text = f"{share:.1%} of the prompt tokens came from the prefix cache: prompts begin alike, or were sent before."
        return [Finding(text, "bad")]
    return [Finding(f"{share:.1%} of the prompt tokens came from the prefix cache.", "note")] if cached else []
