"""The figures of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tessera.engine.contract.messages import EngineTotals, SchedulerStats

COUNTS = (
    *("num_prompt_tokens", "num_generation_tokens", "num_prefix_queries", "num_prefix_hits", "num_preemptions"),
    *("num_draft_tokens", "num_accepted_draft_tokens"),
)
LATENCIES = ("time_to_first_token", "inter_token_latency", "e2e_latency")


class SummedStats:
    """Sums the engines' last figures; the totals of one that has ended stay in the sum."""

    def __init__(self) -> None:
        self._last: dict[int, SchedulerStats] = {}
        self._ended: list[EngineTotals] = []  # at most one: the sum

    def note(self, engine: int, stats: SchedulerStats) -> None:
        self._last[engine] = stats

    def note_end(self, engine: int) -> None:
        stats = self._last.pop(engine, None)
        if stats is not None and stats.totals is not None:
            self._ended = [_sum_totals([*self._ended, stats.totals])]

    def sum(self) -> SchedulerStats:
        each = list(self._last.values())
        totals = [*self._ended, *(stats.totals for stats in each if stats.totals is not None)]
        return SchedulerStats(
            num_running=sum(stats.num_running for stats in each),
            num_waiting=sum(stats.num_waiting for stats in each),
            num_free_blocks=sum(stats.num_free_blocks for stats in each),
            num_cached_blocks=sum(stats.num_cached_blocks for stats in each),
            num_used_blocks=sum(stats.num_used_blocks for stats in each),
            totals=_sum_totals(totals) if totals else None,
        )


def _sum_totals(each: list[EngineTotals]) -> EngineTotals:
    counts = {name: sum(getattr(totals, name) for totals in each) for name in COUNTS}
    latencies = {name: _sum_lists(getattr(totals, name) for totals in each) for name in LATENCIES}
    finished: Counter[str] = Counter()
    for totals in each:
        finished.update(totals.num_finished)
    return EngineTotals(**counts, **latencies, num_finished=dict(finished))  # type: ignore[arg-type]


def _sum_lists(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)]
