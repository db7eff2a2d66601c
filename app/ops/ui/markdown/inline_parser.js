// What stands in a paragraph: emphasis, code, links, maths. Delimiters are matched as CommonMark does
// (https://spec.commonmark.org, appendix), in linear time. Images become links, HTML stays text.

import { ASCII_PUNCTUATION, entityAt, isPunctuation, isSpace } from "./characters.js";
import { autolink, bareTail, linkTail, safeAddress } from "./links.js";

const MAX_DEPTH = 32; // of emphasis in emphasis and links; deeper delimiters are text
const MAX_FORMULA = 5000;
const PLAIN = /[^\\`*_~$[\]!<&\n:]+/y;
const BREAK = /<br ?\/?>/iy;
const SCHEME = /(?:^|[^\p{L}\p{N}])(https?)$/iu;

const text = (value) => ({ type: "text", text: value, depth: 0 });

/** Nodes `{ type, ... }` of types text, code, math, break, link, strong, emphasis and deleted. */
export function parseInlines(source) {
  return new InlineParser(source).parse();
}

class InlineParser {
  constructor(source) {
    this.source = source;
    this.position = 0;
    this.nodes = [];
    this.delimiters = []; // of emphasis, that may still open
    this.brackets = [];
    this.inactive = 0; // brackets below it may not open a link
    this.backticks = null;
    this.noDollar = -1; // no formula begins before it
    this.closings = { "\\)": -1, "\\]": -1 }; // where the next one is
  }

  parse() {
    const { source } = this;
    while (this.position < source.length) {
      PLAIN.lastIndex = this.position;
      const match = PLAIN.exec(source);
      if (match) {
        this.emit(match[0]);
        this.position += match[0].length;
      } else {
        this.special(source[this.position]);
      }
    }
    return merged(this.matchDelimiters(0, this.nodes, 0));
  }

  special(sign) {
    switch (sign) {
      case "\\": return this.backslash();
      case "`": return this.code();
      case "*": case "_": case "~": return this.delimiter(sign);
      case "$": return this.formula("$", "$");
      case "[": return this.openBracket(1);
      case "!": return this.source[this.position + 1] === "[" ? this.openBracket(2) : this.literal(1);
      case "]": return this.closeBracket();
      case "<": return this.angle();
      case "&": return this.entity();
      case "\n": return this.newline();
      default: return this.colon();
    }
  }

  emit(value) {
    this.nodes.push(text(value));
  }

  literal(length) {
    this.emit(this.source.slice(this.position, this.position + length));
    this.position += length;
  }

  backslash() {
    const next = this.source[this.position + 1] ?? "";
    if (next === "\n") {
      this.nodes.push({ type: "break", depth: 0 });
      this.position += 2;
    } else if (next === "(" && this.tex("\\(", "\\)")) {
      return;
    } else if (next === "[" && this.tex("\\[", "\\]")) {
      return;
    } else if (next && ASCII_PUNCTUATION.test(next)) {
      this.emit(next);
      this.position += 2;
    } else {
      this.literal(1);
    }
  }

  /** Maths between TeX's own delimiters. */
  tex(opening, closing) {
    const begin = this.position + opening.length;
    if (this.closings[closing] < begin) {
      const found = this.source.indexOf(closing, begin);
      this.closings[closing] = found < 0 ? Infinity : found;
    }
    const end = this.closings[closing];
    if (end === begin || end - begin > MAX_FORMULA) return false;
    this.nodes.push({ type: "math", text: this.source.slice(begin, end), display: opening === "\\[", depth: 0 });
    this.position = end + closing.length;
    return true;
  }

  /** `$x$`: no space inside of the dollars, and no digit behind them, so that prices stay text. */
  formula() {
    const { source, position } = this;
    const double = source[position + 1] === "$";
    const mark = double ? "$$" : "$";
    const begin = position + mark.length;
    if (!isSpace(source[begin] ?? "") && position >= this.noDollar) {
      const most = Math.min(source.length, begin + MAX_FORMULA);
      for (let end = source.indexOf(mark, begin); end >= 0 && end < most; end = source.indexOf(mark, end + 1)) {
        if (end === begin || isSpace(source[end - 1]) || source[end - 1] === "\\") continue;
        if (/[0-9]/.test(source[end + mark.length] ?? "")) continue;
        this.nodes.push({ type: "math", text: source.slice(begin, end), display: double, depth: 0 });
        this.position = end + mark.length;
        return;
      }
      this.noDollar = most;
    }
    this.literal(mark.length);
  }

  code() {
    const { source, position } = this;
    const length = runLength(source, position, "`");
    this.backticks ??= backtickRuns(source);
    const places = this.backticks.get(length) ?? { at: [], next: 0 }; // none where a backslash took a part of the run
    while (places.next < places.at.length && places.at[places.next] <= position) places.next += 1;
    const end = places.at[places.next];
    if (end === undefined) return this.literal(length);
    let content = source.slice(position + length, end).replaceAll("\n", " ");
    if (content.startsWith(" ") && content.endsWith(" ") && content.trim()) content = content.slice(1, -1);
    this.nodes.push({ type: "code", text: content, depth: 0 });
    this.position = end + length;
  }

  delimiter(sign) {
    const { source, position } = this;
    const length = runLength(source, position, sign);
    const before = characterBefore(source, position);
    const after = position + length < source.length ? String.fromCodePoint(source.codePointAt(position + length)) : "";
    const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    let opens = left;
    let closes = right;
    if (sign === "_") {
      opens = left && (!right || isPunctuation(before));
      closes = right && (!left || isPunctuation(after));
    }
    if (sign === "~" && length > 2) opens = closes = false;
    const node = text(source.slice(position, position + length));
    this.nodes.push(node);
    if (opens || closes) {
      this.delimiters.push({ node, sign, length, original: length, opens, closes, place: this.nodes.length - 1 });
    }
    this.position += length;
  }

  openBracket(length) {
    this.brackets.push({
      place: this.nodes.length,
      image: length === 2,
      delimiter: this.delimiters.length,
    });
    this.literal(length);
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    if (bracket === undefined) return this.literal(1);
    const active = bracket.image || this.brackets.length >= this.inactive;
    this.inactive = Math.min(this.inactive, this.brackets.length);
    const tail = active ? linkTail(this.source, this.position + 1) : null;
    if (tail === null) return this.literal(1);
    const inside = this.nodes.splice(bracket.place);
    inside[0].text = ""; // the bracket itself
    const children = merged(this.matchDelimiters(bracket.delimiter, inside, bracket.place));
    this.link(tail.destination, tail.title, children, bracket.image);
    this.position = tail.end;
    if (!bracket.image) this.inactive = this.brackets.length; // no links in links
  }

  link(destination, title, children, image = false) {
    const address = safeAddress(destination);
    const depth = depthOf(children);
    if (address === null) for (const child of children) this.nodes.push(child);
    else if (depth >= MAX_DEPTH) this.emit(plainText(children));
    else this.nodes.push({ type: "link", address, title, image, children, depth: depth + 1 });
  }

  angle() {
    const { source, position } = this;
    const found = autolink(source, position);
    if (found !== null) {
      this.link(found.address, "", [text(found.label)]);
      this.position = found.end;
      return;
    }
    BREAK.lastIndex = position;
    const match = BREAK.exec(source);
    if (!match) return this.literal(1);
    this.nodes.push({ type: "break", depth: 0 });
    this.position += match[0].length;
  }

  entity() {
    const found = entityAt(this.source, this.position);
    if (found === null) return this.literal(1);
    this.emit(found.text);
    this.position += found.length;
  }

  newline() {
    const last = this.nodes[this.nodes.length - 1];
    const hard = last?.type === "text" && last.text.endsWith("  ");
    if (last?.type === "text") last.text = last.text.replace(/ {1,100}$/, "");
    if (hard) this.nodes.push({ type: "break", depth: 0 });
    else this.emit("\n");
    this.position += 1;
  }

  /** An address in plain text, found at the colon after its scheme. */
  colon() {
    const last = this.nodes[this.nodes.length - 1];
    const scheme = last?.type === "text" ? SCHEME.exec(last.text.slice(-10)) : null;
    const tail = scheme !== null && this.brackets.length === 0 ? bareTail(this.source, this.position) : null;
    if (tail === null) return this.literal(1);
    last.text = last.text.slice(0, -scheme[1].length);
    this.link(scheme[1] + tail, "", [text(scheme[1] + tail)]);
    this.position += tail.length;
  }

  /** Nodes with emphasis for the delimiters from index `bottom` on, which are forgotten; `first`: the first node's place. */
  matchDelimiters(bottom, nodes, first) {
    const { delimiters } = this;
    const floors = new Map(); // for each kind of closer, the index below which there is no opener for it
    const openers = [];
    const wrapped = new Map(); // first node of an emphasis -> where it ends
    for (let index = bottom; index < delimiters.length; index += 1) {
      const closer = delimiters[index];
      while (closer.closes && closer.length > 0) {
        const kind = `${closer.sign}${closer.opens ? 1 : 0}${closer.original % 3}${closer.sign === "~" ? closer.length : ""}`;
        const floor = floors.get(kind) ?? 0;
        let found = openers.length - 1;
        while (found >= floor && !fits(openers[found], closer)) found -= 1;
        if (found < floor) {
          floors.set(kind, openers.length);
          break;
        }
        const opener = openers[found];
        const used = closer.sign === "~" ? closer.length : opener.length >= 2 && closer.length >= 2 ? 2 : 1;
        wrap(opener, closer, used, first, wrapped);
        openers.length = opener.length === 0 ? found : found + 1;
        for (const [name, value] of floors) floors.set(name, Math.min(value, openers.length));
      }
      if (closer.opens && closer.length > 0) openers.push(closer);
    }
    delimiters.length = bottom;
    return wrapped.size ? nest(nodes, wrapped) : nodes;
  }
}

