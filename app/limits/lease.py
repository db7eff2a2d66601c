"""One request's hold on the limits of its key."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tessera.app.keys.api_key import ApiKey
from tessera.app.limits.key_use import Cell, KeyUse, Rate, duration
from tessera.engine.contract.errors import QueueFullError

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{name}-{unit}" for name in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)


class RateLimitError(QueueFullError):
    """A limit of the request's key."""

    code = "rate_limit_exceeded"


class Lease:
    """A request's places until `end`: one among its key's requests, and those of its sequences."""

    def __init__(self, key: ApiKey, use: KeyUse) -> None:
        self._key = key
        self._use = use
        self._is_held = False

    def begin(self) -> None:
        """Take the request's place.

        Raises:
            RateLimitError: too many requests are under way, or were in the last minute, or used too many tokens.
        """
        key, use = self._key, self._use
        if key.max_requests is not None and use.total(key.slot, Cell.REQUESTS_UNDER_WAY) >= key.max_requests:
            raise self._refusal(f"{key.max_requests} requests at a time", 1.0)
        for rate, most, unit in self._rates():
            if use.in_last_minute(key.slot, rate) + 1 > most:
                raise self._refusal(f"{most} {unit} a minute", use.seconds_until(key.slot, rate, most - 1))
        use.count(key.slot, Cell.REQUESTS_UNDER_WAY)
        use.count(key.slot, Cell.NUM_REQUESTS)
        use.count_rate(key.slot, Rate.REQUESTS, 1)
        self._is_held = True

    def hold_sequences(self, num_sequences: int, num_prompt_tokens: int) -> SequenceHold:
        """Places for the request's sequences.

        Raises:
            RateLimitError: too many of the key's are under way, or the prompts are too long for what is left of the
                minute.
        """
        key, use = self._key, self._use
        most = key.max_sequences
        if most is not None and use.total(key.slot, Cell.SEQUENCES_UNDER_WAY) + num_sequences > most:
            raise self._refusal(f"{most} sequences at a time", 1.0)
        self.count_prompt(num_prompt_tokens)
        use.count(key.slot, Cell.SEQUENCES_UNDER_WAY, num_sequences)
        return SequenceHold(key.slot, use, num_sequences)

    def count_prompt(self, num_tokens: int) -> None:
        """Charge the tokens of prompts, or of inputs to embed. Raises RateLimitError as `hold_sequences` does."""
        key, use = self._key, self._use
        most = key.tokens_per_minute
        if most is not None and use.in_last_minute(key.slot, Rate.TOKENS) + num_tokens > most:
            seconds = use.seconds_until(key.slot, Rate.TOKENS, most - num_tokens)
            raise self._refusal(f"{most} tokens a minute, and this request has {num_tokens}", seconds)
        use.count_rate(key.slot, Rate.TOKENS, num_tokens)
        use.count(key.slot, Cell.NUM_PROMPT_TOKENS, num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The rest of the limits, in OpenAI's headers."""
        found = []
        for rate, most, unit in self._rates():
            left = max(math.floor(most - self._use.in_last_minute(self._key.slot, rate)), 0)
            reset = duration(self._use.seconds_until(self._key.slot, rate, 0.0))
            values = (("limit", str(most)), ("remaining", str(left)), ("reset", reset))
            found += [(f"x-ratelimit-{name}-{unit}".encode(), value.encode()) for name, value in values]
        return found

    def end(self) -> None:
        """Give the request's place back."""
        if self._is_held:
            self._is_held = False
            self._use.count(self._key.slot, Cell.REQUESTS_UNDER_WAY, -1)

    def _rates(self) -> Iterator[tuple[Rate, int, str]]:
        if self._key.requests_per_minute is not None:
            yield Rate.REQUESTS, self._key.requests_per_minute, "requests"
        if self._key.tokens_per_minute is not None:
            yield Rate.TOKENS, self._key.tokens_per_minute, "tokens"

    def _refusal(self, limit: str, seconds: float) -> RateLimitError:
        self._use.count(self._key.slot, Cell.NUM_REFUSED)
        return RateLimitError(
            f"The key {self._key.name} may have {limit}; please try again later.",
            retry_after=max(math.ceil(seconds), 1),
        )


class SequenceHold:
    """Places of one request's sequences, given back at its end or, at the latest, when it is forgotten."""

    def __init__(self, slot: int, use: KeyUse, num_sequences: int) -> None:
        self._slot = slot
        self._use = use
        self._num_sequences = num_sequences

    def release(self, num_generated_tokens: int) -> None:
        """Give the places back and charge what was generated; only the first call counts."""
        if not self._num_sequences:
            return
        self._use.count(self._slot, Cell.SEQUENCES_UNDER_WAY, -self._num_sequences)
        self._num_sequences = 0
        self._use.count_rate(self._slot, Rate.TOKENS, num_generated_tokens)
        self._use.count(self._slot, Cell.NUM_GENERATED_TOKENS, num_generated_tokens)

    def __del__(self) -> None:
        self.release(0)
