"""The table at the end of an attack."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.attack.findings import Findings, promises

NUM_STALLS = 8  # shown


def show(findings: Findings, stall_limit: float, console: Console) -> bool:
    """Print what was found; -> whether every promise was kept."""
    parts = Table(title="The attack", title_justify="left")
    for column in ("part", "requests", "seconds", "answers", "unanswered", "canaries", "wrong", "refused", "slowest"):
        parts.add_column(column, justify="left" if column in ("part", "answers") else "right")
    for name, part in findings.parts.items():
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(part.statuses.items()))
        excused = f" (+{part.excused_canaries})" if part.excused_canaries else ""
        parts.add_row(
            name,
            f"{part.requests:,}",
            f"{part.seconds:.0f}",
            answers,
            f"{part.unanswered:,}",
            str(part.canaries),
            str(part.wrong_canaries),
            f"{part.refused_canaries}{excused}",
            f"{part.slowest_canary:.1f}",
        )
    console.print(parts)
    worst = sorted(findings.stalls, reverse=True)[:NUM_STALLS]
    for _, line in worst:
        console.print(line, markup=False, highlight=False)
    table = Table(title=f"Promises, after {findings.requests:,} hostile requests", title_justify="left")
    for column in ("promise", "found", "allowed", ""):
        table.add_column(column)
    all_kept = True
    for promise in promises(findings, stall_limit):
        all_kept &= promise.kept
        table.add_row(promise.name, promise.found, promise.allowed, "kept" if promise.kept else "[red]broken")
    console.print(table)
    return all_kept
