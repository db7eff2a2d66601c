"""Pages of OpenAI's lists: their query parameters, and the list object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class PageParameters:
    """Declares and reads `limit`, `order` and `after` of one list, whose default order is the newest first."""

    max_limit: int = 100
    default_limit: int = 20

    @property
    def query(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of the parameters."""
        return {
            "limit": {"type": "integer", "minimum": 1, "maximum": self.max_limit, "default": self.default_limit},
            "order": {"type": "string", "enum": list(ORDERS), "default": "desc", "description": "Of creation."},
            "after": {"type": "string", "maxLength": MAX_NAME, "description": "The id of the object before the first."},
        }

    def read(self, query: Mapping[str, str]) -> PageRequest:
        """Raises InvalidRequestError for a wrong parameter."""
        order = query.get("order", "desc")
        if order not in ORDERS:
            raise InvalidRequestError(f"order must be one of {', '.join(ORDERS)}.", param="order")
        limit = query.get("limit", str(self.default_limit))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= self.max_limit):
            raise InvalidRequestError(f"limit must be an integer from 1 to {self.max_limit}.", param="limit")
        return PageRequest(int(limit), order == "asc", query.get("after"))


@dataclass(frozen=True, slots=True)
class PageRequest:
    limit: int
    ascending: bool
    after: str | None


def list_object(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
