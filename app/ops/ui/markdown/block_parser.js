// Blocks of Markdown, line by line: CommonMark's two phases (https://spec.commonmark.org, appendix), with GFM's tables
// and display maths. HTML and reference definitions are text. The time for a line is bounded by its length and MAX_DEPTH.

import { Block, MAX_DEPTH } from "./block.js";
import { Cursor } from "./cursor.js";
import { alignments, cells } from "./table_row.js";

const HEADING = /^(#{1,6})(?:[ \t]+|$)/;
const FENCE = /^(`{3,})([^`]*)$|^(~{3,})(.*)$/;
const UNDERLINE = /^(=+|-+)[ \t]*$/;
const MARKER = /^(?:([-+*])|(\d{1,9})([.)]))(?=[ \t]|$)/;
const MATH = /^(?:\$\$|\\\[(?=[ \t]|$))/;

export class BlockParser {
  constructor() {
    this.root = new Block("document");
    this.spine = [this.root]; // open blocks, each the last child of the one before
    this.saved = null;
  }

  /** Add a line for good. */
  addLine(line) {
    this.forgetTrial();
    this.process(line);
  }

  /** Show what a line without its end would be; the next call of any method takes it back. */
  tryLine(line) {
    this.forgetTrial();
    this.saved = this.spine.map((block) => [block, block.save()]);
    this.process(line);
  }

  forgetTrial() {
    if (this.saved === null) return;
    for (const [block, state] of this.saved) block.restore(state);
    this.spine = this.saved.map(([block]) => block);
    this.saved = null;
  }

  /** Close all blocks. */
  end() {
    this.forgetTrial();
    this.closeAfter(0);
    this.root.final = true;
  }

  get tip() {
    return this.spine[this.spine.length - 1];
  }

  process(line) {
    const blank = this.place(line);
    // Blank lines make the lists around them loose, up to the next quote.
    let inside = blank;
    for (let index = this.spine.length - 1; index > 0; index -= 1) {
      if (this.spine[index].type === "quote") inside = false;
      this.spine[index].blank = inside;
    }
  }

  /** Returns whether the line was blank inside of the innermost block that it belongs to. */
  place(line) {
    const cursor = new Cursor(line);
    let matched = 1;
    while (matched < this.spine.length) {
      const outcome = this.continues(this.spine[matched], cursor);
      if (outcome === "closed") {
        this.closeAfter(matched);
        return false;
      }
      if (!outcome) break;
      matched += 1;
    }
    this.matched = matched;
    const innermost = this.spine[matched - 1];
    const opened = !innermost.verbatim && this.openBlocks(cursor);
    if (opened === "whole") return false;
    const blank = cursor.blank;
    if (!opened && matched < this.spine.length && !blank && this.tip.type === "paragraph") {
      this.tip.push(cursor.words); // a lazy continuation
      return false;
    }
    if (!opened) this.closeAfter(matched);
    this.addText(cursor, blank);
    return blank && !opened && this.tip.fence === undefined;
  }

  /** Whether an open block goes on in this line; takes its marker. */
  continues(block, cursor) {
    switch (block.type) {
      case "list":
        return true;
      case "quote":
        if (cursor.indent > 3 || cursor.words[0] !== ">") return false;
        cursor.skip(cursor.indent);
        cursor.take(1);
        cursor.skip(1);
        return true;
      case "item":
        if (cursor.blank ? block.children.length === 0 : cursor.indent < block.offset) return false;
        cursor.skip(block.offset);
        return true;
      case "code":
        if (block.fence === undefined) {
          if (cursor.indent < 4 && !cursor.blank) return false;
          cursor.skip(4);
          return true;
        }
        if (cursor.indent < 4 && isClosingFence(cursor.words.trimEnd(), block.fence)) return "closed";
        cursor.skip(block.indent);
        return true;
      case "math":
        return this.continuesMath(block, cursor);
      default:
        return (block.type === "paragraph" || block.type === "table") && !cursor.blank;
    }
  }

  continuesMath(block, cursor) {
    if (cursor.blank) return false; // it was no formula
    const text = cursor.words.trimEnd();
    if (!text.endsWith(block.closing)) return true;
    block.push(text.slice(0, -block.closing.length));
    block.whole = true;
    return "closed";
  }

  /** Open the blocks whose markers are ahead. Returns "whole" if nothing is left of the line, else whether any did. */
  openBlocks(cursor) {
    let opened = false;
    for (;;) {
      const container = opened ? this.tip : this.spine[this.matched - 1];
      const indent = cursor.indent;
      if (cursor.blank) return opened;
      if (indent > 3) {
        if (this.tip.type === "paragraph" || container.type === "table") return opened;
        this.openBlock(new Block("code"));
        cursor.skip(4);
        return true;
      }
      const words = cursor.words;
      const found = this.openLeaf(words, container, indent);
      if (found) return found;
      if (this.spine.length > MAX_DEPTH) return opened;
      if (words[0] === ">") {
        this.openBlock(new Block("quote"));
        cursor.skip(indent);
        cursor.take(1);
        cursor.skip(1);
      } else if (!this.openItem(cursor, words, container, indent)) {
        return opened;
      }
      opened = true;
    }
  }

  openLeaf(words, container, indent) {
    let match;
    if ((match = HEADING.exec(words))) {
      const text = words.slice(match[0].length).trim().replace(/(^|[ \t])#+$/, "").trimEnd();
      return this.openWhole(new Block("heading", { level: match[1].length }), text);
    }
    if ((words[0] === "`" || words[0] === "~") && (match = FENCE.exec(words))) {
      const info = (match[2] ?? match[4]).trim();
      this.openBlock(new Block("code", { fence: match[1] ?? match[3], info, indent }));
      return "whole";
    }
    if ((match = MATH.exec(words))) return this.openMath(words, match[0]);
    if (container.type === "paragraph" && (match = UNDERLINE.exec(words))) {
      this.closeAfter(this.matched);
      container.type = "heading";
      container.level = match[1][0] === "=" ? 1 : 2;
      this.closeAfter(this.spine.length - 1);
      return "whole";
    }
    if (isRule(words)) return this.openWhole(new Block("rule"), "");
    if (container.type === "paragraph") return this.openTable(words, container);
    return false;
  }

  openWhole(block, text) {
    this.openBlock(block);
    if (text) block.push(text);
    this.closeAfter(this.spine.length - 1);
    return "whole";
  }

  openMath(words, opening) {
    const closing = opening === "$$" ? "$$" : "\\]";
    const block = new Block("math", { closing, opening, whole: false });
    const text = words.slice(2).trimEnd();
    const end = text.indexOf(closing);
    if (end < 0) {
      this.openBlock(block);
      if (text) block.push(text);
      return "whole";
    }
    if (end !== text.length - closing.length || end === 0) return false; // maths within a line of text
    block.whole = true;
    return this.openWhole(block, text.slice(0, end));
  }

  openTable(words, paragraph) {
    const columns = alignments(words);
    if (columns === null || this.spine.length !== this.matched) return false;
    const header = cells(paragraph.lines[paragraph.lines.length - 1]);
    if (header.length !== columns.length) return false;
    if (paragraph.lines.length === 1) {
      Object.assign(paragraph, { type: "table", header, columns, lines: [], size: 0 });
      return "whole";
    }
    paragraph.lines = paragraph.lines.slice(0, -1);
    this.openBlock(new Block("table", { header, columns }));
    return "whole";
  }

  openItem(cursor, words, container, indent) {
    const match = MARKER.exec(words);
    if (!match) return false;
    const empty = words.length === match[0].length || words.slice(match[0].length).trim() === "";
    const interrupts = container.type === "paragraph";
    if (interrupts && (empty || (match[2] !== undefined && match[2] !== "1"))) return false;
    const kind = match[1] ?? match[3];
    let list = container;
    if (interrupts) list = this.spine[this.spine.indexOf(container) - 1];
    if (list.type !== "list" || list.kind !== kind) {
      const start = match[2] === undefined ? null : Number(match[2]);
      list = new Block("list", { kind, start, loose: false });
      this.openBlock(list);
    }
    cursor.skip(indent);
    cursor.take(match[0].length);
    const gap = cursor.indent;
    const width = empty || gap > 4 ? 1 : gap;
    cursor.skip(width);
    this.openBlock(new Block("item", { offset: indent + match[0].length + width }));
    return true;
  }

  /** Open a block below the last one that may hold it. */
  openBlock(block) {
    if (this.matched < this.spine.length) this.closeAfter(this.matched);
    while (!(block.type === "item" ? this.tip.type === "list" : this.tip.contains)) {
      this.closeAfter(this.spine.length - 1);
    }
    const parent = this.tip;
    if (parent.blank && parent.children.length > 0) {
      if (parent.type === "list") parent.loose = true;
      if (parent.type === "item") this.spine[this.spine.length - 2].loose = true;
    }
    parent.children.push(block);
    this.spine.push(block);
    this.matched = this.spine.length;
  }

  closeAfter(length) {
    while (this.spine.length > Math.max(length, 1)) {
      const block = this.spine.pop();
      block.open = false;
      if (this.saved === null) block.final = true;
    }
  }

  addText(cursor, blank) {
    const tip = this.tip;
    if (tip.verbatim) tip.push(cursor.rest);
    else if (tip.type === "table") tip.push(cursor.words);
    else if (!blank) {
      if (tip.type !== "paragraph") this.openBlock(new Block("paragraph"));
      this.tip.push(cursor.words);
    }
  }
}

function isClosingFence(text, fence) {
  if (text.length < fence.length) return false;
  for (const sign of text) if (sign !== fence[0]) return false;
  return true;
}

/** Three or more of one of the signs * - _ with nothing but white space between them. */
function isRule(words) {
  const sign = words[0];
  if (sign !== "*" && sign !== "-" && sign !== "_") return false;
  let count = 0;
  for (const each of words) {
    if (each === sign) count += 1;
    else if (each !== " " && each !== "\t") return false;
  }
  return count >= 3;
}
