"""Small SVG vocabulary: two palettes, text, and the frame of a picture. No fonts are fetched."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Palette:
    """Colours of one scheme; `name` is the file's suffix."""

    name: str
    page: str
    card: str
    edge: str
    ink: str
    quiet: str
    accent: str
    accent_soft: str
    second: str


LIGHT = Palette("light", "#ffffff", "#f6f8fc", "#dfe4ec", "#161b26", "#5a6577", "#2563eb", "#e3ecfe", "#a3adbd")
DARK = Palette("dark", "#141a26", "#1b2331", "#2f3a4e", "#e9edf5", "#9aa6ba", "#5b93ff", "#20335c", "#66738a")
PALETTES = (LIGHT, DARK)

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"


def picture(palette: Palette, width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole SVG file on the palette's page colour; `title` is read by screen readers."""
    style = (
        f"text{{font:12px {SANS};fill:{palette.quiet}}}"
        f".head{{font-size:15px;font-weight:650;fill:{palette.ink}}}"
        f".name{{font-weight:600;fill:{palette.ink}}}"
        f".mono{{font:11px {MONO}}}"
        ".num{font-variant-numeric:tabular-nums}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{palette.page}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(
    x: float, y: float, content: str, *, kind: str = "", anchor: str = "start", fill: str = "", size: float = 0
) -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    style = (f"fill:{fill};" if fill else "") + (f"font-size:{size:g}px;" if size else "")
    attributes += f' style="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", rx: float = 3) -> str:
    outline = f' stroke="{stroke}"' if stroke else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx:g}" fill="{fill}"{outline}/>'
    )


def line(points: list[tuple[float, float]], stroke: str, *, width: float = 1, arrow: bool = False) -> str:
    """A polyline; with `arrow` a head at its last point."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = (
        f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linejoin="round"/>'
    )
    if arrow:
        drawn += _arrow_head(points[-2], points[-1], stroke)
    return drawn


def _arrow_head(before: tuple[float, float], tip: tuple[float, float], fill: str) -> str:
    """A triangle at `tip`; lines are horizontal or vertical."""
    (x, y), length, half = tip, 8.0, 4.5
    dx, dy = tip[0] - before[0], tip[1] - before[1]
    if abs(dx) > abs(dy):
        back = x - length if dx > 0 else x + length
        corners = [(x, y), (back, y - half), (back, y + half)]
    else:
        back = y - length if dy > 0 else y + length
        corners = [(x, y), (x - half, back), (x + half, back)]
    return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill="{fill}"/>'
