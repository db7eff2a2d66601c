"""Token ids in the form that the engine takes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tessera.engine.contract.messages import TokenIds


def token_ids(ids: Iterable[int]) -> TokenIds:
    return array("i", ids)
