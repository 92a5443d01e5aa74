// Small line charts, drawn as SVG.

import { el, svg } from "./dom.js";

const HEIGHT = 84;
const EDGE = { left: 48, right: 8, top: 8, bottom: 18 };

/** A round number at or above n: 1, 2 or 5 times a power of ten. */
export function ceiling(n) {
  if (!(n > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(n));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= n * 0.999);
}

function ago(s) {
  if (s < 90) return `${Math.round(s)} s ago`;
  return s < 5400 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
}

/**
 * Draw points `[{time, value}]` (seconds, number) into a box.
 * options: top (the scale's end, or null to fit), format, empty (what to say without points), label.
 */
export function draw(box, points, options) {
  box.replaceChildren();
  if (!points.length) {
    box.append(el("p", { class: "empty" }, options.empty));
    return;
  }
  const width = Math.max(120, box.clientWidth);
  const top = options.top ?? ceiling(Math.max(...points.map((p) => p.value)));
  const first = points[0].time;
  const last = points.at(-1).time;
  const x = (p) => EDGE.left + (width - EDGE.left - EDGE.right) * (last > first ? (p.time - first) / (last - first) : 1);
  const y = (value) => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * Math.min(1, value / top);
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p.value).toFixed(1)}`).join("");
  const area = `${path}L${x(points.at(-1)).toFixed(1)} ${y(0)}L${x(points[0]).toFixed(1)} ${y(0)}Z`;
  const dot = svg("circle", { class: "dot", r: 3, cx: x(points.at(-1)), cy: y(points.at(-1).value) });
  const now = points.at(-1).value;
  const readout = el("output", { class: "readout" }, options.format(now));
  const drawing = svg("svg", {
    width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    "aria-label": `${options.label}: ${options.format(now)} now, ${points.length} points`,
  },
  [0, top / 2, top].map((value) => svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) })),
  [0, top].map((value) => svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, options.format(value))),
  svg("text", { x: EDGE.left, y: HEIGHT - 4 }, ago(Date.now() / 1000 - first)),
  svg("text", { x: width - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
  svg("path", { class: "area", d: area }), svg("path", { class: "line", d: path }), dot);
  drawing.addEventListener("pointermove", (event) => {
    const at = event.clientX - drawing.getBoundingClientRect().left;
    const near = points.reduce((best, p) => (Math.abs(x(p) - at) < Math.abs(x(best) - at) ? p : best));
    dot.setAttribute("cx", x(near));
    dot.setAttribute("cy", y(near.value));
    readout.textContent = `${options.format(near.value)}, ${ago(Date.now() / 1000 - near.time)}`;
  });
  drawing.addEventListener("pointerleave", () => {
    dot.setAttribute("cx", x(points.at(-1)));
    dot.setAttribute("cy", y(now));
    readout.textContent = options.format(now);
  });
  box.append(readout, drawing);
}
