// The list of contexts: a strip each, and what an edit of one of its chunks costs.

import { call, path } from "./api.js";
import { closeMenu, forgetStats, openMenu, peek, statOf, unpeek } from "./card.js";
import { count, driftOf, el, failed, find, plural, redraw, seconds, toast } from "./dom.js";
import { edit } from "./editor.js";
import { split, strip, tally } from "./strip.js";

const SHOWN = 24; // cards drawn; the rest waits behind a button
const PER_ROUND = 6; // contexts asked for in one round of polling

const cards = new Map(); // name -> Card
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.dataset.inview = isIntersecting;
});
let limit = SHOWN;
let chosen = "";
let onChoose = () => {};
let onGone = () => {};

const short = (n) => Number(n.toPrecision(2));
const of = (name, verb = "") => `v1/contexts/${path(name)}${verb ? `:${verb}` : ""}`;

/** Tell a part to the server: by id while that is clear, else by index. */
function refOf(part, parts) {
  const twins = parts.filter((other) => other.id === part.id);
  return twins.length === 1 ? `#${part.id}` : part.index;
}

/**
 * The parts as they are drawn: what the last weave made of them, and, from the first part on that was
 * edited since, what the next one would.
 */
export function drawn({ parts, plan }) {
  let same = true;
  return parts.map((part, index) => {
    const span = plan?.spans[index];
    same = same && Boolean(span) && span.id === part.id && span.position === part.position
      && span.n_tokens === part.n_tokens && !part.n_prefilled;
    if (!same) return part;
    const { how, exact, n_repaired, n_prefilled, moved, saw, patched } = span;
    const tier = span.tier === "-" ? part.tier : span.tier;
    return { ...part, how, exact, n_repaired, n_prefilled, moved, saw, patched, tier };
  });
}

class Card {
  constructor(name) {
    this.name = name;
    this.parts = [];
    this.asked = 0;
    this.title = el("button", { type: "button", class: "link", onclick: () => onChoose(name) }, name);
    this.facts = el("span", { class: "count" });
    this.more = el("button", { type: "button", class: "quiet", "aria-haspopup": "menu", "aria-label": `Actions on ${name}`, onclick: () => this.menu() }, "…");
    this.body = el("div", { class: "body" }, el("p", { class: "empty" }, "…"));
    this.cost = el("div", { class: "cost", role: "status", hidden: true });
    this.box = el("article", { class: "context", "aria-label": `Context ${name}`, data: { name } },
      el("div", { class: "line" }, el("h3", {}, this.title), this.facts, this.more), this.body, this.cost);
    seen.observe(this.box);
  }

  summary({ n_tokens, n_parts, busy }) {
    this.busy = busy;
    this.facts.textContent = `${plural(n_tokens, "token")} in ${plural(n_parts, "chunk")}${busy ? ", answering" : ""}`;
    this.box.classList.toggle("busy", Boolean(busy));
  }

  async refresh(signal) {
    this.asked = Date.now();
    const detail = await call("GET", of(this.name), undefined, signal);
    this.show(detail);
    return detail;
  }

  /** An answer was given: what an edit would have cost is no more. */
  settle() {
    this.cost.hidden = true;
  }

  show(detail) {
    this.parts = detail.parts;
    const focused = [...this.body.querySelectorAll(".chunk")].indexOf(document.activeElement);
    redraw(this.body, drawn(detail), (parts) => {
      if (!parts.length) return el("p", { class: "empty" }, "No chunks yet. Write to it in the chat.");
      const { list, items } = strip(this.name, parts, { onopen: (part, at) => this.open(part, at), onpeek: peek, onleave: unpeek });
      if (focused >= 0) queueMicrotask(() => items[Math.min(focused, items.length - 1)].focus());
      return list;
    });
  }

  open(part, at) {
    const again = at.getAttribute("aria-expanded") === "true";
    if (again) return;
    openMenu(at, [
      ["Drop", () => this.drop(part, "forget"), "forget: as if never there"],
      ["Drop, keep its trace", () => this.drop(part, "evict"), "evict: only its memory goes"],
      [part.pinned ? "Unpin" : "Pin", () => this.pin(part)],
      ["Replace text…", () => this.replace(part)],
    ], part);
  }

  menu() {
    openMenu(this.more, [
      ["Weave now", () => this.weave()],
      ["Check against a full prefill", () => this.check(), "costs that prefill"],
      ["Fork…", () => this.fork()],
      ["Close", () => this.close()],
    ], null, `Actions on ${this.name}`);
  }

  /** Send an edit, then show the strip as it is now and what the next answer would cost. */
  async change(what, verb, body) {
    try {
      const before = await call("POST", of(this.name, "preview"), {});
      await call("POST", of(this.name, verb), body);
      const [after] = await Promise.all([call("POST", of(this.name, "preview"), {}), this.refresh()]);
      this.price(what, after, before);
      onGone(this.name, this.parts);
    } catch (error) { failed(error); }
  }

