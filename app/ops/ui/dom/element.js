// Elements, made one by one: nothing that a model writes is ever parsed as HTML.

/** `make("a", { class: "x", href: "y" }, "text", child)`; null and undefined children are left out. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(attribute, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(attribute, value);
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}
