"""The options of `tessera completion`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

Shell = Literal["bash", "zsh", "fish"]


class CompletionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The shell to complete for."""

    shell: Annotated[
        Shell | None,
        Option("bash, zsh or fish", group="completion", metavar="SHELL", positional=True, default="as $SHELL says"),
    ] = None


COMPLETION_OPTIONS = CommandOptions(None, (CompletionOptions,), groups=("completion",))
