"""How long steps take, and what follows for how much of a prompt may join the steps of those who decode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SLOWEST = 1.75  # times a step of decodes alone: what a step with one of several chunks of a prompt may take
ONE_PROMPT = 512  # tokens: where no more wait, they are not cut in two for the sake of a few
SLOWEST_FOR_ONE = 2.3
EACH_MORE = 0.5  # of what one prompt may add to a step, for each more that waits
DRAIN_STEPS = 32  # a longer queue of prompts is worked off in this many steps, whatever that does to the pace
FEWEST_TOKENS = 64  # of prompts in a step: fewer cost the device as much
SMOOTHING = 0.25  # weight of the newest measurement
LONGEST = 0.03  # seconds that prompts should add to a step at most where several wait for their first token
LONGEST_DECODES = 3  # or as long as so many steps of decodes
MOST_USEFUL = 512  # tokens of prompts in a step: more of them are computed no faster
FEWER = 0.9  # of the tokens that would keep the pace, where a step would else waste some


class StepPace:
    """Learns from every step. It knows nothing at first, and then bounds nothing.

    `full_sizes`: ascending numbers of tokens with which a step with prompts in it wastes nothing. A step in between
    costs about as much as the next of them, since it is padded or the device idles, so it is filled up;
    larger steps waste little.
    """

    def __init__(self, full_sizes: Sequence[int] = ()) -> None:
        self._full_sizes = full_sizes
        self._decode_seconds: float | None = None
        self._seconds_per_token: float | None = None

    def record(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step took `seconds`, with this many tokens of prompts beside its decodes."""
        if num_prompt_tokens == 0:
            self._decode_seconds = _smoothed(self._decode_seconds, seconds)
        elif self._decode_seconds is not None and num_prompt_tokens >= FEWEST_TOKENS:
            extra = max(seconds - self._decode_seconds, 0.0) / num_prompt_tokens
            self._seconds_per_token = _smoothed(self._seconds_per_token, extra)

    def prompt_tokens(self, backlog: int, most: int, num_decodes: int = 0, num_prompts: int = 1) -> int:
        """Tokens of prompts that may join a step of `num_decodes` decodes, at most `most`, when `num_prompts` wait with
        `backlog` tokens. The more wait, the more have their first token sooner by a longer step."""
        if self._decode_seconds is None or not self._seconds_per_token:
            return most
        slowest = SLOWEST_FOR_ONE if backlog <= ONE_PROMPT else SLOWEST
        kept = (slowest - 1) * self._decode_seconds / self._seconds_per_token
        several = min(kept * (1 + EACH_MORE * (num_prompts - 1)), self._most_of_many(self._seconds_per_token))
        return self._filled(max(kept, several, FEWEST_TOKENS, backlog // DRAIN_STEPS), most, num_decodes)

    def tokens_of_many(self, most: int, num_decodes: int = 0) -> int:
        """Tokens of several prompts that a step may have where more wait than decode, at most `most`: so that the
        first of them need not wait until the last are computed."""
        if not self._seconds_per_token:
            return most
        return self._filled(self._most_of_many(self._seconds_per_token), most, num_decodes)

    def _most_of_many(self, seconds_per_token: float) -> float:
        seconds = max(LONGEST, LONGEST_DECODES * (self._decode_seconds or 0.0))
        return max(seconds / seconds_per_token, MOST_USEFUL)

    def _filled(self, wanted: float, most: int, num_decodes: int) -> int:
        """About as many with which nothing is wasted, at most `most`: somewhat fewer, or more for the same time."""
        tokens, sizes = int(min(wanted, most)), self._full_sizes
        above = bisect_left(sizes, tokens + num_decodes)
        if above == len(sizes):
            return tokens
        fewer = sizes[above - 1] - num_decodes if above else 0
        return fewer if fewer >= FEWER * tokens else min(sizes[above] - num_decodes, most)


def _smoothed(known: float | None, newest: float) -> float:
    return newest if known is None else known + SMOOTHING * (newest - known)
