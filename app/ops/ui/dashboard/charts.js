// Charts of the last hour: one line each, with its highest value, and the figure under the pointer.

import { make } from "../dom/element.js";
import { percent, rate, seconds, whole } from "./numbers.js";

const WIDTH = 240;
const HEIGHT = 64;
const CHARTS = [
  ["Tokens out", "generation_tokens", (value) => `${rate(value)}/s`],
  ["Tokens in", "prompt_tokens", (value) => `${rate(value)}/s`],
  ["Requests", "requests", (value) => `${rate(value)}/s`],
  ["Running", "running", whole],
  ["Waiting", "waiting", whole],
  ["KV cache in use", "kv_usage", percent],
  ["TTFT, median", "ttft", seconds],
  ["ITL, median", "itl", seconds],
];

class Chart {
  constructor([title, name, format]) {
    this.name = name;
    this.format = format;
    this.title = title;
    this.value = make("b");
    this.time = make("span", { class: "quiet" });
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [attribute, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "line", role: "img" })) {
      this.svg.setAttribute(attribute, value);
    }
    this.paths = ["area", "stroke"].map((kind) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", kind);
      this.svg.append(path);
      return path;
    });
    this.element = make("figure", {}, make("figcaption", {}, `${title} `, this.value, this.time), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.label(null));
  }

  draw(points, span) {
    this.points = points;
    this.span = span;
    const values = points.map((point) => point[this.name]).filter((value) => value !== null);
    const most = Math.max(1e-9, ...values);
    const runs = [[]]; // a line ends where nothing is known
    for (const point of points) {
      if (point[this.name] === null) runs.push([]);
      else runs[runs.length - 1].push([WIDTH * (1 - point.age / span), HEIGHT - 2 - ((HEIGHT - 6) * point[this.name]) / most]);
    }
    const drawn = runs.filter((run) => run.length > 0);
    const lines = drawn.map((run) => run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L "));
    this.paths[1].setAttribute("d", lines.map((line) => `M ${line}`).join(" "));
    this.paths[0].setAttribute("d", drawn.map((run, index) => `M ${run[0][0].toFixed(1)} ${HEIGHT} L ${lines[index]} L ${run[run.length - 1][0].toFixed(1)} ${HEIGHT} Z`).join(" "));
    this.svg.setAttribute("aria-label", values.length ? `${this.title}: at most ${this.format(Math.max(...values))} in the last hour` : `${this.title}: nothing yet`);
    this.most = values.length ? Math.max(...values) : null;
    this.label(null);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const age = this.span * (1 - (event.clientX - box.left) / box.width);
    let nearest = null;
    for (const each of this.points) {
      if (each[this.name] !== null && (nearest === null || Math.abs(each.age - age) < Math.abs(nearest.age - age))) nearest = each;
    }
    this.label(nearest);
  }

  label(point) {
    if (point !== null) {
      this.value.textContent = this.format(point[this.name]);
      this.time.textContent = ` ${Math.round(point.age / 60)} min ago`;
    } else {
      this.value.textContent = this.most === null ? "–" : this.format(this.most);
      this.time.textContent = this.most === null ? "" : " at most";
    }
  }
}

const charts = CHARTS.map((chart) => new Chart(chart));

/** Draw the points of /status/history.json. */
export function drawHour({ points, seconds: span }) {
  const hour = document.getElementById("hour");
  if (!hour.childElementCount) hour.append(...charts.map((chart) => chart.element));
  const oldest = Math.max(60, ...points.map((point) => point.age));
  document.getElementById("hour-note").textContent = oldest < span - 60 ? `${Math.round(oldest / 60)} minutes so far` : "";
  for (const chart of charts) chart.draw(points, Math.min(span, oldest));
}
