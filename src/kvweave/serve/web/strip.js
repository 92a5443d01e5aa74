// A context as a strip of chunks: width is tokens, colour is how; a pattern marks what is not in memory.

import { el, count, plural } from "./dom.js";
import { wordsOf } from "./stats.js";

export const HOWS = [
  { how: "exact", sign: "=", says: "exact: the KV of a full prefill" },
  { how: "reused", sign: "≈", says: "reused: placed and rotated, approximate" },
  { how: "repaired", sign: "↻", says: "repaired: recomputed in this context" },
  { how: "prefilled", sign: "+", says: "prefilled: computed for the first time" },
];
const MARKED = ["disk", "remote", "none"]; // tiers with a pattern; what is in memory has none
const SIGN = Object.fromEntries(HOWS.map(({ how, sign }) => [how, sign]));
const LEAST = 9; // pixels of the narrowest chunk
const GAP = 2;
const SIGNED = 18; // pixels from which a chunk shows its sign
const NAMED = 46; // pixels from which a chunk shows its name and its tokens
const QUOTED = 76; // pixels from which it shows its first words too
const WORTH = 0.5; // of a strip has to be that wide, or there is no line of names
const READ = 40; // texts asked for, at most, for one strip

/** Split a part's or a span's tokens by how they got their KV. */
export function shares(part) {
  const repaired = part.n_repaired ?? 0;
  const prefilled = part.n_prefilled ?? 0;
  const rest = Math.max(0, part.n_tokens - repaired - prefilled);
  const kept = part.how === "prefix" && part.exact !== false ? "exact" : "reused";
  const all = { exact: 0, reused: 0, repaired, prefilled };
  all[kept] = rest;
  return all;
}

/** The one word for a part: what most tells it apart from a full prefill. */
export function howOf(part) {
  const all = shares(part);
  if (all.exact + all.reused === 0) return all.prefilled ? "prefilled" : "repaired";
  if (all.repaired) return "repaired";
  return all.exact ? "exact" : "reused";
}

export const tierOf = (part) => (part.tier === "-" || !part.tier ? "none" : part.tier);

export function describe(part) {
  const all = shares(part);
  const how = HOWS.filter(({ how: each }) => all[each])
    .map(({ how: each }) => `${count(all[each])} ${each}`).join(", ");
  const words = [part.name, `#${part.id}`, part.kind, plural(part.n_tokens, "token"), how,
    `tier ${tierOf(part)}`, part.pinned ? "pinned" : ""];
  return words.filter(Boolean).join(", ");
}

/** Pixels of each chunk: in proportion to tokens, none below `least`, `room` in all if it can be. */
export function widths(tokens, room, least = LEAST) {
  const result = tokens.map(() => least);
  let open = tokens.map((_, index) => index);
  for (;;) {
    const taken = least * (tokens.length - open.length);
    const sum = open.reduce((total, index) => total + tokens[index], 0);
    const scale = (room - taken) / sum;
    const narrow = open.filter((index) => tokens[index] * scale < least);
    if (!narrow.length || scale <= 0) {
      for (const index of open) result[index] = Math.max(least, tokens[index] * scale);
      return result;
    }
    open = open.filter((index) => tokens[index] * scale >= least);
    if (!open.length) return result;
  }
}

/** Widths for a strip of `width` pixels that wraps when one line would be all narrow chunks. */
export function wrapped(tokens, width) {
  const lines = Math.max(1, Math.ceil((tokens.length * (LEAST + GAP) * 1.8) / width));
  const gaps = GAP * (Math.ceil(tokens.length / lines) - 1);
  const room = lines === 1 ? width - gaps : lines * (width * 0.94 - gaps);
  return widths(tokens, room).map((each) => Math.floor(Math.min(each, width)));
}

const shortName = (part) => part.name.split("/").pop();

