"""What a user of the load test can mend."""

from __future__ import annotations


class UsageError(ValueError):
    """Options or files that cannot be used; the message says which and what would do."""
