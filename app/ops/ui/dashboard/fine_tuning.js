// Fine-tuning jobs with their losses, from /status.json.

import { make } from "../dom/element.js";
import { replaceRows } from "./figures.js";
import { whole } from "./numbers.js";

const WIDTH = 120;
const HEIGHT = 32;
const TITLES = ["job", "model", "status", "step", "loss", "validation", "loss by step"];
const UNKNOWN = "–";

const fixed = (value) => (value === null || value === undefined ? UNKNOWN : value.toFixed(4));

function drawLosses({ losses, num_steps }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const most = Math.max(1e-9, ...losses.map(([, loss]) => loss));
  const points = losses.map(([step, loss]) => [(WIDTH * step) / Math.max(1, num_steps), HEIGHT - 1 - ((HEIGHT - 3) * loss) / most]);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L ");
  const label = losses.length ? `Loss from ${fixed(losses[0][1])} to ${fixed(losses[losses.length - 1][1])}` : "No loss yet";
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "line", role: "img", "aria-label": label })) {
    svg.setAttribute(name, value);
  }
  for (const [kind, path] of [["area", line && `M ${points[0][0].toFixed(1)} ${HEIGHT} L ${line} L ${points[points.length - 1][0].toFixed(1)} ${HEIGHT} Z`], ["stroke", line && `M ${line}`]]) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
    element.setAttribute("class", kind);
    element.setAttribute("d", path);
    svg.append(element);
  }
  return svg;
}

function makeRow(job) {
  const last = job.losses[job.losses.length - 1];
  const cells = [job.model, job.status, job.num_steps ? `${whole(job.step)} of ${whole(job.num_steps)}` : UNKNOWN, fixed(last?.[1]), fixed(job.validation_loss)];
  return make("tr", {}, make("th", { scope: "row" }, job.id), ...cells.map((text) => make("td", {}, text)), make("td", {}, drawLosses(job)));
}

/** `jobs` is null where the server has no fine-tuning. */
export function showFineTuning(jobs) {
  document.getElementById("fine-tuning-card").hidden = !jobs?.length;
  if (!jobs?.length) return;
  const head = make("thead", {}, make("tr", {}, ...TITLES.map((title) => make("th", { scope: "col" }, title))));
  replaceRows(document.getElementById("fine-tuning"), [head, make("tbody", {}, ...jobs.map(makeRow))]);
}
