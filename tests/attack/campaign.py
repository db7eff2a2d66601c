"""One campaign: the parts of an attack one after the other, canaries beside them, accounts before and after."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.attack import amplification, disconnects, faults, fuzz, overload, raw_http
from tests.attack.attackers import SPREAD, started
from tests.attack.canaries import Canaries
from tests.attack.context import Attack
from tests.attack.findings import Findings
from tests.attack.kv_cache import fill_kv_cache
from tests.attack.niceness import giving_way
from tests.attack.target import ENGINE, TRACEBACK, Target
from tests.attack.wire import NoAnswerError

PARTS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "fuzz": fuzz.run,
    "raw": raw_http.run,
    "amplification": amplification.run,
    "disconnects": disconnects.run,
    "overload": overload.run,
    "faults": faults.run,
}
SHARES = {"fuzz": 0.69, "raw": 0.2, "amplification": 0.02, "disconnects": 0.05, "overload": 0.03, "faults": 0.01}
MOST = {"amplification": 3000, "faults": 300}  # requests; each of these costs as much as hundreds of the others
TIME_WEIGHTS = {"fuzz": 14, "raw": 4, "amplification": 1, "disconnects": 3, "overload": 1, "faults": 1}
FILLING = {"fuzz", "raw"}  # caches of words, templates and grammars
LATEST = 300.0  # seconds beyond its time after which a part is given up


@dataclass(frozen=True)
class Plan:
    """What a campaign does; `seconds` is for all parts together."""

    parts: Sequence[str]
    num_requests: int
    seconds: float
    seed: int
    num_warm_up: int = 300  # of each part; ten times as many where they fill caches that have a bound
    niceness: int = 0  # of the attack's process beside the server's, whose cores clients elsewhere would not take
    num_processes: int = 1  # that attack; canaries have one of their own
    quiet_seconds: float = 60.0  # most that the server may take to become quiet


async def run(target: Target, model: str, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Findings:
    """Attack a running server. Raises NoAnswerError where it does not serve before the attack."""
    async with contextlib.AsyncExitStack() as attackers:
        return await _run(target, model, plan, tell, attackers)


async def _run(
    target: Target, model: str, plan: Plan, tell: Callable[[str], None], attackers: contextlib.AsyncExitStack
) -> Findings:
    findings = Findings()
    canaries = Canaries(target.wire, model, target.admin_port)
    canaries.on_late = lambda line: tell(f"{datetime.now(UTC):%H:%M:%S} {line}")
    await canaries.learn()
    findings.quiet = canaries.quiet
    answer = await target.wire.get("/openapi.json", key="sk-attacker")
    document = json.loads(answer.body)

    def attack(part: str, num_requests: int, seconds: float) -> Attack:
        rng = random.Random(f"{plan.seed} {part}")
        end = time.monotonic() + seconds
        return Attack(target, findings, canaries, document, model, rng, num_requests, end)

    num_stalls = len(target.stalls())  # while it started
    await fill_kv_cache(target, model, random.Random(plan.seed))
    findings.fresh = await target.usage(0.0)
    for part in plan.parts:
        if part != "faults":
            count = plan.num_warm_up * (10 if part in FILLING else 1)
            await PARTS[part](attack(f"{part} warm-up", count, plan.seconds))
    findings.before = await target.usage(plan.quiet_seconds)
    tell(f"a quiet server: {findings.before}")
    await canaries.start()
    attackers.enter_context(giving_way(plan.niceness))
    flock = asyncio.create_task(canaries.watch())
    together = await attackers.enter_async_context(started(plan.num_processes)) if plan.num_processes > 1 else None
    numbers = requests_by_part(plan)
    end = time.monotonic() + plan.seconds
    for place, name in enumerate(plan.parts):
        seconds = max(end - time.monotonic(), 0.0) * TIME_WEIGHTS[name]
        one = attack(name, numbers[name], seconds / sum(TIME_WEIGHTS[part] for part in plan.parts[place:]))
        findings.parts[name] = canaries.part = one.part
        engines = set(target.children(ENGINE))
        begin = time.monotonic()
        try:
            work = together.run(one, name, plan.seed) if together is not None and name in SPREAD else PARTS[name](one)
            await asyncio.wait_for(work, plan.seconds + LATEST)
        except asyncio.TimeoutError:
            one.part.unexpected["the part has no end"] += 1
        except Exception as error:  # what has been found is shown all the same
            traceback.print_exc()
            one.part.unexpected[f"the part ended with {error!r}"] += 1
        one.part.seconds = time.monotonic() - begin
        findings.engine_exits += max(len(engines - set(target.children(ENGINE))) - one.own_kills, 0)
        for number in range(canaries.num_kinds):
            await canaries.send_one(number)
        tell(f"{datetime.now(UTC):%H:%M:%S} {name}: {one.part.requests} requests in {one.part.seconds:.0f} s")
        if not target.is_alive():
            break
    canaries.stop()
    await flock
    findings.slowest_admin = canaries.slowest_admin
    findings.server_exits += not target.is_alive()
    if target.is_alive():
        with contextlib.suppress(NoAnswerError, OSError):
            findings.after = await target.usage(plan.quiet_seconds)
    findings.stalls = target.stalls()[num_stalls:]
    findings.tracebacks = target.log().count(TRACEBACK)
    return findings


def requests_by_part(plan: Plan) -> dict[str, int]:
    """As the shares have it; what a part may not have of its share goes to the others."""
    total = sum(SHARES[name] for name in plan.parts)
    numbers = {name: max(1, int(SHARES[name] / total * plan.num_requests)) for name in plan.parts}
    numbers |= {name: min(numbers[name], most) for name, most in MOST.items() if name in numbers}
    others = [name for name in plan.parts if name not in MOST]
    rest = plan.num_requests - sum(numbers[name] for name in plan.parts if name in MOST)
    total = sum(SHARES[name] for name in others)
    return numbers | {name: max(1, round(SHARES[name] / total * rest)) for name in others}
