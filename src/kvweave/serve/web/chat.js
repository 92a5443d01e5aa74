// A conversation in one context: streamed, stoppable, each answer with what it cost.

import { call, path, stream } from "./api.js";
import { driftOf, el, failed, find, isAuto, seconds } from "./dom.js";
import { statOf } from "./stats.js";
import { split, tally } from "./strip.js";

const NEW = ""; // the value of the choice "new context"
const HISTORY = 40; // messages read back from a context

let running = null; // AbortController of the answer under way
let known = null; // names offered; null before the first round
let loading = Promise.resolve(); // of what was said before
let after = async () => {};
let onChosen = () => {};

const where = () => find("where").value;

function bubble(role, text, uid = null) {
  const body = el("div", { class: "text" }, text);
  const foot = el("div", { class: "foot" });
  const box = el("article", { class: `message ${role}`, data: uid === null ? {} : { uid } },
    el("p", { class: "role" }, role), body, foot);
  const log = find("log");
  log.querySelector(".guide")?.remove();
  log.append(box);
  log.scrollTop = log.scrollHeight;
  return { box, body, foot };
}

function guide(text) {
  find("log").replaceChildren(el("p", { class: "guide" }, text));
}

/** Offer the contexts there are; keeps the choice while it exists. */
export function offer(names) {
  if (JSON.stringify(names) === JSON.stringify(known)) return;
  const select = find("where");
  const ours = names.filter((name) => !isAuto(name));
  const autos = names.filter(isAuto);
  const had = known ? select.value : ours[0] ?? NEW; // nobody named those of OpenAI's clients
  const options = (some) => some.map((name) => el("option", { value: name }, name));
  known = names;
  select.replaceChildren(el("option", { value: NEW }, "New context"), ...options(ours));
  if (autos.length) select.append(el("optgroup", { label: "From OpenAI clients" }, options(autos)));
  select.value = names.includes(had) ? had : NEW;
  if (select.value !== had || !find("log").childElementCount) turnTo(select.value);
  else showFields();
}

function showFields() {
  find("new-context").hidden = where() !== NEW;
  if (where() === NEW && !find("new-name").value) {
    let n = 1;
    while (known?.includes(`chat/${n}`)) n += 1;
    find("new-name").value = `chat/${n}`;
  }
}

/** Go on in a context: show what was said in it. */
export function turnTo(name) {
  if (!running) loading = load(name);
  return loading;
}

async function load(name) {
  if (name !== NEW && !known?.includes(name)) offer([...(known ?? []), name]);
  find("where").value = name;
  showFields();
  onChosen(name);
  if (name === NEW) return guide("Name a context and say something. Each message becomes a chunk of its own.");
  guide("…");
  try {
    const { parts } = await call("GET", `v1/contexts/${path(name)}`);
    if (where() !== name) return;
    const said = parts.slice(-HISTORY);
    const stats = await Promise.all(said.map((part) => statOf(part.id).catch(() => null)));
    if (where() !== name) return;
    if (!said.length) return guide("Nothing in this context yet.");
    find("log").replaceChildren();
    said.forEach((part, i) => bubble(part.kind, (stats[i]?.text ?? `#${part.id}`).trim(), part.uid));
  } catch (error) { failed(error); }
}

/** Show which messages are not in the context any more. */
export function mark(name, parts) {
  if (name !== where()) return;
  const left = new Set(parts.map((part) => String(part.uid)));
  for (const box of find("log").querySelectorAll("[data-uid]")) box.classList.toggle("gone", !left.has(box.dataset.uid));
}

function receipt(foot, answer, measured) {
  const plan = answer.plan ?? answer.usage?.kv;
  const ttft = answer.usage?.ttft ?? measured;
  foot.replaceChildren(...(plan ? [split(plan)] : []), el("span", { class: "soft" }, `TTFT ${seconds(ttft)}`));
  if (plan) foot.append(...tally(plan), el("span", { class: "soft" }, driftOf(plan)));
  if (answer.finish === "length") foot.append(el("span", { class: "soft" }, "cut at the token limit"));
}

async function target() {
  if (where() !== NEW) return where();
  const name = find("new-name").value.trim();
  const system = find("new-system").value.trim();
  await call("POST", "v1/contexts", system ? { name, system } : { name });
  find("new-name").value = "";
  known = [...(known ?? []), name];
  find("where").append(el("option", { value: name }, name));
  find("where").value = name;
  showFields();
  find("log").replaceChildren();
  if (system) bubble("system", system);
  onChosen(name);
  return name;
}

async function answer(name, content) {
  const asked = bubble("user", content);
  const { box, body, foot } = bubble("assistant", "");
  box.classList.add("live");
  const started = performance.now();
  let measured = null;
  let final = {};
  const options = { content, max_tokens: Number(find("max-tokens").value), temperature: Number(find("temperature").value), stream: true };
  try {
    for await (const event of stream(`v1/contexts/${path(name)}:ask`, options, running.signal)) {
      if (event.usage || event.plan) final = event;
      const text = event.delta ?? (event.usage ? "" : event.text) ?? "";
      if (!text) continue;
      measured ??= (performance.now() - started) / 1000;
      body.append(body.textContent ? text : text.trimStart());
      find("log").scrollTop = find("log").scrollHeight;
    }
    receipt(foot, final, measured);
  } catch (error) {
    foot.replaceChildren(el("span", { class: "soft" }, error.name === "AbortError" ? "stopped" : error.message));
    failed(error);
  } finally {
    box.classList.remove("live");
    find("log").scrollTop = find("log").scrollHeight;
  }
  await after(name).then(({ parts, show }) => {
    label(parts, asked.box, box);
    if (!show || !final.plan) return;
    foot.append(el("button", { type: "button", class: "quiet", onclick: show }, "Its plan"));
    find("log").scrollTop = find("log").scrollHeight;
  }, failed);
}

/** Tie the two messages to their chunks, so that a drop shows on them. */
function label(parts, asked, answered) {
  if (!parts) return;
  const last = (kind) => parts.findLast((part) => part.kind === kind);
  if (last("user")) asked.dataset.uid = last("user").uid;
  if (last("assistant")) answered.dataset.uid = last("assistant").uid;
}

async function submit(event) {
  event.preventDefault();
  const content = find("say").value.trim();
  if (!content || running || !find("new-context").hidden && !find("new-context").reportValidity()) return;
  running = new AbortController();
  busy(true);
  try {
    await loading;
    const name = await target();
    find("say").value = "";
    await answer(name, content);
  } catch (error) {
    failed(error);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(on) {
  find("send").hidden = on;
  find("stop").hidden = !on;
  find("where").disabled = on;
}

/** Wire the form; `done(name)` refreshes the context after an answer; returns its parts, and how to `show` the answer's plan. */
export function start({ chosen, done }) {
  onChosen = chosen;
  after = done;
  find("compose").addEventListener("submit", submit);
  find("new-context").addEventListener("submit", (event) => { event.preventDefault(); find("say").focus(); });
  find("stop").addEventListener("click", () => running?.abort());
  find("where").addEventListener("change", () => turnTo(where()));
  find("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("compose").requestSubmit();
  });
  showFields();
}
