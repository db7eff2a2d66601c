// The nodes of a paragraph as elements. What has not changed since the last time stays as it is.

import { make } from "../dom/element.js";
import { parseInlines } from "./inline_parser.js";
import { formula } from "../maths/formula.js";

const MAX_EAGER = 4096; // characters; a longer text that still grows is shown when it has grown by a quarter

export class InlineView {
  constructor(element) {
    this.element = element;
    this.shown = []; // keys of the nodes that are shown
    this.length = -1;
  }

  /** Show `lines`, which have `size` characters. `final`: they will not change any more. */
  update(lines, size, final) {
    if (!final && size > MAX_EAGER && size > this.length && size < 1.25 * this.length) return;
    this.length = size;
    this.show(parseInlines(lines.join("\n").trimEnd()));
  }

  show(nodes) {
    const keys = nodes.map((node) => JSON.stringify(node));
    const { element, shown } = this;
    let same = 0;
    while (same < keys.length && keys[same] === shown[same]) same += 1;
    if (same === keys.length && same === shown.length) return;
    let next = same;
    const old = element.childNodes[same];
    if (same === shown.length - 1 && nodes[same]?.type === "text" && old.nodeType === Node.TEXT_NODE) {
      grow(old, nodes[same].text);
      next += 1;
    } else {
      while (element.childNodes.length > same) element.lastChild.remove();
    }
    if (next < nodes.length) element.append(inlineFragment(nodes.slice(next)));
    this.shown = keys;
  }
}

function grow(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

/** New elements for nodes of `parseInlines`, one for each. */
export function inlineFragment(nodes) {
  const fragment = document.createDocumentFragment();
  for (const node of nodes) fragment.append(inlineElement(node));
  return fragment;
}

function inlineElement(node) {
  switch (node.type) {
    case "text": return document.createTextNode(node.text);
    case "code": return make("code", {}, node.text);
    case "math": return formula(node.text, node.display);
    case "break": return make("br");
    case "link": return link(node);
    case "strong": return make("strong", {}, inlineFragment(node.children));
    case "deleted": return make("del", {}, inlineFragment(node.children));
    default: return make("em", {}, inlineFragment(node.children));
  }
}

/** Images are links too: the page loads nothing from elsewhere. */
function link({ address, title, image, children }) {
  const attributes = { href: address, title: title || null, target: "_blank", rel: "noopener noreferrer" };
  const element = make("a", attributes, inlineFragment(children));
  if (image) {
    element.className = "image";
    if (!children.length) element.append("image");
  }
  return element;
}
