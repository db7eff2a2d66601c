"""The page's files: those of the folder `ui`, which are all that a browser needs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).resolve().parent / "ui"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "/"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _files() -> dict[str, Path]:
    """Each file by its path in URLs."""
    found = sorted(path for path in FOLDER.rglob("*") if path.suffix in MEDIA_TYPES and path.name != "index.html")
    return {PAGE: FOLDER / "index.html", **{f"/ui/{path.relative_to(FOLDER).as_posix()}": path for path in found}}


FILES = _files()
PAGE_PATHS = frozenset(FILES)


@cache
def _content(path: str) -> tuple[bytes, str]:
    """A file's bytes and its ETag. The page names all modules, so that browsers fetch them at once."""
    content = FILES[path].read_bytes()
    if path == PAGE:
        modules = sorted(name[1:] for name in FILES if name.endswith(".js"))
        links = "".join(f'<link rel="modulepreload" href="{name}">\n' for name in modules)
        content = content.replace(b"</head>", links.encode() + b"</head>")
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def page_file(path: str, known_tag: str | None = None, root_path: str = "") -> Response:
    """One of the page's files, or 304 where the browser has the one with this ETag.

    The page's links are relative to `root_path`, below which the browser sees the server.
    """
    content, tag = _content(path)
    if path == PAGE and root_path:
        content = content.replace(b"<head>", f'<head>\n<base href="{root_path}/">'.encode(), 1)
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**HEADERS, "etag": tag}
    if known_tag is not None and tag in known_tag:
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, MEDIA_TYPES[FILES[path].suffix])
