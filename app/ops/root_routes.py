"""GET /: the page for browsers; for programs the words by which Ollama's clients know that a server runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tessera.app.generate.served_models import model_of
from tessera.app.http.forwarded import root_path_of
from tessera.app.ops.page_files import PAGE, page_file

router = APIRouter(include_in_schema=False)

RUNNING = "Ollama is running"
HTML = "text/html"  # in the Accept of every browser's navigation, and of no program's


@router.get("/")
async def show_root(http_request: Request) -> Response:
    if model_of(http_request).settings.ui and HTML in http_request.headers.get("accept", ""):
        root_path = root_path_of(http_request.scope)
        response = page_file(PAGE, http_request.headers.get("if-none-match"), root_path)
    else:
        response = PlainTextResponse(RUNNING)
    response.headers["vary"] = "accept"
    return response