  drop(part, mode) {
    return this.change(`Dropped ${part.name} (${mode})`, "drop", { parts: [refOf(part, this.parts)], mode });
  }

  async pin(part) {
    const verb = part.pinned ? "unpin" : "pin";
    try {
      await call("POST", `v1/chunks/${path(`#${part.id}`)}:${verb}`, {});
      forgetStats();
      await this.refresh();
    } catch (error) { failed(error); }
  }

  async replace(part) {
    const stat = await statOf(part.id).catch(() => ({ text: "" }));
    const text = await edit({ title: `Replace ${part.name}`, text: stat.text ?? "", note: "What stands behind it is woven anew; its KV is reused or repaired." });
    if (text) await this.change(`Replaced ${part.name}`, "replace", { part: refOf(part, this.parts), text: text.text });
  }

  async weave() {
    try {
      const plan = await call("POST", of(this.name, "weave"), {});
      await this.refresh();
      this.price("Woven", plan);
    } catch (error) { failed(error); }
  }

  async check() {
    const started = performance.now();
    try {
      const found = await call("POST", of(this.name, "check"), {});
      const says = `KL ${short(found.kl)} nats (largest ${short(found.kl_max)}), same first choice ${Math.round(100 * found.top1)} %`;
      const over = `over ${plural(found.n_compared, "prediction")}, measured in ${seconds((performance.now() - started) / 1000)}`;
      toast(`${this.name} against a full prefill: ${says}`, { hint: over });
    } catch (error) { failed(error); }
  }

  async fork() {
    const to = await edit({ title: `Fork ${this.name}`, name: `${this.name}-2`, note: "The copy has the same chunks and rows; the two do not affect each other." });
    if (!to) return;
    await call("POST", of(this.name, "fork"), { to: to.name }).then(() => toast(`${to.name} is a copy of ${this.name}`), failed);
  }

  async close() {
    try {
      await call("DELETE", of(this.name));
      remove(this.name);
      onGone(this.name, []);
    } catch (error) { failed(error); }
  }

  price(what, plan, before = null) {
    const grew = before ? plan.prefilled + plan.repaired - before.prefilled - before.repaired : 0;
    const than = before && grew > 0 ? `, ${count(grew)} more than before` : "";
    this.cost.hidden = false;
    this.cost.replaceChildren(el("div", { class: "facts" },
      el("span", { class: "what" }, `${what}.`),
      el("span", { class: "soft" }, before ? `The next weave computes ${plural(plan.prefilled + plan.repaired, "token")} of ${count(plan.n_tokens)}${than}:` : "This weave:"),
      split(plan), ...tally(plan), el("span", { class: "soft" }, driftOf(plan))),
    el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => { this.cost.hidden = true; } }, "×"));
  }
}

function remove(name) {
  const card = cards.get(name);
  if (!card) return;
  if (card.box.contains(document.activeElement)) closeMenu();
  seen.unobserve(card.box);
  card.box.remove();
  cards.delete(name);
}

function guide() {
  return el("div", { class: "guide" },
    el("p", {}, "No contexts yet. Write a message in the chat, or point an OpenAI client at"),
    el("pre", {}, `${location.origin}/v1`));
}

/** Draw the list; `choose` is told which context the chat should go to, `gone` what an edit left. */
export function start({ choose, gone }) {
  onChoose = choose;
  onGone = gone;
}

export function choose(name) {
  chosen = name;
  for (const card of cards.values()) card.box.classList.toggle("chosen", card.name === name);
}

export const cardOf = (name) => cards.get(name);

export function update(summaries) {
  const list = find("list");
  const names = new Set(summaries.map(({ name }) => name));
  for (const name of [...cards.keys()]) if (!names.has(name)) remove(name);
  list.querySelector(".guide")?.remove();
  list.querySelector(".rest")?.remove();
  find("n-contexts").textContent = summaries.length ? count(summaries.length) : "";
  const first = [...summaries].sort((a, b) => (b.name === chosen) - (a.name === chosen));
  for (const summary of first.slice(0, limit)) {
    if (!cards.has(summary.name)) {
      const card = new Card(summary.name);
      cards.set(summary.name, card);
      list.append(card.box);
    }
    cards.get(summary.name).summary(summary);
  }
  if (!summaries.length) list.append(guide());
  const rest = summaries.length - limit;
  if (rest > 0) list.append(el("button", { type: "button", class: "rest quiet", onclick: () => { limit += SHOWN; update(summaries); } }, `${count(rest)} more`));
  choose(chosen);
}

/** Ask again for the contexts in view, those asked longest ago first. */
export async function refresh(signal) {
  const inView = [...cards.values()].filter((card) => card.box.dataset.inview !== "false");
  const turn = inView.sort((a, b) => a.asked - b.asked).slice(0, PER_ROUND);
  await Promise.all(turn.map((card) => card.refresh(signal).catch((error) => {
    if (error.status !== 404) throw error;
  })));
}
