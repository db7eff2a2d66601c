"""The attack in its small form, on a real server; and that each of its checks can fail, on a broken one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.attack.attackers import add, read_part
from tests.attack.broken_server import FAULTS
from tests.attack.campaign import PARTS, Plan, requests_by_part, run
from tests.attack.canaries import Canaries, Sent
from tests.attack.findings import Findings, Part, promises
from tests.attack.fuzz import Fuzzer
from tests.attack.machine import withheld
from tests.attack.report import show
from tests.attack.soak import Sample, verdict, write
from tests.attack.target import Target, running, serve_command
from tests.support.paths import ROOT
from tests.support.servers.operations import HARMLESS, document_for
from tests.support.servers.server_fixture import write_tiny_model
from tests.support.servers.surface_fixtures import tool_settings

SEED = 18
STALL_LIMIT = 0.5  # seconds; a shared machine's test is not the place to look for 20 ms
# What a machine with other work on it may break: canaries are late, memory is still in use.
BY_THE_CLOCK = {"slowest canary, beside its quiet time and a step", "longest stall of its own"}
BROKEN = {
    "none": set(),
    "status": {"5xx other than 503 with Retry-After"},
    "retry-after": {"5xx other than 503 with Retry-After"},
    "canary": {"wrong canaries"},
    "refused canary": {"canaries without an answer"},
    "slow canary": {"slowest canary, beside its quiet time and a step"},
    "server exit": {"server exits"},
    "engine exit": {"engine exits"},
    "traceback": {"tracebacks in the log"},
    "models without a key": {"answers that must not be given"},
    "no answer": {"answers that must not be given"},
    "slow admin": {"slowest answer of the admin port"},
    "stall": {"longest stall of its own"},
    "blocks": {"blocks leaked"},
    "descriptors": {"descriptors leaked"},
    "processes": {"processes leaked"},
    "memory": {"memory after, beside that after the warm-up", "memory after, beside that of a fresh server"},
}


def attack(command: list[str], model: str, plan: Plan, folder: Path) -> Findings:
    with running(command, folder) as target:
        return asyncio.run(run(target, model, plan))


def broken_promises(findings: Findings) -> set[str]:
    return {promise.name for promise in promises(findings, STALL_LIMIT) if not promise.kept}


def test_every_fault_of_the_broken_server_is_tried() -> None:
    assert BROKEN.keys() == {"none", *FAULTS} == {fault for faults in TOGETHER for fault in faults}
    checked = {promise.name for promise in promises(Findings(), STALL_LIMIT)} - {"canaries", "what the server holds"}
    assert checked <= set().union(*BROKEN.values())


# Faults that can be had at once, which saves servers.
TOGETHER = (
    ("none",),
    *(
        (fault,)
        for fault in (
            "retry-after",
            "refused canary",
            "slow canary",
            "server exit",
            "no answer",
            "models without a key",
        )
    ),
    ("status", "canary", "traceback", "stall", "engine exit", "slow admin"),
    ("blocks", "descriptors", "processes", "memory"),
)


@pytest.mark.parametrize("faults", TOGETHER, ids=", ".join)
def test_the_harness_notices(faults: tuple[str, ...], tmp_path: Path) -> None:
    part, num_requests = ("raw", 30) if "models without a key" in faults else ("fuzz", 200)
    plan = Plan([part], num_requests, 0.4, SEED, num_warm_up=1, quiet_seconds=1.0)
    command = [sys.executable, "-m", "tests.attack.broken_server", ",".join(faults)]
    findings = attack(command, "m", plan, tmp_path)
    found = broken_promises(findings)
    expected = set().union(*(BROKEN[fault] for fault in faults))
    assert expected <= found
    if "server exit" not in faults:
        assert found - expected <= BY_THE_CLOCK
    assert show(findings, STALL_LIMIT, Console(quiet=True)) == (not found)


def test_several_processes_attack_together(tmp_path: Path) -> None:
    """Each part's requests are spread over them, and what each has found counts."""
    plan = Plan(["fuzz"], 201, 60.0, SEED, num_warm_up=4, quiet_seconds=1.0, num_processes=2)
    findings = attack([sys.executable, "-m", "tests.attack.broken_server", "status"], "m", plan, tmp_path)
    assert findings.requests >= 201
    assert sum(findings.parts["fuzz"].faulty.values()) > 50
    assert not findings.parts["fuzz"].unexpected
    found = Part(3, 1.0, Counter({200: 2}), faulty=Counter({"500 x": 1}), canaries=1)
    again = read_part(json.dumps(vars(found)).encode())
    assert again == found
    add(again, found)
    assert again == Part(6, 1.0, Counter({200: 4}), faulty=Counter({"500 x": 2}), canaries=2)


