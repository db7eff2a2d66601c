"""Compare routing policies: `python -m tests.simulation.routing`; with `--write` the figures go to docs/figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace

from tests.simulation.routing.fleet import Fleet, History
from tests.simulation.routing.workload import Shape
from tests.support.paths import ROOT

POLICIES = ("round robin", "least loaded", "prefix alone", "prefix and load")
FIGURES = ROOT / "docs" / "figures" / "routing.json"
CONVERSATIONS_PER_REPLICA = 0.3  # that begin a second
LEAST_SHARE = 0.9  # of the ideal hits


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.routing", description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=200.0, help="of virtual time")
    parser.add_argument("--load", type=float, default=CONVERSATIONS_PER_REPLICA, help="conversations a second, each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--write", action="store_true", help=f"write {FIGURES.relative_to(ROOT)}")
    given = parser.parse_args()
    shape = replace(Shape(), rate=given.load * given.replicas, duration=given.seconds)
    fleet = Fleet(given.replicas, failures=given.replicas // 20, rack=given.replicas // 50)
    rows = {}
    for policy in given.policy or POLICIES:
        begin = time.process_time()
        found = rows[policy] = {
            name: round(n, 5) for name, n in History(policy, shape, fleet, given.seed).run().items()
        }
        print(f"{policy:16}{found}  in {time.process_time() - begin:.0f} s of CPU", flush=True)
    if given.write:
        facts = {"seed": given.seed, "shape": asdict(shape), "fleet": asdict(fleet), "policies": rows}
        FIGURES.write_text(json.dumps(facts, indent=2) + "\n")
    ours = rows.get("prefix and load")
    return int(ours is not None and ours["share_of_ideal"] < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
