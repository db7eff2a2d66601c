"""Names of tools, as clients may choose them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from tessera.app.schema.fields import wrong

MAX_TOOL_NAME = 128
MAX_TOOL_DESCRIPTION = 65536

TOOL_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME}}}")


def _tool_name(name: str) -> str:
    if not TOOL_NAME.fullmatch(name):
        raise wrong(f"must be 1 to {MAX_TOOL_NAME} letters, digits, _ or -")
    return name


ToolName = Annotated[str, AfterValidator(_tool_name), Field(json_schema_extra={"pattern": f"^{TOOL_NAME.pattern}$"})]
