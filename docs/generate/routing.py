"""The picture and the table of routing policies, from `docs/figures/routing.json`, as the simulation writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from docs.generate.figures import markdown_table
from docs.generate.paths import FIGURES
from docs.generate.svg import Palette, line, picture, rect, text

WIDTH, HEIGHT, LEFT = 880, 262, 142
PANEL = (WIDTH - LEFT - 24) / 3
ROW, TOP = 34, 84
OURS = "prefix and load"
ROOM = 0.62  # of a panel's width, for its longest bar; the value stands beside it

Row = dict[str, float]
PANELS: tuple[tuple[str, Callable[[Row], float], str], ...] = (
    ("prefix hits, % of the ideal", lambda row: 100 * row["share_of_ideal"], "{:.0f}"),
    ("P99 time to first token, s", lambda row: row["ttft_p99"], "{:.2f}"),
    ("P99 load, times the mean", lambda row: row["spread"], "{:.1f}"),
)


@cache
def routing() -> dict[str, Any]:
    """Figures by policy, with the workload and the fleet."""
    content: dict[str, Any] = json.loads((FIGURES / "routing.json").read_text())
    return content


def routing_picture(palette: Palette) -> str:
    """Bars of each policy in three panels; one that is far longer than our own and the usual ones is cut."""
    rows: dict[str, Row] = routing()["policies"]
    fleet, requests = routing()["fleet"], round(rows[OURS]["requests"], -3)
    parts = [text(24, 32, "Routing to a thousand replicas", kind="head")]
    for place, policy in enumerate(rows):
        kind = "name" if policy == OURS else ""
        parts.append(text(24, TOP + ROW * place + 15, policy, kind=kind))
    for number, (title, value, form) in enumerate(PANELS):
        x = LEFT + number * PANEL
        longest = max(value(row) for policy, row in rows.items() if policy != "prefix alone")
        parts += [
            text(x, TOP - 20, title, kind="name"),
            line([(x, TOP - 6), (x, TOP + ROW * len(rows) - 6)], palette.edge),
        ]
        for place, (policy, row) in enumerate(rows.items()):
            share = value(row) / longest
            length = PANEL * ROOM * min(share, 1.15)
            fill = palette.accent if policy == OURS else palette.second
            y = TOP + ROW * place
            parts.append(rect(x, y, max(length, 2), 20, fill))
            cut = ", cut" if share > 1.15 else ""
            kind = "num name" if policy == OURS else "num"
            parts.append(
                text(
                    x + length + 6,
                    y + 14,
                    (form if value(row) < 100 else "{:,.0f}").format(value(row)) + cut,
                    kind=kind,
                    size=11,
                )
            )
    caption = (
        f"Simulation: {fleet['num_replicas']:,} replicas, {requests:,.0f} requests of branching conversations, bursts, "
        f"{fleet['failures'] + fleet['rack']} failures."
    )
    parts.append(text(24, HEIGHT - 18, caption, size=11.5))
    return picture(palette, WIDTH, HEIGHT, "Routing policies compared on a thousand simulated replicas", parts)


def routing_table() -> str:
    """A row for each policy."""
    columns = [
        "policy",
        "hits",
        "of the ideal",
        "TTFT P50 ms",
        "P99 ms",
        "P99.9 ms",
        "P99 ms a token",
        "P99 load / mean",
    ]
    rows = [
        [
            f"**{policy}**" if policy == OURS else policy,
            f"{100 * row['hit_rate']:.1f} %",
            f"{100 * row['share_of_ideal']:.1f} %",
            *(f"{1000 * row[name]:,.0f}" for name in ("ttft_p50", "ttft_p99", "ttft_p999", "tpot_p99")),
            f"{row['spread']:.2f}",
        ]
        for policy, row in routing()["policies"].items()
    ]
    return markdown_table(columns, rows)
