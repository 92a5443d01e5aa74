// What is known of one chunk, shown beside it; and the menu of what can be done with it.

import { bytes, count, el, find } from "./dom.js";
import { statOf } from "./stats.js";
import { HOWS, shares, tierOf } from "./strip.js";

let peeking = 0;
let anchor = null;
let menu = null;

function rows(part) {
  const all = shares(part);
  const how = HOWS.filter(({ how: each }) => all[each])
    .map(({ how: each, sign }) => `${sign} ${count(all[each])} ${each}`).join("  ");
  const end = part.position + part.n_tokens;
  const slice = part.start ? `, from its token ${count(part.start)}` : "";
  return [
    ["chunk", `#${part.id}, ${part.kind}`],
    ["tokens", `${count(part.n_tokens)}, at ${count(part.position)} to ${count(end)}${slice}`],
    ["how", how],
    ...(part.why ? [["why", part.why]] : []),
    ["moved", part.moved ? `by ${part.moved > 0 ? "+" : ""}${count(part.moved)}` : "no"],
    ["saw", part.saw?.length ? `${part.saw.map((id) => `#${id}`).join(" ")}, not before it now` : "only what stands before it"],
    ["tier", `${tierOf(part)}${part.pinned ? ", pinned" : ""}`],
  ];
}

function face(part) {
  const size = el("dd", {}, "…");
  const text = el("p", { class: "preview" }, "…");
  statOf(part.id).then(
    (stat) => { size.textContent = bytes(stat.n_bytes); text.textContent = stat.text || "(no text)"; },
    (error) => { size.textContent = "-"; text.textContent = error.message; },
  );
  return el("div", { class: "face" }, el("p", { class: "title" }, part.name),
    el("dl", {}, rows(part).map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]).flat(),
      el("dt", {}, "bytes"), size),
    text);
}

function place(box, at) {
  box.hidden = false;
  const margin = 8;
  const from = at.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const left = Math.min(from.left, innerWidth - size.width - margin);
  const below = from.bottom + 6;
  const above = from.top - size.height - 6;
  const top = below + size.height <= innerHeight - margin || above < margin ? below : above;
  box.style.left = `${Math.max(margin, left)}px`;
  box.style.top = `${Math.max(margin, Math.min(top, innerHeight - size.height - margin))}px`;
}

/** Show the card of a part beside its chunk. */
export function peek(part, at) {
  clearTimeout(peeking);
  if (menu) return;
  peeking = setTimeout(() => {
    if (!at.isConnected || menu) return;
    const card = find("card");
    card.replaceChildren(face(part));
    at.setAttribute("aria-describedby", "card");
    anchor = at;
    place(card, at);
  }, 120);
}

export function unpeek() {
  clearTimeout(peeking);
  anchor?.removeAttribute("aria-describedby");
  anchor = null;
  find("card").hidden = true;
}

export function closeMenu() {
  if (!menu) return;
  const { box, at } = menu;
  menu = null;
  box.remove();
  if (at.isConnected) at.focus();
}

/** Open a menu of `[label, action]` at a button; the card of `part` is its head, if given. */
export function openMenu(at, entries, part = null, label = "Actions") {
  unpeek();
  closeMenu();
  const items = entries.map(([text, action, note]) => el("button", {
    type: "button", role: "menuitem", tabindex: -1,
    onclick: () => { closeMenu(); action(); },
  }, text, note ? el("span", { class: "soft" }, note) : null));
  const box = el("div", { class: "card menu" }, part ? face(part) : null,
    el("div", { role: "menu", "aria-label": part ? `Actions on ${part.name}` : label }, items));
  box.addEventListener("keydown", (event) => {
    const here = items.indexOf(document.activeElement);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1 + items.length, Home: 0, End: items.length - 1 }[event.key];
    if (to !== undefined) items[to % items.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") closeMenu();
    else return;
    event.preventDefault();
  });
  document.body.append(box);
  menu = { box, at };
  place(box, at);
  // the text of the chunk comes later, and must not push the menu out of the window
  new ResizeObserver(() => box.isConnected && place(box, at)).observe(box);
  items[0]?.focus({ preventScroll: true });
}

addEventListener("pointerdown", (event) => {
  if (menu && !menu.box.contains(event.target)) closeMenu();
});
addEventListener("scroll", unpeek, { capture: true, passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && unpeek());
