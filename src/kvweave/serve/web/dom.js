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

/** Whether the server named this context, for a client that speaks to OpenAI's endpoints. */
export const isAuto = (name) => /^auto\/[0-9a-f]{8}/.test(name);

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

/** How long ago a time was, in words. */
export function ago(time) {
  const s = Math.max(0, Date.now() / 1000 - time);
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  return s < 129600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
}

/** A ratio, rounded down, so that it never says more than was measured. */
export function times(n) {
  const floor = n < 10 ? Math.floor(n * 10) / 10 : Math.floor(n);
  return `${n < 10 ? floor.toFixed(1) : count(floor)}x`;
}

/** Call `then` once, after a time during which nobody pointed at the box or was in it. Returns a way to stop. */
export function unhurried(box, ms, then) {
  let timer = 0;
  let left = ms;
  let since = 0;
  let over = false;
  const stop = () => { over = true; clearTimeout(timer); };
  const go = () => {
    if (over || timer) return;
    since = Date.now();
    timer = setTimeout(() => { stop(); then(); }, left);
  };
  const rest = () => {
    if (!timer) return;
    clearTimeout(timer);
    timer = 0;
    left = Math.max(1500, left - (Date.now() - since));
  };
  for (const event of ["pointerenter", "focusin"]) box.addEventListener(event, rest);
  for (const event of ["pointerleave", "focusout"]) box.addEventListener(event, go);
  go();
  return stop;
}

/**
 * Show a notice; an error stays until it is closed, anything else for a few seconds.
 * action: [label, what to do], a button. Returns the notice.
 */
export function toast(message, { hint = "", error = false, action = null, stays = error } = {}) {
  const box = find("toasts");
  const close = () => note.remove();
  const note = el("div", { class: error ? "toast error" : "toast" },
    el("div", {}, el("p", {}, message), hint ? el("p", { class: "soft" }, hint) : null),
    el("span", { class: "deeds" },
      action ? el("button", { type: "button", onclick: () => { close(); action[1](); } }, action[0]) : null,
      el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: close }, "×")));
  const same = [...box.children].find((other) => other.textContent === note.textContent);
  same?.remove();
  box.append(note);
  while (box.children.length > 4) box.firstChild.remove();
  if (!stays) unhurried(note, 6000, close);
  return note;
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
