// Small charts, drawn as SVG: a bar an answer, the last one at the right, however long the pauses between.

import { ago, count, el, plural, svg } from "./dom.js";

const HEIGHT = 84;
const EDGE = { left: 48, right: 2, top: 8, bottom: 18 };
const STEP = { least: 4, most: 16 }; // pixels of a bar and the gap behind it

/** A round number at or above n: 1, 2 or 5 times a power of ten. */
export function ceiling(n) {
  if (!(n > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(n));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= n * 0.999);
}

/**
 * Draw answers (those of the status' history) into a box.
 * options: layers(answer): [{value, how}] from the bottom up; value(answer): what is read out; top (the
 * scale's end, or null to fit); format; label; empty; picked (an answer's n); onpick(n).
 */
export function draw(box, answers, options) {
  box.replaceChildren();
  if (!answers.length) {
    box.append(el("p", { class: "empty" }, options.empty));
    return;
  }
  const width = Math.max(120, box.clientWidth);
  const room = width - EDGE.left - EDGE.right;
  const shown = answers.slice(-Math.floor(room / STEP.least));
  const step = Math.min(STEP.most, room / shown.length);
  const top = options.top ?? ceiling(Math.max(...shown.map(options.value)));
  const floor = HEIGHT - EDGE.bottom;
  const scale = (floor - EDGE.top) / top;
  const left = (index) => width - EDGE.right - (shown.length - index) * step;
  const last = shown.at(-1);
  const says = (answer) => options.format(options.value(answer));
  const readout = el("output", { class: "readout", "aria-hidden": "true" }, says(last));
  const bars = shown.flatMap((answer, index) => {
    let base = floor;
    return options.layers(answer).filter(({ value }) => value > 0).map(({ value, how }) => {
      const height = Math.min(base - EDGE.top, value * scale);
      base -= height;
      return svg("rect", { class: "part", x: left(index).toFixed(1), y: base.toFixed(1), width: Math.max(1, step - 1).toFixed(1), height: Math.max(0.5, height).toFixed(1), data: { how } });
    });
  });
  const over = svg("rect", { class: "over", y: EDGE.top - 3, width: step, height: floor - EDGE.top + 3, visibility: "hidden" });
  const mark = (index) => {
    over.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    if (index >= 0) over.setAttribute("x", left(index) - 0.5);
  };
  const chosen = shown.findIndex(({ n }) => n === options.picked);
  mark(chosen);
  const many = shown.length > 1 && room > 110 ? `${count(shown.length)} answers` : "";
  const note = svg("text", { x: EDGE.left, y: HEIGHT - 4 }, many);
  const drawing = svg("svg", {
    width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    "aria-label": `${options.label}: ${says(last)} in the last answer, ${plural(shown.length, "answer")} shown`,
  },
  over,
  [0, top / 2, top].map((value) => svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: floor - value * scale, y2: floor - value * scale })),
  [0, top].map((value) => svg("text", { x: EDGE.left - 6, y: floor - value * scale + 4, "text-anchor": "end" }, options.format(value))),
  bars,
  note,
  svg("text", { x: width - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" }, "the last"));
  const at = (event) => {
    const x = event.clientX - drawing.getBoundingClientRect().left;
    return Math.max(0, Math.min(shown.length - 1, Math.floor((x - left(0)) / step)));
  };
  drawing.addEventListener("pointermove", (event) => {
    const answer = shown[at(event)];
    mark(at(event));
    readout.textContent = says(answer);
    note.textContent = ago(answer.time);
    drawing.style.cursor = options.onpick ? "pointer" : "";
  });
  drawing.addEventListener("pointerleave", () => {
    mark(chosen);
    readout.textContent = says(last);
    note.textContent = many;
  });
  drawing.addEventListener("click", (event) => options.onpick?.(shown[at(event)].n));
  box.append(readout, drawing);
}
