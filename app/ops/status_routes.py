"""The status page's files under /ui/, and /status.json, which it polls; the page itself is at /."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.ops.status import status_object

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).resolve().parent / "ui"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


PAGE = "/"
FILES = {
    PAGE: ("index.html", "text/html"),
    "/ui/status.css": ("status.css", "text/css"),
    "/ui/status.js": ("status.js", "text/javascript"),
    "/ui/chat.js": ("chat.js", "text/javascript"),
    "/ui/key.js": ("key.js", "text/javascript"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def page_file(path: str, root_path: str = "") -> Response:
    """One of the page's files; its links are relative to `root_path`, below which the browser sees the server."""
    name, media_type = FILES[path]
    content = _content(name)
    if path == PAGE and root_path:
        content = content.replace(b"<head>", f'<head>\n<base href="{root_path}/">'.encode(), 1)
    return Response(content, 200, HEADERS, media_type)


async def show_file(http_request: Request) -> Response:
    return page_file(http_request.scope["path"])


for path in FILES.keys() - {PAGE}:
    router.add_api_route(path, show_file, methods=["GET"])


@router.get("/status.json")
async def show_status(http_request: Request) -> Response:
    models = models_of(http_request)
    model = models.find(http_request.query_params.get("model", "")) or models.default
    response = json_response(status_object(model, models))
    response.headers["cache-control"] = "no-store"
    return response
