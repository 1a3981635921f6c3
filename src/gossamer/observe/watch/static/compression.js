// Compression: traffic and residual of every tensor.
import { empty, h, settle, code } from "./dom.js";
import { bytes, count, share, short } from "./units.js";

const ratio = (each) => (each.bytes ? (4 * each.numel) / each.bytes : null);
const owed = (each) => (each.gradient_norm && each.residual_norm !== null ? each.residual_norm / each.gradient_norm : null);
// Little's law; the two ends are gradients that are independent between steps, and constant gradients
const rough = (value) => (value >= 100 ? count(value) : String(Number(value.toPrecision(2)))); // the digits of an estimate
const waits = (ratio) => (ratio === null ? "–" : ratio === 0 ? "0" : `${rough(Math.min(ratio, ratio ** 2))} – ${rough(Math.max(ratio, ratio ** 2))}`);
const times = (value) => (value === null ? "–" : `${short(value)} ×`);
// name, header, value, text, whether it has a bar
const COLUMNS = [
  ["name", "tensor", (each) => each.name, String, false], ["numel", "elements", (each) => each.numel, count, false], ["bytes", "bytes per step", (each) => each.bytes, bytes, true],
  ["ratio", "float32 size / sent", ratio, times, false], ["energy_share", "energy sent", (each) => each.energy_share, share, true], ["gradient_norm", "|gradient|", (each) => each.gradient_norm, short, false],
  ["residual_norm", "|residual|", (each) => each.residual_norm, short, false], ["owed", "residual / gradient", owed, times, true],
  ["waits", "steps delayed, about", owed, waits, false],
];
const WORST = 3;
const MOST = 400;

export function make({ run, get }) {
  let by = "bytes";
  let falling = true;
  let tensors = [];
  const filter = h("input", { type: "search", placeholder: "tensors named …", "aria-label": "Filter tensors", oninput: () => draw() });
  const words = h("p", { className: "note" });
  const table = h("div", { className: "scroll" });
  const worst = h("p", { className: "note worst" });
  const element = h("div", { className: "card" }, h("div", { className: "row" }, h("h2", {}, "Every tensor"), filter), worst, words, table);
  table.addEventListener("click", (event) => {
    const head = event.target.closest("[data-by]");
    if (!head) return;
    falling = by === head.dataset.by ? !falling : head.dataset.by !== "name";
    by = head.dataset.by;
    draw();
  });

  // Tensors with the largest relative residual, or else the largest loss
  function suffering() {
    const keep = tensors.filter((each) => owed(each) > 0).sort((a, b) => owed(b) - owed(a)).slice(0, WORST);
    if (keep.length) return `Largest residuals: ${keep.map((each) => `${each.name} (delayed by about ${waits(owed(each))} steps${each.energy_share === null ? "" : `, ${share(each.energy_share)} of its energy is sent at once`})`).join("; ")}.`;
    const lose = tensors.filter((each) => each.energy_share !== null && each.energy_share < 1).sort((a, b) => a.energy_share - b.energy_share).slice(0, WORST);
    if (lose.length) return `No residuals. Largest losses: ${lose.map((each) => `${each.name} (${share(each.energy_share)} of its energy arrives)`).join("; ")}.`;
    return tensors.length ? "No tensor has a residual or a loss." : "";
  }

  function draw() {
    const value = COLUMNS.find(([name]) => name === by)[2];
    const order = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : (value(a) ?? -1) - (value(b) ?? -1));
    const shown = tensors.filter((each) => each.name.toLowerCase().includes(filter.value.toLowerCase())).sort((a, b) => (falling ? order(b, a) : order(a, b))).slice(0, MOST);
    const greatest = Object.fromEntries(COLUMNS.filter((column) => column[4]).map(([name, , of]) => [name, name === "energy_share" ? 1 : Math.max(...tensors.map((each) => of(each) ?? 0)) || 1]));
    const bar = (name, size) => h("span", { className: "bar" }, h("i", { style: { width: `${100 * Math.min(1, Math.max(0, size ?? 0) / greatest[name])}%` } }));
    const total = tensors.reduce((sum, each) => sum + (each.bytes ?? 0), 0);
    worst.textContent = suffering();
    words.textContent = tensors.length ? `${count(tensors.length)} tensors, ${bytes(total)} per step and rank; means over ranks, latest samples, up to step ${count(Math.max(...tensors.map((each) => each.step)))}. Energy sent: the share of the squared norm of gradient and residual that is sent at once. An uncompressed all-reduce sends each element 2 (n – 1) / n times among n ranks, which is at least the tensor's size.` : "";
    settle(table, tensors.length ? h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map(([name, said]) => h("th", { className: name === "name" ? "left" : "", "aria-sort": name === by ? (falling ? "descending" : "ascending") : "none" }, h("button", { data: { by: name } }, said, name === by ? (falling ? " ↓" : " ↑") : ""))))),
      h("tbody", {}, shown.map((each) => h("tr", {}, COLUMNS.map(([name, , of, format, barred]) => h("td", { className: name === "name" ? "name tensor" : "" }, format(of(each) ?? null), barred ? bar(name, of(each)) : null))))))
      : empty("No tensor was sampled yet. With several workers tensors are sampled now and then: try ", code("gossamer run --workers 2 --recipe \"TopK(density=0.01)\""), ". Exchanges with servers and with neighbors are not sampled."));
  }
  async function show() {
    if (!run().summary) return;
    tensors = (await get(`${run().key}/compression`)).tensors;
    draw();
  }
  return { element, show };
}
