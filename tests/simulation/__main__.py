"""Run many histories: `python -m tests.simulation --seeds 100000 --first 0`, or show one: `--show SEED`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from tests.simulation.history import History

REPORT_EVERY = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, metavar="SEED", help="print every event of this history")
    parser.add_argument("--drafts", action="store_true", help="draft tokens in every history, not in a third of them")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    given = parser.parse_args()
    logging.getLogger("tessera").setLevel(logging.CRITICAL + 1)
    if given.show is not None:
        History(given.show, tell=print, drafts=given.drafts).run()
        return 0
    failed: list[int] = []
    num_histories = num_events = 0
    drafts: Counter[tuple[str, str]] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        history = History(seed, drafts=given.drafts)
        try:
            history.run()
        except Exception as error:
            traceback.print_exc()
            print(f"seed {seed} fails: {error!r}; see --show {seed}{' --drafts' * given.drafts}", flush=True)
            failed.append(seed)
        num_histories += 1
        num_events += history.num_events
        drafts.update(history.count_drafts())
        if num_histories % REPORT_EVERY == 0:
            print(progress(num_histories, num_events), flush=True)
        if len(failed) >= given.failures:
            break
    print(progress(num_histories, num_events))
    for source in sorted({source for source, _ in drafts}):
        print(
            f"drafts by {source}: {drafts[source, 'accepted']} tokens accepted, {drafts[source, 'rejected']} rejected"
        )
    print(f"failed: {', '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


def progress(num_histories: int, num_events: int) -> str:
    seconds = time.process_time()
    rate = num_histories / seconds
    return f"{num_histories} histories with {num_events} events in {seconds:.0f} s of CPU, {rate:.0f} a second"


if __name__ == "__main__":
    sys.exit(main())