function chunk(part, { onopen, onpeek, onleave }) {
  const all = shares(part);
  const how = howOf(part);
  const bar = el("span", { class: "bar", data: { tier: tierOf(part) } },
    HOWS.filter(({ how: each }) => all[each]).map(({ how: each }) => {
      const share = el("i", { data: { how: each } });
      share.style.flexGrow = all[each];
      return share;
    }));
  const button = el("button", {
    type: "button", class: "chunk", tabindex: -1, "aria-label": describe(part),
    "aria-haspopup": "menu", data: { how, tier: tierOf(part), id: part.id },
    onclick: () => onopen(part, button),
    onpointerenter: (event) => event.pointerType === "mouse" && onpeek(part, button),
    onpointerleave: onleave,
    onfocus: () => button.matches(":focus-visible") && onpeek(part, button),
    onblur: onleave,
  },
  part.pinned ? el("span", { class: "pin", "aria-hidden": "true" }) : null,
  bar,
  el("span", { class: "size", "aria-hidden": "true", data: { how: HOWS.find(({ how: each }) => all[each])?.how ?? how } },
    el("b", {}, SIGN[how]), el("span", {}, ` ${count(part.n_tokens)}`)),
  el("span", { class: "name", "aria-hidden": "true" }, shortName(part)),
  el("span", { class: "words", "aria-hidden": "true" }));
  return button;
}

/** Make a strip; `layout()` fits it to its width. Arrow keys walk over its chunks. */
export function strip(name, parts, actions) {
  const items = parts.map((part) => chunk(part, actions));
  const list = el("ol", { class: "strip", "aria-label": `Chunks of ${name}` },
    items.map((item) => el("li", {}, item)));
  if (items.length) items[0].tabIndex = 0;
  list.addEventListener("focusin", (event) => {
    for (const item of items) item.tabIndex = item === event.target ? 0 : -1;
  });
  list.addEventListener("keydown", (event) => walk(event, items));
  const layout = () => {
    const width = list.clientWidth;
    if (!width) return;
    const sizes = wrapped(parts.map((part) => part.n_tokens), width);
    items.forEach((item, index) => {
      item.style.width = `${sizes[index]}px`;
      item.classList.toggle("tiny", sizes[index] < SIGNED);
      item.classList.toggle("small", sizes[index] < NAMED);
      item.classList.toggle("brief", sizes[index] < QUOTED);
    });
    const quoted = parts.filter((part, index) => sizes[index] >= QUOTED);
    const whole = sizes.reduce((sum, size) => sum + size, 0);
    const wide = sizes.reduce((sum, size) => sum + (size >= NAMED ? size : 0), 0);
    list.classList.toggle("wordless", !quoted.length);
    list.classList.toggle("dense", wide < WORTH * whole);
    if (wide >= WORTH * whole) quote(items, parts, quoted.slice(0, READ));
  };
  new ResizeObserver(layout).observe(list);
  return { list, items };
}

/** Show the first words of chunks; those of a slice begin elsewhere than its chunk. */
function quote(items, parts, shown) {
  for (const part of shown.filter(({ start }) => !start)) {
    const box = items[parts.indexOf(part)].querySelector(".words");
    if (!box.textContent) wordsOf(part.id, (words) => { box.textContent = words; });
  }
}

function walk(event, items) {
  const here = items.indexOf(document.activeElement);
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: items.length - 1 }[event.key];
  if (here < 0 || to === undefined) return;
  event.preventDefault();
  items[Math.min(items.length - 1, Math.max(0, to))].focus();
}

/** A thin bar of a plan's counts. */
export function split(counts) {
  const all = { exact: counts.exact, reused: counts.reused, repaired: counts.repaired, prefilled: counts.prefilled };
  const bar = el("span", { class: "split", "aria-hidden": "true" });
  for (const { how } of HOWS) {
    if (!all[how]) continue;
    const share = el("i", { data: { how } });
    share.style.flexGrow = all[how];
    bar.append(share);
  }
  return bar;
}

/** A plan's counts in words, each with its sign. */
export function tally(counts) {
  return HOWS.map(({ how, sign }) => el("span", { class: "tally", data: { how, zero: !counts[how] } },
    el("i", { "aria-hidden": "true" }, sign), ` ${count(counts[how])} ${how}`));
}

export function legend() {
  return [
    ...HOWS.map(({ how, sign, says }) => el("li", { title: says },
      el("span", { class: "key-box", data: { how } }), el("b", { "aria-hidden": "true" }, sign), ` ${how}`)),
    el("li", { class: "axis" }, "not in memory"),
    ...MARKED.map((tier) => el("li", {},
      el("span", { class: "key-box bar", data: { tier } }, el("i", { data: { how: "plain" } })), ` ${tier}`)),
    el("li", {}, el("span", { class: "pin" }), " pinned"),
  ];
}
