"""All committed pictures, each in a light and a dark variant."""

from __future__ import annotations

from pathlib import Path

from docs.generate.paths import IMAGES
from docs.generate.plots import growth, throughput
from docs.generate.request_path import request_path
from docs.generate.routing import routing_picture
from docs.generate.svg import PALETTES

DRAWINGS = {"throughput": throughput, "growth": growth, "request-path": request_path, "routing": routing_picture}


def pictures() -> dict[Path, str]:
    return {
        IMAGES / f"{name}-{palette.name}.svg": draw(palette) for name, draw in DRAWINGS.items() for palette in PALETTES
    }
