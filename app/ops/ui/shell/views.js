// The page's two views, chat and dashboard, as tabs; the address says which.

const tabs = [...document.querySelectorAll("[role=tab]")];
const listeners = [];

/** Call `listener(name)` whenever another view is shown. */
export function onView(listener) {
  listeners.push(listener);
}

export function currentView() {
  return document.body.dataset.view;
}

export function showView(name) {
  const shown = tabs.some((tab) => tab.dataset.view === name && !tab.hidden) ? name : "dashboard";
  if (shown === currentView()) return;
  document.body.dataset.view = shown;
  for (const tab of tabs) {
    const selected = tab.dataset.view === shown;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  const hash = shown === "dashboard" ? "#dashboard" : "";
  if (location.hash !== hash) history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
  for (const listener of listeners) listener(shown);
}

/** A model that makes no text has no chat. */
export function allowChat(allowed) {
  tabs.find((tab) => tab.dataset.view === "chat").hidden = !allowed;
  if (!allowed) showView("dashboard");
}

for (const tab of tabs) {
  tab.addEventListener("click", () => showView(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const others = tabs.filter((each) => !each.hidden);
    const step = event.key === "ArrowRight" ? 1 : others.length - 1;
    const next = others[(others.indexOf(tab) + step) % others.length];
    showView(next.dataset.view);
    next.focus();
  });
}
addEventListener("hashchange", () => showView(location.hash === "#dashboard" ? "dashboard" : "chat"));
