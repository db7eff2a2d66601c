// The list of conversations: search, choose, and a menu for each.

import { make } from "../dom/element.js";
import { iconButton } from "./message_view.js";

const SEARCH_DELAY = 150; // milliseconds without a key
const DAY = 24 * 60 * 60 * 1000;

export class ConversationList {
  /** `actions`: open(id), and what the menu's buttons name with data-do: (id) => .... */
  constructor(database, actions) {
    this.database = database;
    this.actions = actions;
    this.list = document.getElementById("conversations");
    this.search = document.getElementById("search");
    this.menu = document.getElementById("conversation-menu");
    this.current = null;
    this.running = () => false;
    this.menuFor = null;
    this.shown = "";
    let timer = null;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.show(), SEARCH_DELAY);
    });
    this.list.addEventListener("click", (event) => this.onClick(event));
    this.menu.addEventListener("click", (event) => {
      const name = event.target.closest("[data-do]")?.dataset.do;
      this.menu.hidePopover();
      if (name) this.actions[name](this.menuFor);
    });
  }

  async show() {
    const query = this.search.value.trim();
    const found = query ? await this.database.search(query) : this.database.list();
    if (query !== this.search.value.trim()) return; // a later search has its own results
    const shown = found.map(({ id, title, updated }) => [id, title, groupOf(updated), this.running(id)]);
    const key = JSON.stringify([query, this.current, shown]);
    if (key === this.shown) return;
    this.shown = key;
    const rows = [];
    let group = "";
    for (const summary of found) {
      const name = groupOf(summary.updated);
      if (name !== group) rows.push(make("li", { class: "group" }, name));
      group = name;
      rows.push(this.row(summary));
    }
    if (!rows.length) rows.push(make("li", { class: "group" }, query ? "Nothing found" : "No conversations yet"));
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    this.list.replaceChildren(...rows);
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] .open`)?.focus();
  }

  row({ id, title }) {
    const isCurrent = id === this.current;
    const open = make("button", { type: "button", class: "open", title, "aria-current": isCurrent ? "true" : null }, title);
    if (this.running(id)) open.append(make("span", { class: "dot", role: "img", "aria-label": "answering" }));
    const more = iconButton("more", `Menu of ${title}`, { "aria-haspopup": "true" });
    more.classList.add("more");
    return make("li", { "data-id": id }, open, more);
  }

  onClick(event) {
    const id = event.target.closest("li")?.dataset.id;
    if (!id) return;
    if (event.target.closest(".open")) this.actions.open(id);
    const more = event.target.closest(".more");
    if (more) this.openMenu(id, more);
  }

  openMenu(id, button) {
    this.menuFor = id;
    this.menu.showPopover();
    const place = button.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.menu;
    this.menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - offsetWidth - 8))}px`;
    this.menu.style.top = `${Math.min(place.bottom + 4, innerHeight - offsetHeight - 8)}px`;
    this.menu.querySelector("button").focus();
  }
}

function groupOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "Last 7 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
