// Puts the page together.

import { startChat } from "./chat/chat.js";
import { startDashboard } from "./dashboard/dashboard.js";
import { installShortcuts } from "./shell/shortcuts.js";
import "./shell/theme.js";
import { allowChat, onView, showView } from "./shell/views.js";

const at = (id) => document.getElementById(id);

function setDrawer(open) {
  document.body.classList.toggle("drawer-open", open);
  at("drawer").setAttribute("aria-expanded", String(open));
}

const chat = await startChat();
at("drawer").addEventListener("click", () => setDrawer(!document.body.classList.contains("drawer-open")));
at("backdrop").addEventListener("click", () => setDrawer(false));
at("new").addEventListener("click", () => chat.begin());
at("open-settings").addEventListener("click", () => chat.settings());
at("import").addEventListener("click", () => at("import-file").click());
at("export-all").addEventListener("click", () => chat.exportAll());
at("remove-all").addEventListener("click", () => at("sure").showModal());
at("sure").addEventListener("close", () => {
  if (at("sure").returnValue === "yes") chat.removeAll();
  at("sure").returnValue = "";
});
at("rename-cancel").addEventListener("click", () => at("rename").close());
installShortcuts(chat, setDrawer);
onView((name) => {
  if (name === "chat") chat.composer.focus();
});
showView(location.hash === "#dashboard" ? "dashboard" : "chat");
startDashboard((served) => {
  allowChat(served.generates);
  chat.setServed(served.models, served.takesConversations);
});
