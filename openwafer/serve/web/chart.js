// Bars per day, one colour per series, stacked.

import { count, svg } from "./dom.js";

const HEIGHT = 220;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 10;

// A round number at or above `value`.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

// `width` is that of the place it goes to, so that text keeps its size.
export function stackedBars(width, days, names, values) {
  const totals = days.map((_, at) => values.reduce((total, series) => total + series[at], 0));
  const top = ceiling(Math.max(...totals, 0));
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const slot = (width - LEFT) / days.length;
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  const title = svg("title");
  title.textContent = `Per day: ${days.map((day, at) => `${day} ${count(totals[at])}`).filter((_, at) => totals[at]).join(", ") || "nothing yet"}`;
  chart.append(title);
  for (const share of [0, 0.5, 1]) {
    chart.append(svg("line", { x1: LEFT, x2: width, y1: y(top * share), y2: y(top * share) }));
    const label = svg("text", { x: LEFT - 8, y: y(top * share) + 4, "text-anchor": "end" });
    label.textContent = count(top * share);
    chart.append(label);
  }
  days.forEach((day, at) => {
    let below = 0;
    values.forEach((series, number) => {
      if (!series[at]) return;
      const bar = svg("rect", {
        class: `f${number + 1}`, x: LEFT + at * slot + slot * 0.15, width: slot * 0.7, rx: 2,
        y: y(below + series[at]), height: Math.max(y(below) - y(below + series[at]), 1),
      });
      const hover = svg("title");
      hover.textContent = `${day}, ${names[number]}: ${count(series[at])}`;
      bar.append(hover);
      chart.append(bar);
      below += series[at];
    });
    if (at % Math.ceil(days.length / (width / 110)) === 0) {
      const label = svg("text", { x: LEFT + at * slot + slot / 2, y: HEIGHT - 5, "text-anchor": "middle" });
      label.textContent = day.slice(5);
      chart.append(label);
    }
  });
  return chart;
}
