"""MkDocs hook: adds the pages that are generated, and the images that live elsewhere in the repository."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.generate.api import api_pages
from docs.generate.options import options_page
from docs.generate.paths import ROOT
from docs.generate.rooms import rooms_page

IMAGES = {"images/icon.svg": ROOT / "app/ops/ui/icon.svg"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {f"api/{name}": content for name, content in api_pages().items()}
    pages["operating/options.md"] = options_page()
    pages["architecture/rooms.md"] = rooms_page()
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    for uri, path in IMAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files
