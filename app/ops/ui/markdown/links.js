// Links: what stands behind a text in brackets, addresses in text, and which addresses are safe.

import { ASCII_PUNCTUATION, plain } from "./characters.js";

const MAX_DESTINATION = 2000;
const MAX_TITLE = 1000;
const MAX_PARENTHESES = 32;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const AUTOLINK = /<([a-zA-Z][a-zA-Z0-9+.-]{1,31}:[^\s<>]{0,2000})>/y;
const MAIL = /<([a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,250}))>/y;
const BARE = /:\/\/[^\s<>"`]{1,2000}/y;
const CLOSING = { '"': '"', "'": "'", "(": ")" };

/** The address if a link may lead there; null otherwise. Only whole addresses of http, https and mailto may. */
export function safeAddress(address) {
  let url;
  try {
    url = new URL(address.replaceAll("\\", "%5C")); // which browsers would take for a slash
  } catch {
    return null;
  }
  return SCHEMES.has(url.protocol) ? url.href : null;
}

/** `(destination "title")` at a position: `{ destination, title, end }`, or null. */
export function linkTail(text, position) {
  if (text[position] !== "(") return null;
  let place = spaces(text, position + 1);
  const found = text[place] === "<" ? bracketed(text, place) : unbracketed(text, place);
  if (found === null) return null;
  let title = "";
  place = spaces(text, found.end);
  if (place > found.end && text[place] in CLOSING) {
    const close = titleEnd(text, place);
    if (close < 0) return null;
    title = plain(text.slice(place + 1, close));
    place = spaces(text, close + 1);
  }
  return text[place] === ")" ? { destination: plain(found.destination), title, end: place + 1 } : null;
}

function spaces(text, position) {
  let place = position;
  while (place < text.length && place - position < 100 && /[ \t\n]/.test(text[place])) place += 1;
  return place;
}

function bracketed(text, begin) {
  const most = Math.min(text.length, begin + MAX_DESTINATION);
  for (let place = begin + 1; place < most; place += 1) {
    const sign = text[place];
    if (sign === ">") return { destination: text.slice(begin + 1, place), end: place + 1 };
    if (sign === "<" || sign === "\n") return null;
    if (sign === "\\") place += 1;
  }
  return null;
}

function unbracketed(text, begin) {
  const most = Math.min(text.length, begin + MAX_DESTINATION);
  let depth = 0;
  let place = begin;
  for (; place < most; place += 1) {
    const sign = text[place];
    if (sign === "\\" && ASCII_PUNCTUATION.test(text[place + 1] ?? "")) place += 1;
    else if (sign === "(") {
      depth += 1;
      if (depth > MAX_PARENTHESES) return null;
    } else if (sign === ")") {
      if (depth === 0) break;
      depth -= 1;
    } else if (sign <= " " || sign === "\u007f") break;
  }
  return depth === 0 ? { destination: text.slice(begin, place), end: place } : null;
}

function titleEnd(text, begin) {
  const closing = CLOSING[text[begin]];
  const most = Math.min(text.length, begin + MAX_TITLE);
  for (let place = begin + 1; place < most; place += 1) {
    if (text[place] === "\\") place += 1;
    else if (text[place] === closing) return place;
    else if (closing === ")" && text[place] === "(") return -1;
  }
  return -1;
}

/** `<https://...>` or `<name@host>` at a position: `{ address, label, end }`, or null. */
export function autolink(text, position) {
  AUTOLINK.lastIndex = MAIL.lastIndex = position;
  let match = AUTOLINK.exec(text);
  if (match) return { address: match[1], label: match[1], end: position + match[0].length };
  match = MAIL.exec(text);
  return match ? { address: `mailto:${match[1]}`, label: match[1], end: position + match[0].length } : null;
}

/** The rest of an address in plain text, from its `://`; without the signs that end a sentence. Null if there is none. */
export function bareTail(text, position) {
  BARE.lastIndex = position;
  const match = BARE.exec(text);
  if (!match) return null;
  let tail = match[0];
  let surplus = 0;
  for (const sign of tail) surplus += sign === ")" ? 1 : sign === "(" ? -1 : 0;
  for (;;) {
    const last = tail[tail.length - 1];
    if (last === ")" && surplus > 0) surplus -= 1;
    else if (!/[?!.,:;*_~'\]|\\$]/.test(last)) break;
    tail = tail.slice(0, -1);
  }
  return tail.length > 3 ? tail : null;
}
