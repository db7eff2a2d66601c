"""Frame times of a long answer in a headless browser, and the cost of the same Markdown on a server.

`python -m tests.page.frame_times [--tokens 10000] [--rate 2000]`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from tests.page.opening import open_page
from tests.page.upstream import Reply, running_upstream
from tests.support.servers.browser import Page, browser_page

ANSWER = Path(__file__).with_name("answer.md").read_text()
CHARACTERS_PER_TOKEN = 4
WATCH = """
  globalThis.draws = [];
  import("/ui/chat/transcript.js").then(({ Transcript }) => {
    const { draw } = Transcript.prototype;
    Transcript.prototype.draw = function () {
      const begin = performance.now();
      draw.call(this);
      draws.push(performance.now() - begin);
    };
  });
  globalThis.frames = [];
  globalThis.longTasks = [];
  new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask" });
  const tick = (time) => {
    if (document.querySelector(".busy")) frames.push(time);
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
"""


IDLE = """
  new Promise((resolve) => {
    const times = [];
    const tick = (time) => {
      times.push(time);
      if (times.length < 300) requestAnimationFrame(tick);
      else resolve(times.slice(1).filter((each, index) => each - times[index] > 33.5).length);
    };
    requestAnimationFrame(tick);
  })
"""


def measure_frames(page: Page, tokens: int) -> dict[str, Any]:
    """Milliseconds between the frames drawn while the answer comes."""
    page.evaluate(WATCH)
    page.write("#prompt", "long")
    page.press_enter()
    page.until("document.querySelector('.cost')?.textContent.includes('tokens/s')")
    times = page.evaluate("frames")
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return {
        "tokens": tokens,
        "cost_line": page.text(".cost"),
        "frames": len(gaps),
        "median_ms": round(statistics.median(gaps), 1),
        "p99_ms": round(gaps[int(0.99 * len(gaps))], 1),
        "longest_ms": round(gaps[-1], 1),
        "over_33_ms": sum(gap > 33.5 for gap in gaps),
        "long_tasks": len(page.evaluate("longTasks")),
        **measure_draws(page),
        "characters": page.evaluate("document.querySelector('.assistant .text').textContent.length"),
    }


def measure_draws(page: Page) -> dict[str, float]:
    """Milliseconds of script and layout in a frame, also at the beginning and the end of the answer."""
    draws = page.evaluate("draws")
    third = len(draws) // 3
    return {
        "draw_median_ms": round(statistics.median(draws), 1),
        "draw_p99_ms": round(sorted(draws)[int(0.99 * len(draws))], 1),
        "draw_first_third_ms": round(statistics.median(draws[:third]), 1),
        "draw_last_third_ms": round(statistics.median(draws[-third:]), 1),
    }


def measure_page_rendering(page: Page, text: str) -> float:
    """Milliseconds of script to render the text as it comes, 132 characters a frame, without layout."""
    code = (
        "import('/ui/markdown/streamed_markdown.js').then(({ StreamedMarkdown }) => {"
        f"const text = {json.dumps(text)}; const streamed = new StreamedMarkdown(document.createElement('div'));"
        "const begin = performance.now();"
        "for (let at = 0; at < text.length; at += 132) streamed.append(text.slice(at, at + 132));"
        "streamed.end(); return performance.now() - begin; })"
    )
    return float(min(page.evaluate(code) for _ in range(3)))


def measure_server_rendering(text: str) -> float:
    """Milliseconds of markdown-it-py and Pygments, each block rendered once; without what sanitising would add."""
    formatter: Any = HtmlFormatter()

    def highlighted(code: str, name: str, _: str) -> str:
        found: str = highlight(code, get_lexer_by_name(name or "text"), formatter)
        return found

    parser = MarkdownIt("commonmark", {"highlight": highlighted}).enable(["table", "strikethrough"])
    blocks = text.split("\n\n")
    parser.render(text[:3000])
    begin = time.perf_counter()
    for block in blocks:
        parser.render(block)
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--rate", type=float, default=2000)
    arguments = parser.parse_args()
    text = (ANSWER * 100)[: CHARACTERS_PER_TOKEN * arguments.tokens]
    pieces = [text[begin : begin + CHARACTERS_PER_TOKEN] for begin in range(0, len(text), CHARACTERS_PER_TOKEN)]
    with running_upstream() as upstream, browser_page(Path(tempfile.mkdtemp())) as page:
        page.resize(1280, 860)
        open_page(page, upstream.url)
        upstream.replies["long"] = Reply(pieces, per_second=arguments.rate)
        idle = page.evaluate(IDLE)  # of 300 frames in which nothing happens: what the machine itself drops
        found = {"idle_over_33_ms": idle, **measure_frames(page, arguments.tokens)}
        found["page_ms"] = round(measure_page_rendering(page, text))
    found["server_ms"] = round(measure_server_rendering(text))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
