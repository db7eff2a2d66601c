"""Errors that the user of a command can mend."""

from __future__ import annotations


class OptionError(ValueError):
    """Options, or files they name, that cannot be used; the message names which and what is accepted."""
