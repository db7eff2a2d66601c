"""Pages of OpenAI's lists: their query parameters, and the list object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class PageParameters:
    """Declares and reads `limit`, `order` and `after` of one list, by default the newest first."""

    max_limit: int = 100
    default_limit: int = 20
    default_order: Literal["asc", "desc"] = "desc"

    @property
    def query(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of the parameters."""
        order = {"type": "string", "enum": list(ORDERS), "default": self.default_order, "description": "Of creation."}
        return {
            "limit": {"type": "integer", "minimum": 1, "maximum": self.max_limit, "default": self.default_limit},
            "order": order,
            "after": {"type": "string", "maxLength": MAX_NAME, "description": "The id of the object before the first."},
        }

    def read(self, query: Mapping[str, str]) -> PageRequest:
        """Raises InvalidRequestError for a wrong parameter."""
        order = query.get("order", self.default_order)
        if order not in ORDERS:
            raise InvalidRequestError(f"order must be one of {', '.join(ORDERS)}.", param="order")
        limit = query.get("limit", str(self.default_limit))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= self.max_limit):
            raise InvalidRequestError(f"limit must be an integer from 1 to {self.max_limit}.", param="limit")
        return PageRequest(int(limit), order == "asc", query.get("after"))


@dataclass(frozen=True, slots=True)
class PageRequest:
    """At most `limit` objects after the one with the id `after`."""

    limit: int
    ascending: bool
    after: str | None


def unknown_after(kind: str) -> InvalidRequestError:
    return InvalidRequestError(f"after must be the id of one of the {kind}.", param="after")


def page_of(objects: Sequence[dict[str, Any]], page: PageRequest, kind: str) -> dict[str, Any]:
    """One page of a whole list in ascending order. Raises InvalidRequestError where it has no object `after`."""
    ordered = list(objects) if page.ascending else list(objects)[::-1]
    start = 0
    if page.after is not None:
        start = next((place for place, each in enumerate(ordered, 1) if each["id"] == page.after), 0)
        if not start:
            raise unknown_after(kind)
    data = ordered[start : start + page.limit]
    return list_object(data, has_more=start + len(data) < len(ordered))


def list_object(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
