// Chart: uPlot with this page's colors. It keeps its size as data arrives, and is redrawn when the theme changes.
import { color, h } from "./dom.js";
import { short } from "./units.js";

const shown = new Set();
const LARGEST = 1e300; // of a drawn value, so that differences are finite
const LEAST_WIDTH = 180;
// The width of a card depends on the window and on the number of cards.
let waiting = 0;
const sizes = new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => shown.forEach((each) => each.resize())); });
const drawable = (values) => values.map((value) => (value === null ? null : Math.max(-LARGEST, Math.min(LARGEST, value))));
const HEIGHT = 210;

function axes(xLabel, xFormat, yLabel, yFormat) {
  const common = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { stroke: () => color("line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
  return [
    { ...common, label: xLabel, labelSize: 16, size: 28, space: 70, values: (_, marks) => marks.map(xFormat) },
    { ...common, label: yLabel, labelSize: 18, size: 58, values: (_, marks) => marks.map((mark) => (mark === null ? "" : yFormat(mark))) },
  ];
}

// lines: [{label, color, values, low?, high?, area?, dashed?}] over x; y values are lists as long as x, with null for missing values.
export function chart({ xLabel, xFormat = short, yLabel = "", yFormat = short, zero = false, logarithmic = false, height = HEIGHT }) {
  const element = h("div", { className: "chart", style: { minHeight: `${height + 30}px` } });
  let plot = null;
  let shape = "";

  function series(lines) {
    const made = [{ label: "at", value: (_, value) => (value === null ? "–" : xFormat(value)) }];
    for (const line of lines) {
      const stroke = () => color(line.color);
      if (line.low) {
        made.push({ label: "minimum", scale: "y", show: true, stroke: "transparent", points: { show: false }, class: "hidden" });
        made.push({ label: "maximum", scale: "y", show: true, stroke: "transparent", points: { show: false } });
      }
      made.push({ label: line.label, stroke, width: line.area ? 1 : 1.75, dash: line.dashed ? [6, 4] : undefined, fill: line.area ? () => color(line.color) : undefined,
        spanGaps: true, points: { show: (u, place) => u.data[place].filter((value) => value !== null).length < 40, size: 4 },
        value: (_, value, place, index) => (index === null ? "–" : yFormat(line.told ? line.told[index] : value)) });
    }
    return made;
  }

  function bands(lines) {
    const made = [];
    let place = 1;
    for (const line of lines) {
      if (line.low) { made.push({ series: [place + 1, place], fill: () => `${color(line.color)}2e` }); place += 2; }
      place += 1;
    }
    return made;
  }

  const chartOf = {
    element,
    draw(x, lines) {
      const data = [x, ...lines.flatMap((line) => (line.low ? [line.low, line.high, line.values] : [line.values]).map(drawable))];
      const next = JSON.stringify(lines.map((line) => [line.label, line.color, Boolean(line.low), line.area, line.dashed]));
      chartOf.again = () => { shape = ""; chartOf.draw(x, lines); };
      if (plot && next === shape) return plot.setData(data);
      plot?.destroy();
      shape = next;
      const hidden = lines.flatMap((line) => (line.low ? ["band", "band", "line"] : ["line"]));
      plot = new uPlot({
        width: Math.max(LEAST_WIDTH, element.clientWidth), height, series: series(lines), bands: bands(lines), axes: axes(xLabel, xFormat, yLabel, yFormat), padding: [10, 28, 0, 0],
        scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : { range: (_, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(zero ? Math.min(0, low) : low, high === low ? low + (Math.abs(low) || 1) : high, { min: { pad: zero ? 0 : 0.08, soft: zero ? 0 : undefined, mode: zero ? 1 : 0 }, max: { pad: 0.08 } })) } },
        cursor: { y: false, drag: { x: true, y: false } }, legend: { live: true },
      }, data, element);
      plot.root.querySelectorAll(".u-legend tr").forEach((row, place) => { if (place && hidden[place - 1] === "band") row.style.display = "none"; });
    },
    resize() { if (plot && element.clientWidth && plot.width !== Math.max(LEAST_WIDTH, element.clientWidth)) plot.setSize({ width: Math.max(LEAST_WIDTH, element.clientWidth), height }); },
    redraw() { if (element.isConnected) chartOf.again?.(); },
    forget() { shown.delete(chartOf); sizes.unobserve(element); plot?.destroy(); },
    again: null,
  };
  shown.add(chartOf);
  sizes.observe(element);
  return chartOf;
}

export function forgetCharts() { shown.clear(); sizes.disconnect(); }
export function redrawCharts() { shown.forEach((each) => each.redraw()); }

// Stacked parts: each line is the sum up to it, and shows its own part.
export function stacked(parts) {
  let below = null;
  return parts.map((part) => {
    const values = part.values.map((value, place) => (value === null && !below ? null : (value ?? 0) + (below?.[place] ?? 0)));
    below = values;
    return { ...part, values, told: part.values, area: true };
  }).reverse();
}