def test_the_attack_gives_way_and_nothing_else_does(tmp_path: Path) -> None:
    """Where sessions have a share each, the attack took half of a core beside the server, at any niceness."""

    async def sessions(target: Target) -> set[int]:
        canaries = Canaries(target.wire, "m")
        await canaries.start()
        canaries.stop()
        assert canaries._process is not None
        found = {os.getsid(pid) for pid in (0, target.process.pid, canaries._process.pid)}
        await canaries.watch()
        return found

    with running([sys.executable, "-m", "tests.attack.broken_server", "none"], tmp_path) as target:
        assert len(asyncio.run(sessions(target))) == 3

    look = "print(os.nice(0), open('/proc/self/autogroup').read().split()[-1] if autogroup else 7)"
    code = f"""if True:
        import os
        from tests.attack.niceness import giving_way
        autogroup = os.path.exists('/proc/self/autogroup')
        with giving_way(7):
            {look}
        {look}"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, start_new_session=True
    )
    within, after = done.stdout.splitlines()
    assert within.endswith(" 7")
    assert int(within.split()[0]) >= 7
    assert after.split()[0] == within.split()[0], "a process cannot take that back"
    if Path("/proc/self/autogroup").exists():
        assert after.endswith(" 0")


def test_fault_attack_a_server_keeps_its_promises(tmp_path: Path) -> None:
    """A few hundred hostile requests of three parts; `make attack` sends as many as one likes, of all parts."""
    folder = write_tiny_model(tmp_path / "tiny")
    print(f"seed {SEED}")
    command = serve_command(str(folder), tmp_path, "--log-stalls", str(STALL_LIMIT), "--num-kv-blocks", "512")
    findings = attack(command, "tiny", Plan(["fuzz", "raw", "disconnects"], 500, 60.0, SEED, num_warm_up=60), tmp_path)
    assert findings.requests >= 490
    assert findings.parts["fuzz"].statuses[200] > 10
    assert findings.parts["fuzz"].statuses[400] > 10
    assert broken_promises(findings) <= BY_THE_CLOCK | {"memory after, beside that after the warm-up"}


def test_a_soak_is_judged_by_memory_and_latency(tmp_path: Path) -> None:
    flat = [Sample(60.0 * i, "fuzz", 2**28 + i % 3, 50, 100 * i, 1.0 + i % 2 / 10, 3.0) for i in range(1, 60)]
    assert [kept for _, kept in verdict(flat)] == [True, True, True]
    grown_by: tuple[dict[str, Any], ...] = ({"memory": 2**29}, {"canary": 4.0}, {"slowest_canary": 12.0})
    for index, changes in enumerate(grown_by):
        grown = [replace(one, **changes) if one.at > 1800 else one for one in flat]
        assert [kept for _, kept in verdict(grown)] == [other != index for other in range(3)]
    write(flat, tmp_path)
    assert "<polyline" in (tmp_path / "memory.svg").read_text()
    assert len(list(tmp_path.glob("*.svg"))) == 4


def test_a_late_canary_says_what_the_machine_withheld(tmp_path: Path) -> None:
    stat, cpu_stat = tmp_path / "stat", tmp_path / "cpu.stat"
    assert withheld(stat, cpu_stat) == (0, 0)
    stat.write_text("cpu  1 2 3 4 5 6 7 25 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    cpu_stat.write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n")
    assert withheld(stat, cpu_stat) == (25 / os.sysconf("SC_CLK_TCK"), 1.5)
    late = Sent(0, 1.0, 2.0, 200, "", stolen=0.25, throttled=0.0)
    assert late.withheld == ", 250 ms stolen from the machine"
    assert Sent(0, 1.0, 2.0).withheld == ""


def test_a_million_requests_are_not_of_the_dear_parts() -> None:
    numbers = requests_by_part(Plan(list(PARTS), 10**6, 60.0, SEED))
    assert abs(sum(numbers.values()) - 10**6) < 10
    assert (numbers["amplification"], numbers["faults"]) == (3000, 300)
    assert numbers["fuzz"] > 600_000
    assert requests_by_part(Plan(["fuzz"], 200, 60.0, SEED)) == {"fuzz": 200}
    assert requests_by_part(Plan(["faults"], 200, 60.0, SEED)) == {"faults": 200}


def test_the_fuzzer_sends_the_same_for_the_same_seed_and_reaches_every_operation(tmp_path: Path) -> None:
    document = document_for(tool_settings(tmp_path))
    fuzzers = [Fuzzer(document, "tiny", random.Random(SEED)) for _ in range(2)]
    sent = [[fuzzer.request() for _ in range(400)] for fuzzer in fuzzers]
    assert sent[0] == sent[1]
    reached = {what for what, _ in sent[0]}
    assert {f"{one.method.upper()} {one.path}" for one in HARMLESS} <= reached
