// Copying a text.

import { make } from "../dom/element.js";

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // on plain HTTP, where pages have no clipboard
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}
