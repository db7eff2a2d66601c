"""Run many histories: `python -m tests.simulation --seeds 100000 --first 0`, or show one: `--show SEED`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.simulation.history import History

REPORT_EVERY = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, metavar="SEED", help="print every event of this history")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    given = parser.parse_args()
    logging.getLogger("tessera").setLevel(logging.CRITICAL + 1)
    if given.show is not None:
        History(given.show, tell=print).run()
        return 0
    failed: list[int] = []
    num_histories = num_events = 0
    for seed in range(given.first, given.first + given.seeds):
        history = History(seed)
        try:
            history.run()
        except Exception as error:
            traceback.print_exc()
            print(f"seed {seed} fails: {error!r}; see --show {seed}", flush=True)
            failed.append(seed)
        num_histories += 1
        num_events += history.num_events
        if num_histories % REPORT_EVERY == 0:
            print(progress(num_histories, num_events), flush=True)
        if len(failed) >= given.failures:
            break
    print(progress(num_histories, num_events))
    print(f"failed: {', '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


def progress(num_histories: int, num_events: int) -> str:
    seconds = time.process_time()
    rate = num_histories / seconds
    return f"{num_histories} histories with {num_events} events in {seconds:.0f} s of CPU, {rate:.0f} a second"


if __name__ == "__main__":
    sys.exit(main())
