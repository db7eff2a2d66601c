"""Ollama's dialect: an error is its text."""

from __future__ import annotations

import re
from typing import Any

from tessera.app.http.description import ApiObject
from tessera.app.http.dialect import Dialect
from tessera.engine.contract.errors import RequestError


class OllamaErrorObject(ApiObject):
    """Any failure, in Ollama's form."""

    error: str


def ollama_error_object(error: RequestError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Dialect(re.compile(r"/api/"), ollama_error_object, OllamaErrorObject)
