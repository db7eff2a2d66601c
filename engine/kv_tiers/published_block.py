"""A published block: its contents, and where they are."""

from __future__ import annotations

import msgspec

NOWHERE = -1


class PublishedBlock(msgspec.Struct, eq=False):
    """Contents of a published block. Compared by identity: a block published again is another one.

    That makes everything behind a withdrawn block unreachable, because its parent is gone for good. One that moves
    between the tiers stays the same, and so does what is behind it.

    Attributes:
        account: id of the account that computed it.
        block: of the device; NOWHERE if it is not there.
        slot: of host memory, or NOWHERE.
        on_disk: whether a file has it.
    """

    digest: bytes
    parent: PublishedBlock | None
    token_bytes: bytes
    salt: bytes
    account: int = 0
    block: int = NOWHERE
    slot: int = NOWHERE
    on_disk: bool = False

    def holds(self, token_bytes: bytes, parent: PublishedBlock | None, salt: bytes) -> bool:
        return self.token_bytes == token_bytes and self.parent is parent and self.salt == salt
