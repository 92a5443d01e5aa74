// Elements, numbers as people read them, and notices. All text goes in as text nodes.

export const find = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: props are attributes; `on...` are listeners, `data` is the dataset. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(node.dataset, value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const GROUPED = new Intl.NumberFormat("en-US");

export const count = (n) => GROUPED.format(n ?? 0);

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function bytes(n) {
  if (n === null || n === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "-";
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

export function driftOf(plan) {
  if (plan.drift === null || plan.drift === undefined) return "drift unknown";
  return plan.drift === 0 ? "drift 0" : `drift at most ${Number(plan.drift.toPrecision(2))}`;
}

/** Show a notice; an error stays until it is closed, anything else for a few seconds. */
export function toast(message, { hint = "", error = false } = {}) {
  const box = find("toasts");
  const close = () => note.remove();
  const note = el("div", { class: error ? "toast error" : "toast" },
    el("div", {}, el("p", {}, message), hint ? el("p", { class: "soft" }, hint) : null),
    el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: close }, "×"));
  const same = [...box.children].find((other) => other.textContent === note.textContent);
  same?.remove();
  box.append(note);
  while (box.children.length > 4) box.firstChild.remove();
  if (!error) setTimeout(close, 5000);
}

export function failed(error) {
  if (error.name === "AbortError") return;
  toast(error.message, { hint: error.hint, error: true });
}

/** Replace the children of a box only when what they show has changed, so that focus stays. */
export function redraw(box, data, draw) {
  const key = JSON.stringify(data);
  if (drawn.get(box) === key) return;
  drawn.set(box, key);
  box.replaceChildren(...[draw(data)].flat().filter(Boolean));
}

const drawn = new WeakMap();