function fits(opener, closer) {
  if (opener.sign !== closer.sign) return false;
  if (opener.sign === "~") return opener.length === closer.length;
  if (!opener.closes && !closer.opens) return true;
  return (opener.original + closer.original) % 3 !== 0 || (opener.original % 3 === 0 && closer.original % 3 === 0);
}

/** Note an emphasis between two delimiters, which lose `used` signs each. */
function wrap(opener, closer, used, first, wrapped) {
  opener.length -= used;
  closer.length -= used;
  opener.node.text = opener.sign.repeat(opener.length);
  closer.node.text = closer.sign.repeat(closer.length);
  const type = opener.sign === "~" ? "deleted" : used === 2 ? "strong" : "emphasis";
  const begins = wrapped.get(opener.place - first) ?? [];
  begins.push({ type, end: closer.place - first, mark: opener.sign.repeat(used) });
  wrapped.set(opener.place - first, begins);
}

/** Nodes as a tree; an emphasis begins behind its opener's node and ends before its closer's. */
function nest(flat, wrapped) {
  const open = [{ children: [], end: Infinity }];
  for (let index = 0; index < flat.length; index += 1) {
    while (open[open.length - 1].end === index) close(open);
    open[open.length - 1].children.push(flat[index]);
    // The inner emphasis was found first.
    for (const { type, end, mark } of (wrapped.get(index) ?? []).reverse()) open.push({ type, end, mark, children: [] });
  }
  return open[0].children;
}

