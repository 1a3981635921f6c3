// Compression: every tensor, what it costs on the wire and what of it is left unsent.
import { empty, h, settle, code } from "./dom.js";
import { bytes, count, share, short } from "./units.js";

const ratio = (each) => (each.bytes ? (4 * each.numel) / each.bytes : null);
const owed = (each) => (each.gradient_norm ? each.residual_norm / each.gradient_norm : null);
const times = (value) => (value === null ? "–" : `${short(value)} ×`);
// name, words of its head, value, text, whether the bar shows it
const COLUMNS = [
  ["name", "tensor", (each) => each.name, String, false], ["numel", "numbers", (each) => each.numel, count, false], ["bytes", "bytes a step", (each) => each.bytes, bytes, true],
  ["ratio", "smaller than float32", ratio, times, false], ["energy_share", "energy sent", (each) => each.energy_share, share, true], ["gradient_norm", "|gradient|", (each) => each.gradient_norm, short, false],
  ["residual_norm", "|unsent|", (each) => each.residual_norm, short, false], ["owed", "unsent / gradient", owed, times, true],
];
const MOST = 400;

export function make({ run, get }) {
  let by = "bytes";
  let falling = true;
  let tensors = [];
  const filter = h("input", { type: "search", placeholder: "tensors named …", "aria-label": "Filter tensors", oninput: () => draw() });
  const words = h("p", { className: "note" });
  const table = h("div", { className: "scroll" });
  const element = h("div", { className: "card" }, h("div", { className: "row" }, h("h2", {}, "Every tensor"), filter), words, table);
  table.addEventListener("click", (event) => {
    const head = event.target.closest("[data-by]");
    if (!head) return;
    falling = by === head.dataset.by ? !falling : head.dataset.by !== "name";
    by = head.dataset.by;
    draw();
  });

  function draw() {
    const value = COLUMNS.find(([name]) => name === by)[2];
    const order = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : (value(a) ?? -1) - (value(b) ?? -1));
    const shown = tensors.filter((each) => each.name.toLowerCase().includes(filter.value.toLowerCase())).sort((a, b) => (falling ? order(b, a) : order(a, b))).slice(0, MOST);
    const greatest = Object.fromEntries(COLUMNS.filter((column) => column[4]).map(([name, , of]) => [name, name === "energy_share" ? 1 : Math.max(...tensors.map((each) => of(each) ?? 0)) || 1]));
    const bar = (name, size) => h("span", { className: "bar" }, h("i", { style: { width: `${100 * Math.min(1, (size ?? 0) / greatest[name])}%` } }));
    const total = tensors.reduce((sum, each) => sum + (each.bytes ?? 0), 0);
    words.textContent = tensors.length ? `${count(tensors.length)} tensors, ${bytes(total)} a step and rank; means over ranks at step ${count(tensors[0].step)}. Energy sent: the share of the squared gradient that travels at once; the rest is kept for later steps.` : "";
    settle(table, tensors.length ? h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map(([name, said]) => h("th", { className: name === "name" ? "left" : "", "aria-sort": name === by ? (falling ? "descending" : "ascending") : "none" }, h("button", { data: { by: name } }, said, name === by ? (falling ? " ↓" : " ↑") : ""))))),
      h("tbody", {}, shown.map((each) => h("tr", {}, COLUMNS.map(([name, , of, format, barred]) => h("td", { className: name === "name" ? "name" : "" }, format(of(each) ?? null), barred ? bar(name, of(each)) : null))))))
      : empty("No tensor has told of itself yet. Recipes that compress do, every now and then: try ", code("gossamer run --recipe \"TopK(density=0.01)\""), ". ", code("Dense()"), " sends everything as it is."));
  }
  async function show() {
    if (!run().summary) return;
    tensors = (await get(`${run().key}/compression`)).tensors;
    draw();
  }
  return { element, show };
}
