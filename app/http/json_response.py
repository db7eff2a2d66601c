"""JSON answers through orjson."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
