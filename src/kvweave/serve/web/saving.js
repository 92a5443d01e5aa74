// The headline of a context: what its last weave did not compute, and what is known of the time.

import { count, seconds, times } from "./dom.js";

const WHOLE = 0.95; // an answer of which as much was computed stands for a full prefill
const LIKE = 1.25; // how far two answers' lengths may be apart to be compared
let answers = []; // the last ones of all contexts, oldest first

export function know(history) {
  answers = history;
}

const computed = ({ repaired, prefilled }) => repaired + prefilled;

/** The last answer of a context, and the last that was computed whole and is about as long, if there is one. */
function measured(name) {
  const mine = answers.findLast((each) => each.context === name && each.kv && each.ttft > 0);
  if (!mine) return {};
  const whole = answers.findLast((each) => each !== mine && each.kv && each.ttft > 0
    && computed(each.kv) >= WHOLE * each.prompt_tokens
    && Math.max(each.prompt_tokens / mine.prompt_tokens, mine.prompt_tokens / each.prompt_tokens) <= LIKE);
  return { mine, whole: computed(mine.kv) < WHOLE * mine.prompt_tokens ? whole : undefined };
}

/** In words, as [large, small]. woven: the plan is of a weave that was; else of the next. */
export function words(name, plan, woven) {
  const n = plan?.n_tokens ?? 0;
  if (!n) return ["", ""];
  const made = computed(plan);
  const share = made ? Math.floor((100 * (n - made)) / n) : 100;
  const which = woven ? "last" : "next";
  const rows = !made ? `the ${which} weave computes no token`
    : made >= n ? `the ${which} weave finds nothing to reuse`
      : `${which} weave: ${times(n / made)} fewer tokens computed than in a full prefill (${count(made)} of ${count(n)})`;
  const { mine, whole } = measured(name);
  const told = [rows];
  if (mine) {
    const ratio = whole ? whole.ttft / mine.ttft : 0;
    const than = whole ? `, ${times(ratio >= 1 ? ratio : 1 / ratio)} ${ratio >= 1 ? "faster" : "slower"} than the last answer computed whole (${seconds(whole.ttft)} for ${count(whole.prompt_tokens)} tokens)` : "";
    told.push(`first token after ${seconds(mine.ttft)}${than}`);
  }
  return [`${share} % not recomputed`, told.join("; ")];
}
