// Heat map: rows of cells as one picture, one pixel per cell; the cell under the pointer is described below it.
import { color, h } from "./dom.js";
import { SHADES } from "./colors.js";

const SQUARE = 72; // maximum pixels of a cell in a square map
export const MOST_MARKED = 32; // rows; cells of larger maps are smaller than a dot

function paint(canvas, cells, low, high) {
  const [rows, columns] = [cells.length, cells[0]?.length ?? 1];
  Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  probe.fillStyle = color("empty");
  probe.fillRect(0, 0, 1, 1);
  const blank = probe.getImageData(0, 0, 1, 1).data;
  cells.forEach((row, y) => row.forEach((value, x) => {
    const place = 4 * (y * columns + x);
    const shade = value === null ? -1 : Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
    for (let part = 0; part < 3; part += 1) image.data[place + part] = shade < 0 ? blank[part] : SHADES[3 * shade + part];
    image.data[place + 3] = 255;
  }));
  context.putImageData(image, 0, 0);
}

// The 99th percentile: a single outlier must not make all other values look equal.
function span(cells) {
  const values = cells.flat().filter((value) => value !== null).sort((a, b) => a - b);
  if (!values.length) return [0, 1, false];
  const high = values[Math.floor(0.99 * (values.length - 1))] || values.at(-1) || 1;
  return [Math.min(0, values[0]), high, values.at(-1) > 1.01 * high];
}

// told(row, column, value) describes a cell; picked(first, last) is called with a selected range of columns;
// marked(row, column) tells whether a cell has a dot.
export function heatmap({ rowNames, columnNames, told, picked, format, marked, square = false }) {
  const canvas = h("canvas", { "aria-label": "heat map", role: "img" });
  const words = h("div", { className: "told" }, "Point at a cell to see its value.");
  const names = h("div", { className: "ranks" });
  const times = h("div", { className: "times" });
  const legend = h("canvas", { width: 256, height: 1 });
  const [least, most] = [h("span"), h("span")];
  let cells = [];
  let pressed = null;

  const cellAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const within = (part, size) => Math.max(0, Math.min(size - 1, Math.floor(part * size)));
    return [within((event.clientY - box.top) / box.height, canvas.height), within((event.clientX - box.left) / box.width, canvas.width)];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [row, column] = cellAt(event);
    if (cells.length) words.textContent = told(row, column, cells[row][column]);
  });
  canvas.addEventListener("pointerdown", (event) => { pressed = cellAt(event)[1]; });
  canvas.addEventListener("pointerup", (event) => {
    const column = cellAt(event)[1];
    if (picked && pressed !== null && Math.abs(column - pressed) > 2) picked(Math.min(column, pressed), Math.max(column, pressed));
    pressed = null;
  });
  canvas.addEventListener("dblclick", () => picked?.(null, null));

  const dots = h("div", { className: "dots", "aria-hidden": "true" });
  const element = h("div", { className: "heat" }, h("div", { className: "frame" }, names, h("div", { className: "plane" }, canvas, dots), times),
    h("div", { className: "row" }, words, h("span", { className: "spring" }), h("span", { className: "scale" }, least, legend, most)));
  return {
    element,
    draw(next) {
      cells = next;
      const [low, high, clipped] = span(cells);
      paint(canvas, cells, low, high);
      paint(legend, [Array.from({ length: 256 }, (_, shade) => shade)], 0, 255);
      least.textContent = format(low);
      most.textContent = clipped ? `${format(high)} or more` : format(high);
      const dot = (row, column) => h("i", { style: { top: `${(100 * (row + 0.5)) / cells.length}%`, left: `${(100 * (column + 0.5)) / cells[row].length}%` } });
      dots.replaceChildren(...cells.flatMap((values, row) => values.map((_, column) => (cells.length <= MOST_MARKED && marked?.(row, column) ? dot(row, column) : null)).filter(Boolean)));
      const height = square ? Math.min(560, SQUARE * cells.length, Math.max(160, element.clientWidth - 60)) : Math.max(110, Math.min(380, cells.length * 22));
      canvas.style.height = `${height}px`;
      canvas.parentElement.style.maxWidth = square ? `${height}px` : "";
      times.style.maxWidth = canvas.parentElement.style.maxWidth;
      const every = Math.ceil(cells.length / Math.floor(height / 16));
      names.replaceChildren(...rowNames().map((name, row) => (row % every ? null : h("span", { style: { top: `${((row + 0.5) / cells.length) * height}px` } }, name))).filter(Boolean));
      times.replaceChildren(...columnNames().map((name) => h("span", {}, name)));
      times.classList.toggle("centered", square && times.childElementCount === cells.length);
    },
  };
}
