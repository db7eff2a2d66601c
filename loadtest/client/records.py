"""Results of requests as columns, cheap to send between processes and to count."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

INTEGERS = ("input_tokens", "output_tokens", "cached_tokens", "num_times", "error")
UNKNOWN = -1  # cached tokens of a server that does not tell


class Recorder:
    """Collects the requests of one client process."""

    def __init__(self) -> None:
        self._floats = {name: array("d") for name in ("start", "end", "token_times")}
        self._integers = {name: array("q") for name in INTEGERS}
        self._kinds: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def record_request(
        self,
        start: float,
        end: float,
        token_times: array[float],
        input_tokens: int,
        output_tokens: int,
        error: str | None = None,
        message: str = "",
        cached_tokens: int = UNKNOWN,
    ) -> None:
        """Add one request.

        Times are `time.perf_counter()` seconds, one clock for all processes; `error` is the kind of failure and
        `message` its text.
        """
        self._floats["start"].append(start)
        self._floats["end"].append(end)
        self._floats["token_times"].extend(token_times)
        self._integers["input_tokens"].append(input_tokens)
        self._integers["output_tokens"].append(output_tokens)
        self._integers["cached_tokens"].append(cached_tokens)
        self._integers["num_times"].append(len(token_times))
        self._integers["error"].append(-1 if error is None else self._kinds.setdefault(error, len(self._kinds)))
        if error is not None:
            self._examples.setdefault(error, message)

    def pack(self) -> Columns:
        columns = {name: values.tobytes() for name, values in self._floats.items()}
        columns |= {name: values.tobytes() for name, values in self._integers.items()}
        return Columns(columns, list(self._kinds), self._examples)


class Columns(msgspec.Struct):
    """A Recorder's content as a message: raw float64 and int64 columns, and the names of error kinds by number."""

    columns: dict[str, bytes]
    kinds: list[str]
    examples: dict[str, str]


@dataclass
class Records:
    """The requests of all client processes, in the order in which they were sent.

    Attributes:
        start, end: [requests] seconds; `end` is when the last token came, or else the whole completion or the failure.
        first: [requests] when the first token came; NaN where none did or the completion was not streamed.
        input_tokens, output_tokens: [requests].
        cached_tokens: [requests] of the prompts, as the server says; UNKNOWN where it does not.
        ok: [requests] bool.
        token_times: [tokens] arrivals, request by request.
        num_times: [requests] how many of `token_times` belong to each.
        errors: count of each kind of failure.
        examples: message of the first failure of each kind.
    """

    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    first: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    ok: npt.NDArray[np.bool_]
    token_times: npt.NDArray[np.float64]
    num_times: npt.NDArray[np.int64]
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: list[Columns]) -> Records:
        """One table from the columns of all processes."""
        start, end, times = (_floats(parts, name) for name in ("start", "end", "token_times"))
        input_tokens, output_tokens, cached_tokens, num_times, error = (_integers(parts, name) for name in INTEGERS)
        errors: dict[str, int] = {}
        examples: dict[str, str] = {}
        for part in parts:
            counts = np.bincount(np.frombuffer(part.columns["error"], np.int64) + 1, minlength=len(part.kinds) + 1)
            for kind, count in zip(part.kinds, counts[1:].tolist(), strict=True):
                errors[kind] = errors.get(kind, 0) + count
            examples = part.examples | examples
        bounds = np.concatenate(([0], np.cumsum(num_times)))
        first = np.full(len(start), np.nan)
        some = num_times > 0
        first[some] = times[bounds[:-1][some]]
        end[some & (error < 0)] = times[bounds[1:][some & (error < 0)] - 1]
        order = np.argsort(start, kind="stable")
        pieces = [times[bounds[i] : bounds[i + 1]] for i in order]
        return cls(
            start[order],
            end[order],
            first[order],
            input_tokens[order],
            output_tokens[order],
            cached_tokens[order],
            error[order] < 0,
            np.concatenate(pieces) if pieces else times,
            num_times[order],
            dict(sorted(errors.items(), key=lambda item: -item[1])),
            examples,
        )

    def gaps(self) -> npt.NDArray[np.float64]:
        """[gaps] seconds between neighbouring tokens of one completion, of successful requests."""
        return np.asarray(np.diff(self.token_times)[self._within()])

    def gap_ends(self) -> npt.NDArray[np.float64]:
        """[gaps] when each of `gaps` ended."""
        return self.token_times[1:][self._within()]

    def _within(self) -> npt.NDArray[np.bool_]:
        """[tokens - 1] whether a token and the next one belong to one successful completion."""
        request = np.repeat(np.arange(len(self.start)), self.num_times)
        return np.asarray((request[1:] == request[:-1]) & self.ok[request[1:]])


def _floats(parts: list[Columns], name: str) -> npt.NDArray[np.float64]:
    return np.concatenate([np.frombuffer(part.columns[name], np.float64) for part in parts])


def _integers(parts: list[Columns], name: str) -> npt.NDArray[np.int64]:
    return np.concatenate([np.frombuffer(part.columns[name], np.int64) for part in parts])
