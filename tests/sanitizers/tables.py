"""Tables of a run's failures and findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from tests.sanitizers.reports import Report


def found_table(found: Counter[Report]) -> Table:
    places: Counter[tuple[str, str]] = Counter()
    for report, count in found.items():
        places[report.what, report.kernel or report.test] += count
    return _table("Found", ("what", "where", "times"), [(*place, str(count)) for place, count in places.most_common()])


def failed_table(accounts: dict[str, str]) -> Table:
    """Tests together that have failed for the same reason."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for test, account in accounts.items():
        tests[error_of(account)].append(test)
    rows = sorted(tests.items(), key=lambda item: -len(item[1]))
    return _table("Failed", ("reason", "the first", "tests"), [(why, names[0], str(len(names))) for why, names in rows])


def longest_table(seconds: dict[str, float], count: int = 10) -> Table:
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    return _table("Longest", ("function", "seconds"), [(name, f"{taken:.0f}") for name, taken in longest])


def running_table(seconds: dict[str, float]) -> Table:
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return _table("Running", ("test", "seconds"), [(name, f"{passed:.0f}") for name, passed in rows])


def error_of(account: str) -> str:
    """The line of pytest's account of a failure that names the error, or the last one."""
    lines = [line for line in account.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[:1] or lines[-1:] or [""])[0]


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """The last column is a number."""
    shown = Table(title=title, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="right" if name == columns[-1] else "left")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown
