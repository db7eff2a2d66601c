"""The path of one chat request through the two processes, as a picture and as a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from docs.generate.svg import Palette, line, picture, rect, text

Lane = Literal["app", "engine"]


@dataclass(frozen=True)
class Stage:
    """One thing done to a request; `places` are files or rooms below the repository's root."""

    lane: Lane
    title: str
    detail: str
    places: tuple[str, ...]


STAGES = (
    Stage("app", "Read and check", "JSON to a typed request, every field bounded", ("app/openai/chat", "app/schema")),
    Stage("app", "Render and encode", "chat template, tokenizer", ("app/text",)),
    Stage("app", "Submit", "sampling parameters filled in", ("app/generate", "engine/ipc/client.py")),
    Stage("engine", "Queue", "one message per request", ("engine/ipc/engine_process.py",)),
    Stage("engine", "Schedule a step", "tokens, KV blocks, prefix cache", ("engine/core/scheduler.py",)),
    Stage("engine", "Upload and launch", "one H2D copy, a CUDA graph", ("engine/runner/model_runner.py",)),
    Stage("engine", "Forward", "layers as ops, ops as kernels", ("engine/models/decoder.py", "engine/ops")),
    Stage("engine", "Sample", "penalties, filters, choice; D2H result", ("engine/runner/sampler.py",)),
    Stage("engine", "Append tokens", "finish, free or cache KV blocks", ("engine/core/core.py",)),
    Stage("app", "Detokenize", "stop strings, reasoning, tool calls", ("app/generate", "app/tools")),
    Stage("app", "Send", "SSE events, or one JSON object", ("app/http/streaming.py",)),
)

WIDTH = 848
CARD = (330, 74)
LANES: dict[Lane, float] = {"app": 36, "engine": 434}
FIRST, PITCH = 92, 92
ROWS = (0, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8)  # each stage's row; a hand-over between processes is level


def request_path(palette: Palette) -> str:
    height = FIRST + (ROWS[-1] + 1) * PITCH + 12
    parts = [
        rect(16, 16, CARD[0] + 40, height - 32, palette.card, stroke=palette.edge, rx=10),
        rect(LANES["engine"] - 20, 16, CARD[0] + 40, height - 32, palette.card, stroke=palette.edge, rx=10),
        text(LANES["app"], 48, "app process", kind="head"),
        text(LANES["app"], 68, "FastAPI, asyncio; one or several"),
        text(LANES["engine"], 48, "engine process", kind="head"),
        text(LANES["engine"], 68, "one thread, one device"),
    ]
    tops = [FIRST + row * PITCH for row in ROWS]
    for number, (stage, top) in enumerate(zip(STAGES, tops, strict=True), 1):
        parts += _card(palette, number, stage, LANES[stage.lane], top)
    for index, stage in enumerate(STAGES[:-1]):
        parts.append(_arrow(palette, stage, tops[index], STAGES[index + 1], tops[index + 1]))
    parts += _labels(palette, tops)
    return picture(palette, WIDTH, height, "The path of one chat request", parts)


def _card(palette: Palette, number: int, stage: Stage, x: float, y: float) -> list[str]:
    width, height = CARD
    return [
        rect(x, y, width, height, palette.page, stroke=palette.edge, rx=8),
        f'<circle cx="{x + 24:g}" cy="{y + 26:g}" r="12" fill="{palette.accent_soft}"/>',
        text(x + 24, y + 30.5, str(number), kind="num", anchor="middle", fill=palette.accent, size=12.5),
        text(x + 46, y + 24, stage.title, kind="head", size=14),
        text(x + 46, y + 42, stage.detail),
        text(x + 46, y + 61, " · ".join(stage.places), kind="mono"),
    ]


def _arrow(palette: Palette, stage: Stage, top: float, following: Stage, next_top: float) -> str:
    width, height = CARD
    x, next_x = LANES[stage.lane], LANES[following.lane]
    if stage.lane == following.lane:
        return line([(x + 24, top + height), (x + 24, next_top)], palette.accent, width=1.6, arrow=True)
    level = top + height / 2
    ends = (x + width, next_x) if x < next_x else (x, next_x + width)
    return line([(ends[0], level), (ends[1], level)], palette.accent, width=1.6, arrow=True)


def _labels(palette: Palette, tops: list[int]) -> list[str]:
    """The hand-overs between processes, and the loop of steps."""
    width, height = CARD
    middle = (LANES["app"] + width + LANES["engine"]) / 2
    right = LANES["engine"] + width
    begin, end = tops[8] + height / 2, tops[4] + height / 2
    loop = line([(right, begin), (right + 46, begin), (right + 46, end), (right, end)], palette.accent, arrow=True)
    centre = (begin + end) / 2
    turned = f'<g transform="rotate(-90 {right + 46:g} {centre:g})">'
    box = rect(right + 46 - 36, centre - 9, 72, 18, palette.page)
    between = text(middle, tops[2] + height / 2 - 8, "Unix socket", kind="mono", anchor="middle")
    back = text(middle, tops[8] + height / 2 - 8, "Unix socket", kind="mono", anchor="middle")
    label = text(right + 46, centre + 4, "every step", anchor="middle", size=11)
    return [loop, turned, box, label, "</g>", between, back]


def request_list() -> str:
    """The picture as a numbered list."""
    return "\n".join(
        f"{number}. **{stage.title}** ({stage.lane} process): {stage.detail}. "
        + ", ".join(f"`{place}`" for place in stage.places)
        for number, stage in enumerate(STAGES, 1)
    )
