// Asks the server for its figures while the page is seen: often for the dashboard, seldom for the chat.

import { fetchWithKey } from "../shell/key.js";
import { currentView, onView } from "../shell/views.js";
import { drawHour } from "./charts.js";
import { showEngine, showFigures, showState } from "./figures.js";
import { showUse } from "./use_tables.js";

const INTERVAL = 1000; // milliseconds
const CHAT_INTERVAL = 5000;
const HISTORY_INTERVAL = 15000;
const TIMEOUT = 5000;

let wake = () => {};
let historyTime = -Infinity;

async function ask(path) {
  const response = await fetchWithKey(path, { signal: AbortSignal.timeout(TIMEOUT) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function refresh(onServed) {
  try {
    const status = await ask("status.json");
    showState(status.state);
    showEngine(status);
    onServed({
      models: status.generating_models,
      takesConversations: status.chat,
      generates: status.engine === null || status.engine.generates,
    });
    if (currentView() !== "dashboard") return;
    showFigures(status);
    showUse(status.use);
    if (performance.now() - historyTime >= HISTORY_INTERVAL) {
      historyTime = performance.now();
      drawHour(await ask("status/history.json"));
    }
  } catch {
    showState({ ready: false, reason: "no answer from the server" });
  }
}

/** `onServed({ models, takesConversations, generates })` is told what the server serves. */
export async function startDashboard(onServed) {
  onView(() => wake());
  document.addEventListener("visibilitychange", () => wake());
  for (;;) {
    if (!document.hidden) await refresh(onServed);
    const interval = currentView() === "dashboard" ? INTERVAL : CHAT_INTERVAL;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, interval);
    });
  }
}
