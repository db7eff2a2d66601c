"""Markdown as the page shows it: like CommonMark, safe whatever a model writes, and each block once."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.support.servers.browser import Page

REFERENCE = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
FOLDER = Path(__file__).parent
CANONICAL = (FOLDER / "canonical.js").read_text()
ALLOWED = """
a blockquote br button code del div em figcaption figure h3 h4 h5 h6 hr input li ol p pre span strong table tbody td th
thead tr ul math mfrac mi mn mo mover mroot mrow msqrt mspace msub msubsup msup mtable mtd mtext mtr munder munderover
"""
REPEATED = (
    """
[|*|> |`|_a |*a **|[a](|[](a)|$a |\\(|- a\\n|[\\n|[[a](b)|$$\\n|*_`[$<&~!
""".strip()
    .replace("\\n", "\n")
    .split("|")
)


def examples(name: str) -> list[str]:
    """Of a file that parts them by ====."""
    return (FOLDER / name).read_text().removesuffix("\n").split("\n====\n")


def in_page(page: Page, code: str, value: Any) -> Any:
    """What a function body returns that sees `value`, and `markdown`, a module of the page."""
    page.evaluate(CANONICAL)
    return page.evaluate(
        "import('/ui/markdown/streamed_markdown.js').then((markdown) => {"
        f" const value = {json.dumps(value)}; {code} }})"
    )


def html_of(text: str) -> str:
    """Without inline styles, of which the page's policy complains."""
    return re.sub(r' style="[^"]*"', "", REFERENCE.render(text))


def differences(page: Page, texts: list[str]) -> list[Any]:
    """Texts that the page shows otherwise than the reference, or otherwise where they come in pieces."""
    code = """
      const found = [];
      for (const [text, html] of value) {
        const expected = canonicalHtml(html);
        for (const step of [text.length || 1, 1, 3]) {
          const shown = canonicalMarkdown(markdown.StreamedMarkdown, text, step);
          if (shown !== expected) { found.push({ text, step, expected, shown }); break; }
        }
      }
      return found;
    """
    found: list[Any] = in_page(page, code, [(text, html_of(text)) for text in texts])
    return found


def test_markdown_is_that_of_commonmark(browser: Page) -> None:
    assert differences(browser, examples("examples.md")) == []


def test_random_markdown_is_that_of_commonmark_in_pieces_too(browser: Page) -> None:
    """Without what the reference itself gets wrong: deeply indented markers, empty items before blank lines, blank ends
    of fences in items."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    parts = ["a", "b ", " ", "  ", "\n", "\n", "\n\n", "*", "**", "_", "`", "``", "- ", "1. ", "2. ", "> ", "# "]
    parts += ["---\n"]
    parts += ["===\n", "(", ")", "!", "é", "+ ", "&amp;", "  \n"]
    texts = ["".join(source.choices(parts, k=source.randint(1, 25))) for _ in range(400)]
    texts = [text for text in texts if "```" not in text and not re.search(r"(^|\s)([-+*]|\d[.])\s*\n\s*\n", text)]
    assert differences(browser, texts) == []


def test_nothing_that_a_model_writes_becomes_more_than_text_and_links(browser: Page) -> None:
    code = """
      const allowed = new Set(value.allowed);
      const found = [];
      for (const text of value.texts) for (const step of [text.length, 1]) {
        const host = document.body.appendChild(document.createElement("div"));
        const markdown_ = new markdown.StreamedMarkdown(host);
        for (let begin = 0; begin < text.length; begin += step) markdown_.append(text.slice(begin, begin + step));
        markdown_.end();
        for (const element of host.querySelectorAll("*")) {
          if (!allowed.has(element.localName)) found.push([text, element.localName]);
          for (const { name, value } of element.attributes) {
            if (name.startsWith("on") || name === "style" || name === "src") found.push([text, name]);
            if (name.includes("href") && !/^(https?|mailto):/.test(element.href ?? "")) found.push([text, value]);
          }
          if (element.localName === "a" && element.rel !== "noopener noreferrer") found.push([text, "rel"]);
        }
        host.remove();
      }
      return [found, globalThis.pwned ?? null];
    """
    texts = examples("hostile.md")
    assert in_page(browser, code, {"texts": texts, "allowed": ALLOWED.split()}) == [[], None]
    joined = "\n\n".join(random.Random(1).sample(texts, len(texts)))
    assert in_page(browser, code, {"texts": [joined], "allowed": ALLOWED.split()}) == [[], None]


def test_no_text_takes_more_than_linear_time(browser: Page) -> None:
    """A quadratic parser would need minutes for these, and the browser's deadline is seconds."""
    code = """
      for (const part of value) {
        const text = part.repeat(Math.ceil(30000 / part.length));
        markdown.showMarkdown(document.createElement("div"), text);
        const streamed = new markdown.StreamedMarkdown(document.createElement("div"));
        for (let begin = 0; begin < text.length; begin += 2000) streamed.append(text.slice(begin, begin + 2000));
        streamed.end();
      }
      return true;
    """
    assert in_page(browser, code, REPEATED)


def test_a_long_answer_costs_a_bounded_number_of_dom_operations_a_token(browser: Page) -> None:
    """10,000 tokens, 33 a frame; a block is never touched again once the next one has begun."""
    code = """
      const host = document.createElement("div");
      const streamed = new markdown.StreamedMarkdown(host);
      const observer = new MutationObserver(() => {});
      const options = { childList: true, characterData: true, attributes: true, subtree: true };
      observer.observe(host, options);
      const halves = [0, 0];
      let late = 0;
      const step = Math.ceil(value.length / 300);
      for (let begin = 0; begin < value.length; begin += step) {
        const finished = [...host.children].slice(0, -1);
        streamed.append(value.slice(begin, begin + step));
        for (const { target, addedNodes, removedNodes } of observer.takeRecords()) {
          halves[begin < value.length / 2 ? 0 : 1] += 1 + addedNodes.length + removedNodes.length;
          if (finished.some((block) => block === target || block.contains(target))) late += 1;
        }
      }
      return { halves, late, blocks: host.childElementCount };
    """
    part = "## Title\n\nSome *words* and `code` in\nlines.\n\n- item **one**\n- item two\n\n"
    part += "```py\nx = 1  # y\nz = [x]\n```\n\n"
    part += "| a | b |\n|---|---|\n| 1 | $x^2$ |\n\n"
    for text in (
        part * 250,
        "- item of a long list\n" * 1800,
        "```js\n" + "let a = 'b'; // c\n" * 2200,
        "words " * 6600,
    ):
        found = in_page(browser, code, text)
        first, second = found["halves"]
        assert found["late"] == 0
        assert second < 1.2 * first + 50, "the cost of a token does not grow with the answer"
        assert first + second < 40000


def test_maths_becomes_mathml_or_stays_readable(browser: Page) -> None:
    code = """
      return value.map((text) => {
        const host = document.createElement("div");
        markdown.showMarkdown(host, text);
        return host.innerHTML.replace(/ (aria-label|tabindex|role|class|display|stretchy)="[^"]*"/g, "");
      });
    """
    texts = [
        r"$x_i^2$",
        "$5 and $10",
        r"\(\frac{a}{\sqrt[3]{b}}\)",
        r"$\mathbb{R} \to \text{if } x$",
        r"$\nope{x}$",
        "$$\na\n$$",
    ]
    texts += [r"$\begin{cases} a & b \\ c \end{cases}$", "$$\nnever closed\n\nnext"]
    assert in_page(browser, code, texts) == [
        "<p><math><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup></math></p>",
        "<p>$5 and $10</p>",
        "<p><math><mfrac><mi>a</mi><mroot><mi>b</mi><mn>3</mn></mroot></mfrac></math></p>",
        '<p><math><mrow><mi mathvariant="normal">\u211d</mi><mo>→</mo>'
        "<mtext>if&nbsp;</mtext><mi>x</mi></mrow></math></p>",
        r"<p><code>\nope{x}</code></p>",
        "<div><math><mi>a</mi></math></div>",
        "<p><math><mrow><mo>{</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr>"
        "<mtr><mtd><mi>c</mi></mtd></mtr></mtable></mrow></math></p>",
        "<div><code>$$never closed</code></div><p>next</p>",
    ]


def test_code_is_highlighted_and_copied_as_it_was_written(browser: Page) -> None:
    code = """
      const host = document.body.appendChild(document.createElement("div"));
      host.className = "markdown";
      markdown.showMarkdown(host, "```python\\n" + value + "\\n```");
      const spans = [...host.querySelectorAll("[class^=hl]")];
      const kinds = spans.map((each) => [each.className.slice(3), each.textContent]);
      getSelection().selectAllChildren(host.querySelector("pre"));
      const selected = getSelection().toString();
      host.remove();
      return [kinds, selected];
    """
    source = 'def f(x):\n    """Doc\n    string"""\n\n    return x + 1.5  # why'
    kinds, selected = in_page(browser, code, source)
    assert kinds == [
        ["keyword", "def"],
        ["function", "f"],
        ["string", '"""Doc'],
        ["string", '    string"""'],
        ["keyword", "return"],
        ["number", "1.5"],
        ["comment", "# why"],
    ]
    assert selected.strip() == source
