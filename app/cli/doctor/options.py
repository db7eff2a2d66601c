"""The options of `tessera doctor`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checks to make."""

    host: Annotated[str, Option("address that the server would listen on", group="checks", metavar="HOST")] = (
        "127.0.0.1"
    )
    port: Annotated[
        tuple[int, ...],
        Option(
            "port that the server would listen on; repeatable",
            group="checks",
            metavar="PORT",
            low=1,
            high=65535,
        ),
    ] = (8000,)
    network: Annotated[bool, Option("ask the model hub whether it answers", group="checks")] = True
    timeout: Annotated[
        float,
        Option(
            "most seconds for the GPU, and for the hub; a driver that hangs is broken",
            group="checks",
            metavar="SECONDS",
            low=0.1,
            high=600,
        ),
    ] = 20.0
    json: Annotated[bool, Option("print JSON, for programs", group="output")] = False


DOCTOR_OPTIONS = CommandOptions(None, (DoctorOptions,), groups=("checks", "output"))
