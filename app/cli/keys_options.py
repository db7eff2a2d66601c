"""The options of `tessera keys`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

ACTIONS = ("add", "list", "revoke")

LIMITS = "limits of the key"
RIGHTS = "rights of the key"


def _limit(about: str) -> Option:
    return Option(about, group=LIMITS, metavar="N", low=1, high=2**40, default="no limit")


class KeysOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An action on a key of a keys file."""

    action: Annotated[
        str | None,
        Option(
            "add, list or revoke: make a key, show all, or take one away",
            group="keys",
            metavar="ACTION",
            positional=True,
        ),
    ] = None
    name: Annotated[
        str | None,
        Option("name of the key's holder, for add and revoke", group="keys", metavar="NAME", positional=True),
    ] = None
    api_keys_file: Annotated[
        str,
        Option("the keys file, which add makes where there is none", group="keys", metavar="FILE"),
    ] = "keys.yaml"
    digest: Annotated[
        str | None,
        Option(
            "revoke only the key whose digest begins so, as list shows it, and keep the holder's other one",
            group="keys",
            metavar="HEX",
            default="all keys of the holder",
            pattern="[0-9a-f]{8,64}",
            form="8 to 64 hexadecimal digits",
        ),
    ] = None
    weight: Annotated[
        float | None,
        Option(
            "share of the engine relative to other keys with work waiting",
            group=LIMITS,
            metavar="WEIGHT",
            low=0.01,
            high=100,
            default="1",
        ),
    ] = None
    max_requests: Annotated[int | None, _limit("most requests under way")] = None
    max_sequences: Annotated[int | None, _limit("most sequences under way (prompts times n)")] = None
    max_waiting: Annotated[int | None, _limit("most sequences in the engine's queue")] = None
    requests_per_minute: Annotated[int | None, _limit("most requests in 60 seconds")] = None
    tokens_per_minute: Annotated[int | None, _limit("most tokens of prompts and completions in 60 seconds")] = None
    may_use_priority: Annotated[
        bool, Option("its requests' priority counts among all keys, not among its own requests alone", group=RIGHTS)
    ] = False
    may_administer: Annotated[bool, Option("it may use the routes that act on the whole server", group=RIGHTS)] = False


KEYS_OPTIONS = CommandOptions("TESSERA_KEYS_", (KeysOptions,), groups=("keys", LIMITS, RIGHTS, "configuration"))
