"""What an attack has shown, and the promises that it is held against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

CANARY_FACTOR = 10  # times a canary's quiet time, and a step on top
MEMORY_GROWTH = 0.05  # share of the memory after the warm-up
CACHES = 1.6  # times the memory of a server that has just started
MEMORY_SLACK = 8 * 2**20  # bytes, for servers so small that a share says nothing
DESCRIPTOR_SLACK = 16  # files of stores are opened when they are first needed, by each thread
ADMIN_SECONDS = 1.0


@dataclass(frozen=True)
class Usage:
    """What a server holds while it is quiet: all of its processes together."""

    memory: int
    descriptors: int
    processes: int
    blocks: int


@dataclass
class Part:
    """One part of the attack."""

    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0  # closed or given up on by either side, as many attacks want it
    faulty: Counter[str] = field(default_factory=Counter)  # 5xx other than 503 with Retry-After, by what was asked
    unexpected: Counter[str] = field(default_factory=Counter)  # what must not be answered that way
    canaries: int = 0
    wrong_canaries: int = 0
    refused_canaries: int = 0
    excused_canaries: int = 0  # while the attack itself had a process stopped or killed
    slowest_canary: float = 0.0  # as a multiple of what it may take: its quiet time and a step


@dataclass
class Findings:
    parts: dict[str, Part] = field(default_factory=dict)
    engine_exits: int = 0
    server_exits: int = 0
    slowest_admin: float = 0.0
    stalls: list[tuple[float, str]] = field(default_factory=list)  # seconds of their own, line of the log
    tracebacks: int = 0
    quiet: str = ""  # the canaries' quiet times
    fresh: Usage | None = None  # before the warm-up
    before: Usage | None = None  # after it
    after: Usage | None = None

    @property
    def requests(self) -> int:
        return sum(part.requests for part in self.parts.values())


@dataclass(frozen=True)
class Promise:
    name: str
    found: str
    allowed: str
    kept: bool


def promises(findings: Findings, stall_limit: float) -> list[Promise]:
    """All promises, kept or broken; `stall_limit` is in seconds."""
    parts = findings.parts.values()
    kept = [
        _none("engine exits", findings.engine_exits),
        _none("server exits", findings.server_exits),
        _none("5xx other than 503 with Retry-After", *_most_common(part.faulty for part in parts)),
        _none("answers that must not be given", *_most_common(part.unexpected for part in parts)),
        _none("tracebacks in the log", findings.tracebacks),
        _none("wrong canaries", sum(part.wrong_canaries for part in parts)),
        _none("canaries without an answer", sum(part.refused_canaries for part in parts)),
    ]
    num_canaries = sum(part.canaries for part in parts)
    kept.append(Promise("canaries", str(num_canaries), "some", num_canaries > 0))
    slowest = max((part.slowest_canary for part in parts), default=0.0)
    kept.append(
        Promise(
            "slowest canary, beside its quiet time and a step",
            f"{slowest:.1f}",
            f"{CANARY_FACTOR}",
            slowest <= CANARY_FACTOR,
        )
    )
    kept.append(
        Promise(
            "slowest answer of the admin port",
            f"{1000 * findings.slowest_admin:.0f} ms",
            f"{1000 * ADMIN_SECONDS:.0f} ms",
            findings.slowest_admin <= ADMIN_SECONDS,
        )
    )
    worst = max(findings.stalls, default=(0.0, ""))
    kept.append(
        Promise(
            "longest stall of its own",
            f"{1000 * worst[0]:.0f} ms",
            f"{1000 * stall_limit:.0f} ms",
            worst[0] <= stall_limit,
        )
    )
    return kept + _leaks(findings)


def _leaks(findings: Findings) -> list[Promise]:
    before, after = findings.before, findings.after
    if before is None or after is None:
        return [Promise("what the server holds", "unknown", "known", False)]
    grown = after.memory - before.memory
    return [
        _none("blocks leaked", after.blocks),
        Promise(
            "descriptors leaked",
            str(max(after.descriptors - before.descriptors, 0)),
            str(DESCRIPTOR_SLACK),
            after.descriptors - before.descriptors <= DESCRIPTOR_SLACK,
        ),
        _none("processes leaked", max(after.processes - before.processes, 0)),
        Promise(
            "memory after, beside that after the warm-up",
            f"{after.memory / 2**20:.0f} MiB, {before.memory / 2**20:.0f} MiB",
            f"{1 + MEMORY_GROWTH:.0%}",
            grown <= max(MEMORY_GROWTH * before.memory, MEMORY_SLACK),
        ),
        _kept_memory(findings.fresh or before, after),
    ]


def _kept_memory(fresh: Usage, after: Usage) -> Promise:
    """A bound on what caches keep, which the warm-up has filled."""
    return Promise(
        "memory after, beside that of a fresh server",
        f"{after.memory / 2**20:.0f} MiB, {fresh.memory / 2**20:.0f} MiB",
        f"{CACHES:.0%}",
        after.memory <= CACHES * fresh.memory,
    )


def _none(name: str, count: int, most_common: str = "") -> Promise:
    return Promise(name, f"{count}{most_common}", "0", count == 0)


def _most_common(counters: object) -> tuple[int, str]:
    total: Counter[str] = sum(counters, Counter())  # type: ignore[call-overload]
    shown = "; ".join(f"{count} x {what}" for what, count in total.most_common(3))
    return total.total(), f": {shown}" if shown else ""
