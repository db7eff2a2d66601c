// Highlighting, line by line: what a line means depends on the lines before only by an open comment or string.

import { make } from "../dom/element.js";
import { constants, languageNamed } from "./languages.js";

const MAX_LINE = 2000; // characters; longer lines stay plain
const NUMBER = "\\b(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)\\w*";
const patterns = new Map();

export class Highlighter {
  constructor(name) {
    this.language = languageNamed(name);
    this.open = null; // the comment or string that the settled lines leave open: [begin, end, class]
  }

  /** A line as text and spans, after the settled lines. */
  fragment(line) {
    const fragment = document.createDocumentFragment();
    this.scan(line, (kind, text) => fragment.append(kind ? make("span", { class: `hl-${kind}` }, text) : text));
    return fragment;
  }

  /** This line will not change any more. */
  settle(line) {
    this.open = this.scan(line, () => {});
  }

  /** Call `emit(kind, text)` for the parts of a line; returns what the line leaves open. */
  scan(line, emit) {
    const { language } = this;
    if (language === undefined || line.length > MAX_LINE) {
      emit("", line);
      return this.open;
    }
    const pattern = patternOf(language);
    let { open } = this;
    let position = 0;
    while (position < line.length) {
      if (open !== null) {
        const end = line.indexOf(open[1], position);
        const stop = end < 0 ? line.length : end + open[1].length;
        emit(open[2], line.slice(position, stop));
        if (end >= 0) open = null;
        position = stop;
        continue;
      }
      pattern.lastIndex = position;
      const match = pattern.exec(line);
      if (!match) {
        emit("", line.slice(position));
        break;
      }
      if (match.index > position) emit("", line.slice(position, match.index));
      position = match.index + match[0].length;
      if (match.groups.block !== undefined) {
        open = language.blocks.find(([begin]) => begin === match[0]);
        const end = line.indexOf(open[1], position);
        const stop = end < 0 ? line.length : end + open[1].length;
        emit(open[2], line.slice(match.index, stop));
        if (end >= 0) open = null;
        position = stop;
      } else {
        emit(kindOf(match, language, line[position]), match[0]);
      }
    }
    return open;
  }
}

function kindOf({ 0: text, groups }, language, next) {
  if (groups.comment !== undefined) return "comment";
  if (groups.string !== undefined) return "string";
  if (groups.number !== undefined) return "number";
  if (groups.word === undefined) return language.extra.find((_, index) => groups[`extra${index}`] !== undefined)[0];
  if (language.keywords?.has(text)) return "keyword";
  if (constants.has(text)) return "number";
  if (language.types?.has(text)) return "type";
  return next === "(" ? "function" : "";
}

function patternOf(language) {
  let pattern = patterns.get(language);
  if (pattern === undefined) {
    const parts = (language.extra ?? []).map(([, source], index) => `(?<extra${index}>${source})`);
    const blocks = (language.blocks ?? []).map(([begin]) => escaped(begin));
    if (blocks.length) parts.push(`(?<block>${blocks.join("|")})`);
    const comments = language.line.map((sign) => (sign === "#" ? "(?<![\\w$&])#.*" : `${escaped(sign)}.*`));
    if (comments.length) parts.push(`(?<comment>${comments.join("|")})`);
    const strings = (language.quotes ?? []).map((quote) => `${quote}(?:[^${quote}\\\\]|\\\\.)*${quote}?`);
    if (strings.length) parts.push(`(?<string>${strings.join("|")})`);
    parts.push(`(?<number>${NUMBER})`, "(?<word>[A-Za-z_]\\w*)");
    pattern = new RegExp(parts.join("|"), "g");
    if (!strings.length) pattern = new RegExp(`${pattern.source}|(?<string>(?!))`, "g");
    patterns.set(language, pattern);
  }
  return pattern;
}

function escaped(text) {
  return text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
}
