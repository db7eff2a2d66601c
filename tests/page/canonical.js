// Rendered Markdown as a short text, from the page's elements or from HTML, so that the two can be compared.

globalThis.canonical = function (root, isOwn) {
  const address = (text) => {
    try {
      return new URL(text.replaceAll("\\", "%5C")).href;
    } catch {
      return "";
    }
  };
  const link = (href, title, inside) => (/^(https?|mailto):/.test(href) ? `[a ${href} ${title}|${inside}]` : inside);
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data.replace(/\s+/g, " ");
    const name = node.localName;
    const inside = () => [...node.childNodes].map(walk).join("");
    if (name === (isOwn ? "figure" : "pre")) return `[pre ${node.querySelector("code").textContent.trimEnd()}]`;
    if (/^h\d$/.test(name)) return `[h${isOwn ? node.localName[1] - 2 : Math.min(4, node.localName[1])} ${inside().trim()}]`;
    if (isOwn && name === "div") return inside();
    if (name === "a") return link(address(node.getAttribute("href")), node.title, inside());
    if (name === "img") return link(address(node.getAttribute("src")), node.title, node.alt || "image");
    if (name === "p") {
      const isTight = isOwn && node.matches(".tight > li > p");
      return isTight ? inside().trim() : `[p ${inside().trim()}]`;
    }
    if (name === "s") return `[del ${inside()}]`;
    if (name === "code") return `[code ${inside().trim()}]`;
    const number = name === "ol" ? node.getAttribute("start") ?? "" : "";
    const isBlock = ["ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "td", "th"].includes(name);
    return `[${name}${number} ${isBlock ? inside().trim() : inside()}]`;
  };
  const text = [...root.childNodes].map(walk).join("").replace(/\s+/g, " ");
  return text.replace(/ ?\[(p|ul|ol|li|blockquote|pre|h\d|hr|table|br)/g, "[$1").replace(/\] ?/g, "]").replace("[tbody ]", "").trim();
};

globalThis.canonicalHtml = (html) => canonical(new DOMParser().parseFromString(html, "text/html").body, false);

/** `step`: how many characters come at a time. */
globalThis.canonicalMarkdown = function (StreamedMarkdown, text, step) {
  const element = document.createElement("div");
  const markdown = new StreamedMarkdown(element);
  for (let begin = 0; begin < text.length; begin += step) markdown.append(text.slice(begin, begin + step));
  markdown.end();
  return canonical(element, true);
};
