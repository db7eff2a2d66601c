"""Lists in pages, as OpenAI's endpoints have them: `limit`, `order` and `after` in the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """At most `limit` objects after the one with the id `after`."""

    limit: int
    ascending: bool
    after: str | None


def page_parameters(default_order: str = "desc") -> Mapping[str, Mapping[str, Any]]:
    """The query parameters, for /openapi.json."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "order": {"type": "string", "enum": list(ORDERS), "default": default_order},
        "after": {"type": "string", "maxLength": MAX_NAME, "description": "The id of the object before the first."},
    }


def read_page_query(query: Mapping[str, str], default_order: str = "desc") -> PageQuery:
    """Raises InvalidRequestError for a parameter that is wrong."""
    order = query.get("order", default_order)
    if order not in ORDERS:
        raise InvalidRequestError(f"order must be one of {', '.join(ORDERS)}.", param="order")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequestError(f"limit must be an integer from 1 to {MAX_LIMIT}.", param="limit")
    return PageQuery(int(limit), order == "asc", query.get("after"))


def unknown_after(kind: str) -> InvalidRequestError:
    return InvalidRequestError(f"after must be the id of one of the {kind}.", param="after")


def page_of(objects: Sequence[dict[str, Any]], page: PageQuery, kind: str) -> dict[str, Any]:
    """One page of a whole list in ascending order. Raises InvalidRequestError where it has no object `after`."""
    ordered = list(objects) if page.ascending else list(objects)[::-1]
    start = 0
    if page.after is not None:
        start = next((place for place, each in enumerate(ordered, 1) if each["id"] == page.after), 0)
        if not start:
            raise unknown_after(kind)
    data = ordered[start : start + page.limit]
    return page_object(data, has_more=start + len(data) < len(ordered))


def page_object(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
