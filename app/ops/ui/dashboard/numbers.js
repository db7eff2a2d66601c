// Numbers as people read them.

export const whole = (value) => Math.round(value).toLocaleString("en");

export function short(value, unit = "") {
  const prefixes = ["", "k", "M", "G", "T"];
  let power = 0;
  while (value >= 999.5 && power < prefixes.length - 1) { value /= 1000; power += 1; }
  const digits = power === 0 && Number.isInteger(value) ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)}${unit || prefixes[power] ? " " : ""}${prefixes[power]}${unit}`.trim();
}

export const bytes = (value) => short(value, "B");

export function rate(value) {
  return value >= 99.5 ? whole(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
