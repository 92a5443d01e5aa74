// Where the KV of each chunk came from, for the last answer or one before it.

import { call } from "./api.js";
import { count, driftOf, el, failed, find, plural, redraw, seconds } from "./dom.js";
import { HOWS, howOf, tally } from "./strip.js";

const KEPT = 40; // answers whose plans the server keeps
const LATEST = "";
const SIGN = Object.fromEntries(HOWS.map(({ how, sign }) => [how, sign]));
const COLUMNS = ["part", "id", "tokens", "how", "from", "at", "moved", "repaired", "prefilled"];

let answers = [];
let shown = 0; // the answer on display
let onPicked = () => {};

const percent = (value) => `${Math.round(100 * value)} %`;
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

function cells(span) {
  const how = howOf(span);
  return [
    el("th", { scope: "row", title: span.part }, span.part, span.saw?.length ? el("span", { class: "soft" }, ` saw ${span.saw.map((id) => `#${id}`).join(" ")}`) : null),
    el("td", {}, `#${span.id}`), el("td", {}, count(span.n_tokens)),
    el("td", { class: "how" }, el("span", { class: "key-box", data: { how } }), `${SIGN[how]} ${how}${span.patched ? ", patched" : ""}`),
    el("td", {}, span.tier), el("td", {}, count(span.position)),
    el("td", {}, span.moved ? `${span.moved > 0 ? "+" : ""}${count(span.moved)}` : "-"),
    el("td", {}, span.n_repaired ? `${count(span.n_repaired)} (${Math.round((100 * span.n_repaired) / span.n_tokens)} %)` : "-"),
    el("td", {}, span.n_prefilled ? count(span.n_prefilled) : "-"),
  ];
}

function draw(found) {
  const plan = found?.plan;
  find("plan-of").textContent = plan ? [found.context, `strategy ${plan.strategy}`, plural(plan.n_tokens, "token"), driftOf(plan)].filter(Boolean).join(", ") : "";
  redraw(find("plan"), plan, () => {
    if (!plan) return el("p", { class: "empty" }, "No answer yet. After one, this says where the KV of each chunk came from.");
    return [
      el("p", { class: "tallies" }, tally(plan)),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Plan, part by part" }, el("table", {},
        el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, plan.spans.map((span) => el("tr", {}, cells(span)))))),
    ];
  });
}

/** The answer picked; none while it follows the latest. */
export const picked = () => (find("answers").value === LATEST ? 0 : Number(find("answers").value));

async function follow() {
  const n = picked() || answers.at(-1)?.n || 0;
  if (n === shown) return;
  if (!n) { shown = 0; draw(null); return; }
  const found = await call("GET", `v1/answers/${n}`);
  if ((picked() || answers.at(-1)?.n) !== n) return; // another was asked for meanwhile
  shown = n;
  draw(found);
}

/** Take the last answers, oldest first; the newest is shown unless another was picked. */
export async function update(history) {
  answers = history.filter(({ n }) => n).slice(-KEPT);
  const select = find("answers");
  const was = picked();
  find("answers-row").hidden = !answers.length;
  redraw(select, answers.map(({ n }) => n), () => [
    el("option", { value: LATEST }, "the latest"),
    ...answers.toReversed().map((each) => el("option", { value: each.n },
      `${clock.format(each.time * 1000)}, ${each.context || "no name"}: ${percent(each.hit_rate)} reused, ${seconds(each.ttft)}`)),
  ]);
  select.value = answers.some(({ n }) => n === was) ? String(was) : LATEST;
  if (!answers.length) { shown = 0; draw(null); }
  await follow();
}

/** Show the plan of an answer and bring it into view. */
export function show(n) {
  if (!answers.some((each) => each.n === n)) return;
  find("answers").value = String(n);
  follow().then(() => find("plan-title").scrollIntoView({ block: "nearest" }), failed);
  onPicked();
}

export function start({ chosen }) {
  onPicked = chosen;
  find("answers").addEventListener("change", () => {
    follow().catch(failed);
    onPicked();
  });
}
