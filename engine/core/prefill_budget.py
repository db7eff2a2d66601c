"""The chunked-prefill budget: how many prompt tokens may join a step of decodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# A step with a chunk of a prompt in it takes at most this many times as long as its decodes alone; a backlog that is
# small enough to be computed in one step may take longer.
MAX_SLOWDOWN = 1.75
MAX_SLOWDOWN_SMALL_BACKLOG = 2.3
SMALL_BACKLOG = 512  # tokens
MAX_SLOWDOWN_FOR_OTHERS = 2.0  # where the decodes are of an account that lags behind those with the prompts
EXTRA_PER_PROMPT = 0.5  # each further waiting prompt adds this share of what one prompt may add to a step
# Several waiting prompts add at most this time to a step, or that of so many steps of decodes if that is longer.
MAX_PREFILL_SECONDS = 0.03
MAX_PREFILL_DECODE_STEPS = 3
# Several long prompts come late by the decodes of all the steps that they are cut into, and those decodes wait for them
# in any case. So they are cut into fewer: a step may take longer, up to the time of one of them within these bounds.
LONG_PROMPT = 1024  # tokens, of those that wait on average
EXTRA_PER_LONG_PROMPT = 8.0  # as EXTRA_PER_PROMPT
# Or this much for each decoding sequence, if that is more: with many of them, one ends with every long step and its
# client sends the next prompt, so a queue that grew while steps were short never drains.
EXTRA_PER_LONG_PROMPT_AND_DECODE = 1.0
MIN_LONG_PREFILL_SECONDS, MAX_LONG_PREFILL_SECONDS = 0.05, 0.1
LONG_PREFILL_SECONDS_PER_PROMPT = 0.005  # where more prompts wait than sequences decode
MAX_DRAIN_STEPS = 32  # the whole backlog is computed within this many steps, however slow that makes them
MIN_PREFILL_TOKENS = 64  # in a step: fewer take the device as long
SATURATING_TOKENS = 512  # with this many in a step the device is busy: more are computed no faster
SATURATING_EXPERT_ROWS = 256  # likewise, of a mixture's expert on average
MIN_ROUND_DOWN = 0.9  # share of the wanted tokens down to which a step is rounded down to a full size
MAX_LAUNCH_EXCESS = 1.25  # times the wanted duration that a step may take whose kernels are launched one by one
SMOOTHING = 0.25  # weight of the newest measurement


@dataclass(frozen=True)
class DecodeReads:
    """Memory that decode steps read, as fractions of the weights' bytes.

    Attributes:
        cached_token: a token's keys and values, in layers without a sliding window.
        experts: all experts of a mixture; a step reads those that its tokens are routed to.
        experts_per_chosen: number of experts divided by how many each token is routed to.
    """

    cached_token: float = 0.0
    experts: float = 0.0
    experts_per_chosen: float = 1.0

    def of(self, num_decodes: int, num_cached: int) -> float:
        """Of one step, if routing were random."""
        unchosen = (1 - 1 / self.experts_per_chosen) ** num_decodes
        return 1 - self.experts * unchosen + self.cached_token * num_cached


class PrefillBudget:
    """Budgets prompt tokens by the measured time of past steps; without measurements nothing is limited.

    A decode step is taken to last as long as it reads memory (`reads`). So the time of many long sequences follows from
    that of a few short ones: they may have prompts beside them for seconds, during which it cannot be measured.

    `full_sizes`: ascending numbers of tokens at which a step with prompts wastes nothing. A step between two of them
    costs as much as the larger, because it is padded or the device idles, so it is rounded to one of them. Kernels of
    steps beyond the last are launched one by one: it takes as long to launch them as to compute thousands of a small
    model's tokens. With prompts, a step reads nearly all of a mixture's experts, however few tokens it has.
    """

    def __init__(self, full_sizes: Sequence[int] = (), reads: DecodeReads | None = None) -> None:
        self._full_sizes = full_sizes
        self._reads = reads or DecodeReads()
        per_chosen = self._reads.experts_per_chosen
        self._saturating_tokens = max(SATURATING_TOKENS, round(SATURATING_EXPERT_ROWS * per_chosen))
        self._weights_seconds: float | None = None  # to read all weights once
        self._seconds_per_token: float | None = None
        self._launch_seconds: float | None = None  # of a step beyond the full sizes

    def record_launch(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of `num_tokens` that the host took `seconds` to submit."""
        if self._is_launched(num_tokens):
            self._launch_seconds = smoothed(self._launch_seconds, seconds)

    def record_step(self, num_prompt_tokens: int, seconds: float, num_decodes: int = 0, num_cached: int = 0) -> None:
        """Learn from a step that took `seconds` with this many prompt tokens beside its decodes."""
        decode_seconds = self._decode_seconds(num_decodes, num_cached)
        if num_prompt_tokens == 0:
            weights_seconds = seconds / self._reads.of(num_decodes, num_cached)
            self._weights_seconds = smoothed(self._weights_seconds, weights_seconds)
        elif decode_seconds is None and num_decodes == 0 and num_prompt_tokens >= self._saturating_tokens:
            self._seconds_per_token = seconds / num_prompt_tokens  # too much, until a decode step was measured
        elif decode_seconds is not None and num_prompt_tokens >= MIN_PREFILL_TOKENS:
            is_launched = self._is_launched(num_prompt_tokens + num_decodes)
            if is_launched and num_prompt_tokens < self._tokens_while_launching(decode_seconds):
                return  # the device waited for the host
            extra = max(seconds - decode_seconds, 0.0) / num_prompt_tokens
            self._seconds_per_token = smoothed(self._seconds_per_token, extra)

    def _decode_seconds(self, num_decodes: int, num_cached: int) -> float | None:
        """Estimate for a decode step; None before the first was measured."""
        if self._weights_seconds is None:
            return None
        return self._weights_seconds * self._reads.of(num_decodes, num_cached)

    def _is_launched(self, num_tokens: float) -> bool:
        """Whether the kernels of a step of so many tokens are launched one by one."""
        return bool(self._full_sizes) and num_tokens > self._full_sizes[-1]

    def _tokens_while_launching(self, decode_seconds: float | None) -> float:
        """Prompt tokens that the device computes beside decodes while the host launches a step's kernels."""
        if self._launch_seconds is None or decode_seconds is None or not self._seconds_per_token:
            return 0.0
        return max(self._launch_seconds - decode_seconds, 0.0) / self._seconds_per_token

    def tokens_beside_decodes(
        self,
        backlog: int,
        most: int,
        num_decodes: int = 0,
        num_prompts: int = 1,
        prompt_len: float = 0.0,
        num_cached: int = 0,
    ) -> int:
        """Prompt tokens, at most `most`, for a step of `num_decodes` decodes with `num_cached` cached tokens.

        Prompts wait with `backlog` tokens together, each with `prompt_len` on average, and `num_prompts` of them may
        run; the more wait, the longer a step may take.
        """
        decode_seconds = self._decode_seconds(num_decodes, num_cached)
        if decode_seconds is None or not self._seconds_per_token:
            return most
        slowdown = MAX_SLOWDOWN_SMALL_BACKLOG if backlog <= SMALL_BACKLOG else MAX_SLOWDOWN
        of_one = (slowdown - 1) * decode_seconds / self._seconds_per_token
        limit = self._tokens_in_max_seconds(self._seconds_per_token, decode_seconds)
        of_all = min(of_one * (1 + EXTRA_PER_PROMPT * (num_prompts - 1)), limit)
        if num_prompts > 1 and prompt_len >= LONG_PROMPT:
            least = MIN_LONG_PREFILL_SECONDS / self._seconds_per_token
            long_limit = max(min(MAX_LONG_PREFILL_SECONDS / self._seconds_per_token, prompt_len), least)
            extra = max(EXTRA_PER_LONG_PROMPT, EXTRA_PER_LONG_PROMPT_AND_DECODE * num_decodes)
            of_all = max(of_all, min(of_one * (1 + extra * (num_prompts - 1)), long_limit))
        wanted = max(of_one, of_all, MIN_PREFILL_TOKENS, backlog // MAX_DRAIN_STEPS)
        return self._rounded(wanted, most, num_decodes, decode_seconds)

    def tokens_for_many_prompts(
        self, most: int, num_decodes: int = 0, num_prompts: int = 1, prompt_len: float = 0.0, num_cached: int = 0
    ) -> int:
        """Prompt tokens, at most `most`, for a step where more prompts wait than sequences decode.

        Limited so that the first prompts get their first token before the last are computed. Of all in n steps the mean
        one comes after (n + 1) / 2 of them, and each step takes the time of one of decodes besides. That is least with
        steps of the geometric mean of the two times; none is shorter than a prompt. `num_prompts` and `prompt_len` as
        in `tokens_beside_decodes`.
        """
        if not self._seconds_per_token:
            return most
        decode_seconds = self._decode_seconds(num_decodes, num_cached)
        limit = self._tokens_in_max_seconds(self._seconds_per_token, decode_seconds)
        if num_prompts > 1 and decode_seconds is not None:
            soonest = self._soonest(num_prompts * prompt_len, decode_seconds, self._seconds_per_token)
            limit = min(limit, max(soonest, prompt_len, self._saturating_tokens))
        if num_prompts > 1 and prompt_len >= LONG_PROMPT:
            seconds = min(MAX_LONG_PREFILL_SECONDS, LONG_PREFILL_SECONDS_PER_PROMPT * num_prompts)
            limit = max(limit, min(seconds / self._seconds_per_token, prompt_len))
        return self._rounded(limit, most, num_decodes, decode_seconds)

    def tokens_beside_lagging(self, most: int, num_decodes: int = 0, num_cached: int = 0) -> int:
        """Prompt tokens, at most `most`, beside decodes of an account that was served less than those with the prompts.

        Half of the time is left to the decodes: their account has no part in the long steps.
        """
        decode_seconds = self._decode_seconds(num_decodes, num_cached)
        if decode_seconds is None or not self._seconds_per_token:
            return most
        wanted = (MAX_SLOWDOWN_FOR_OTHERS - 1) * decode_seconds / self._seconds_per_token
        return self._rounded(max(wanted, MIN_PREFILL_TOKENS), most, num_decodes, decode_seconds)

    def _soonest(self, num_tokens: float, decode_seconds: float, seconds_per_token: float) -> float:
        """Tokens of a step by which prompts with `num_tokens` together get the mean first token soonest."""
        mean = math.sqrt(num_tokens * decode_seconds / seconds_per_token)
        while_launching = self._tokens_while_launching(decode_seconds)
        if not self._is_launched(mean) or mean >= while_launching:
            return mean

        def mean_seconds(size: float) -> float:
            seconds = decode_seconds + size * seconds_per_token
            return (math.ceil(num_tokens / size) + 1) / 2 * seconds

        return min(self._full_sizes[-1], while_launching, key=mean_seconds)

    def _beyond_full_sizes(self, tokens: int, most: int, num_decodes: int, decode_seconds: float | None) -> int:
        """Nothing in between is computed sooner than what the device computes while the host launches the kernels."""
        hidden = int(self._tokens_while_launching(decode_seconds))
        if tokens >= hidden or decode_seconds is None or self._launch_seconds is None:
            return tokens
        wanted_seconds = decode_seconds + tokens * (self._seconds_per_token or 0.0)
        if self._launch_seconds <= MAX_LAUNCH_EXCESS * wanted_seconds:
            return min(hidden, most)
        return min(max(self._full_sizes[-1] - num_decodes, 1), tokens)

    def _tokens_in_max_seconds(self, seconds_per_token: float, decode_seconds: float | None) -> float:
        seconds = max(MAX_PREFILL_SECONDS, MAX_PREFILL_DECODE_STEPS * (decode_seconds or 0.0))
        return max(seconds / seconds_per_token, self._saturating_tokens)

    def _rounded(self, wanted: float, most: int, num_decodes: int, decode_seconds: float | None) -> int:
        """`wanted` tokens rounded down or up to a full size of the step, at most `most`."""
        tokens, sizes = int(min(wanted, most)), self._full_sizes
        above = bisect_left(sizes, tokens + num_decodes)
        if above == len(sizes):
            return self._beyond_full_sizes(tokens, most, num_decodes, decode_seconds)
        fewer = sizes[above - 1] - num_decodes if above else 0
        return fewer if fewer >= MIN_ROUND_DOWN * tokens else min(sizes[above] - num_decodes, most)


def smoothed(known: float | None, newest: float) -> float:
    """A moving average; `known` is None before the first measurement."""
    return newest if known is None else known + SMOOTHING * (newest - known)
