// A conversation's settings; new ones begin with those that were last set.

import { faultOfTools, NO_SETTINGS } from "./conversation.js";

const STORED = "tessera-settings";
const dialog = document.getElementById("settings");
const form = document.getElementById("settings-form");
const fault = document.getElementById("settings-fault");

/** The settings that new conversations begin with. */
export function storedSettings() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return Object.fromEntries(Object.entries(found).filter(([name]) => Object.hasOwn(NO_SETTINGS, name)));
  } catch {
    return {};
  }
}

export function storeSettings(settings) {
  try {
    localStorage.setItem(STORED, JSON.stringify(settings));
  } catch {
    // No room: they hold for this conversation alone.
  }
}

/** Show `settings` and, once saved, call `onSave` with the changed ones. */
export function editSettings(settings, onSave) {
  for (const [name, value] of Object.entries(settings)) {
    if (form.elements[name]) form.elements[name].value = value ?? "";
  }
  fault.textContent = "";
  form.onsubmit = (event) => {
    event.preventDefault();
    const changed = { ...settings, ...read() };
    fault.textContent = faultOfTools(changed.tools);
    if (fault.textContent) {
      form.elements.tools.focus();
      return;
    }
    dialog.close();
    storeSettings(changed);
    onSave(changed);
  };
  dialog.showModal();
}

function read() {
  const found = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "number") found[field.name] = field.value === "" ? null : Number(field.value);
    else found[field.name] = field.value;
  }
  return found;
}

document.getElementById("settings-reset").addEventListener("click", () => {
  for (const field of form.elements) if (field.name) field.value = "";
});
document.getElementById("settings-cancel").addEventListener("click", () => dialog.close());
