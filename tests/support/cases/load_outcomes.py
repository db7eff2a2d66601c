"""Outcomes of load tests made from known times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tessera.loadtest.client.records import UNKNOWN, Recorder, Records
from tessera.loadtest.run.load_run import Outcome

NUM_INPUT_TOKENS = 10


def outcome(
    *requests: tuple[float, list[float], int, str | None],
    cpu_share: float = 0.1,
    cached: int = UNKNOWN,
    due: Sequence[float] = (),
) -> Outcome:
    """Of requests (start, token times, output tokens, error), split over two client processes."""
    recorders = (Recorder(), Recorder())
    for index, (start, times, tokens, error) in enumerate(requests):
        end = (times[-1] if times else start) + 0.001  # a token's time counts, not when the stream closed
        recorders[index % 2].record_request(
            start, end, array("d", times), NUM_INPUT_TOKENS, tokens, error, "words", cached
        )
    records = Records.merge([recorder.pack() for recorder in recorders])
    return Outcome(records, 100.0, [0.05, cpu_share], False, list(due))