function close(open) {
  const { type, mark, children } = open.pop();
  const parent = open[open.length - 1].children;
  const depth = depthOf(children);
  if (depth < MAX_DEPTH) {
    parent.push({ type, children: merged(children), depth: depth + 1 });
    return;
  }
  parent.push({ type: "text", text: mark + plainText(children) + mark, depth: 0 });
}

function depthOf(nodes) {
  let depth = 0;
  for (const node of nodes) depth = Math.max(depth, node.depth);
  return depth;
}

/** The text of nodes, without their form. */
export function plainText(nodes) {
  let result = "";
  for (const node of nodes) {
    if (node.children) result += plainText(node.children);
    else result += node.type === "break" ? "\n" : node.text;
  }
  return result;
}

function merged(nodes) {
  const result = [];
  let pieces = null; // of the text that is being gathered
  for (const node of nodes) {
    if (node.type !== "text") {
      pieces = null;
      result.push(node);
    } else if (node.text === "") {
      continue;
    } else if (pieces === null) {
      pieces = { type: "text", text: node.text, depth: 0 };
      result.push(pieces);
    } else {
      pieces.text += node.text;
    }
  }
  return result;
}

function runLength(source, position, sign) {
  let end = position;
  while (source[end] === sign) end += 1;
  return end - position;
}

function characterBefore(source, position) {
  if (position === 0) return "";
  const code = source.charCodeAt(position - 1);
  return code >= 0xdc00 && code <= 0xdfff ? source.slice(position - 2, position) : source[position - 1];
}

/** Where the runs of backticks begin, by their length. */
function backtickRuns(source) {
  const runs = new Map();
  for (let position = source.indexOf("`"); position >= 0; ) {
    const length = runLength(source, position, "`");
    if (!runs.has(length)) runs.set(length, { at: [], next: 0 });
    runs.get(length).at.push(position);
    position = source.indexOf("`", position + length);
  }
  return runs;
}
