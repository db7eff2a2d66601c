"""The keys that are accepted at the moment, found by their digests."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from tessera.app.keys.api_key import AcceptedKeys, ApiKey
from tessera.engine.contract.messages import AccountRef


class KeyHolder(msgspec.Struct, frozen=True):
    """The holder of a key that a request bears.

    Attributes:
        name: in logs and metrics.
        tenant: separates stored responses and prefix caches of different holders.
        key: the entry of the keys file; None for a plain key, which has no limits and may administer.
        account: what the engine charges.
    """

    name: str
    tenant: str
    key: ApiKey | None
    account: AccountRef


class KeyRing:
    """Keys are compared as SHA-256 digests, each in constant time."""

    def __init__(self, keys: AcceptedKeys) -> None:
        self.replace(keys)

    def replace(self, keys: AcceptedKeys) -> None:
        """Accept these from now on; requests under way go on."""
        assert keys, "no keys would leave every route open"
        holders: list[tuple[bytes, KeyHolder]] = []
        for number, plain in enumerate(keys.plain, 1):
            digest = hashlib.sha256(plain.encode()).digest()
            tenant = hashlib.sha256(b"tenant" + digest).hexdigest()
            holders.append((digest, KeyHolder(f"key-{number}", tenant, None, account_of_owner(tenant))))
        for key in keys.named:
            tenant = tenant_of_name(key.name)
            holder = KeyHolder(key.name, tenant, key, account_of_owner(tenant, key))
            holders += [(bytes.fromhex(digest), holder) for digest in key.sha256]
        self._holders = tuple(holders)
        self.named = keys.named

    def find(self, given: bytes) -> KeyHolder | None:
        """The holder of a key. Every digest is compared, whichever is the right one."""
        digest = hashlib.sha256(given).digest()
        found = None
        for accepted, holder in self._holders:
            if hmac.compare_digest(digest, accepted):
                found = holder
        return found


def tenant_of_name(name: str) -> str:
    """The tenant of a key of the keys file, which stays as long as the name."""
    return hashlib.sha256(b"name" + name.encode()).hexdigest()


def accounts_of_name(name: str) -> list[int]:
    """Ids of the engine's accounts of a key of the keys file: that of its requests, and that of its batches."""
    tenant = tenant_of_name(name)
    return [account_of_owner(tenant).id, background_account(tenant).id]


def background_account(tenant: str) -> AccountRef:
    """The engine's account of a tenant's work in the background."""
    return account_of_owner(f"background of {tenant}")


def account_of_owner(owner: str, key: ApiKey | None = None) -> AccountRef:
    """The engine's account of a tenant or an address."""
    number = int.from_bytes(hashlib.sha256(b"account" + owner.encode()).digest()[:8], "big") >> 1
    if key is None:
        return AccountRef(number)
    return AccountRef(number, key.weight, key.max_waiting or 0, key.may_use_priority)
