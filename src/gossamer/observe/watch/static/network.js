// Network: every pair of ranks as a cell, the worst pairs, and the picked collectives.
import { code, empty, h, settle } from "./dom.js";
import { heatmap, MOST_MARKED } from "./heatmap.js";
import { hops } from "./hops.js";
import { bytes, count, rate, seconds } from "./units.js";

const FIELDS = { round_trip: ["round trip", seconds], bytes_per_second: ["rate", rate], used_bytes: ["bytes sent", bytes], retransmits: ["retransmits", count] };
const WORST = 12;
const LABELED = 12; // maximum number of columns with all names

export function make({ run, get }) {
  let field = "round_trip";
  let told = null;
  let ranks = [];
  let cells = [];
  let relays = [];
  const map = heatmap({
    square: true, rowNames: () => ranks.map((rank) => `${rank} →`), columnNames: () => (ranks.length > LABELED ? [ranks[0], ranks.at(-1)] : ranks).map((rank) => `→ ${rank}`), format: (value) => FIELDS[field][1](value),
    told: (row, column, value) => (row === column ? `rank ${ranks[row]} itself` : `rank ${ranks[row]} to rank ${ranks[column]}: ${value === null ? "not measured" : FIELDS[field][1](value)}${relays[row][column] ? `, through ${relays[row][column]}` : ""}`),
    marked: (row, column) => Boolean(relays[row][column]),
  });
  const choice = h("select", { "aria-label": "Quantity in the matrix", onchange: () => { field = choice.value; draw(); } }, Object.entries(FIELDS).map(([name, [words]]) => h("option", { value: name }, words)));
  const nothing = h("div", {});
  const relayed = h("p", { className: "note", hidden: true }, "A dot marks a pair whose bytes pass a relay; pairs of one relay share its bandwidth.");
  const worst = h("div", { className: "scroll" });
  const picked = h("div", {});
  const pictures = h("div", {});
  const element = h("div", { className: "grid" }, h("div", { className: "card" }, h("h2", {}, "Every pair of ranks"), h("p", { className: "note" }, "Rows send, columns receive; latest values of the sender's kernel. The rate counts only the time in which bytes were in flight, and needs enough of them: short messages are limited by round trips, long ones by the link. “At first”: there were never enough bytes, so the value is the measurement at the group's begin. Bytes and retransmits are sums."), h("div", { className: "row" }, choice), nothing, map.element, relayed),
    h("div", { className: "card" }, h("h2", {}, "Longest round trips"), h("p", { className: "note" }, "One slow pair slows every collective that it is part of."), worst), h("div", { className: "card wide collectives" }, h("h2", {}, "Collectives picked"), h("p", { className: "note" }, "By size of the all-reduce, from measured links. Arrows are messages: blue ones are added, green ones replace the receiver's values."), picked, pictures));

  const pair = (place) => Object.fromEntries(Object.keys(told.pairs).map((name) => [name, told.pairs[name][place]]));
  function draw() {
    const { source, target } = told.pairs;
    ranks = [...new Set([...source, ...target])].sort((a, b) => a - b);
    map.element.hidden = !ranks.length;
    settle(nothing, ranks.length ? null : empty("No link was measured yet. Links are measured between ranks that use Gossamer's own connections, as several workers on CPUs do; NCCL and Gloo do not report theirs."));
    if (!ranks.length) return settle(worst, empty("No pairs to compare."));
    const place = new Map(ranks.map((rank, index) => [rank, index]));
    cells = ranks.map(() => Array(ranks.length).fill(null));
    relays = ranks.map(() => Array(ranks.length).fill(null));
    source.forEach((rank, index) => {
      cells[place.get(rank)][place.get(target[index])] = told.pairs[field][index];
      relays[place.get(rank)][place.get(target[index])] = told.pairs.through[index];
    });
    relayed.hidden = ranks.length > MOST_MARKED || !told.pairs.through.some(Boolean);
    map.draw(cells);
    const order = source.map((_, index) => index).sort((a, b) => (told.pairs.round_trip[b] ?? 0) - (told.pairs.round_trip[a] ?? 0)).slice(0, WORST);
    settle(worst, h("table", {}, h("thead", {}, h("tr", {}, h("th", { className: "left" }, "pair"), Object.values(FIELDS).map(([name]) => h("th", {}, name)))),
      h("tbody", {}, order.map(pair).map((each) => h("tr", {}, h("td", { className: "left" }, `${each.source} → ${each.target}`, each.through ? h("small", {}, ` through ${each.through}`) : null), Object.entries(FIELDS).map(([name, [, format]]) => h("td", {}, format(each[name]), name === "bytes_per_second" && each.rate_at_first ? h("small", {}, " at first") : null)))))));
  }
  async function show() {
    if (!run().summary) return;
    told = await get(`${run().key}/network`);
    draw();
    settle(pictures, told.drawings.map(hops));
    settle(picked, told.collectives.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "bytes averaged"), h("th", { className: "left" }, "collective"))), h("tbody", {}, told.collectives.map((each) => h("tr", {}, h("td", { title: count(each.nbytes) }, bytes(each.nbytes)), h("td", { className: "left" }, String(each.collective))))))
      : empty("No collective was picked yet. ", code("gossamer run --collective auto"), " measures links and picks; gossip and servers use no collectives."));
  }
  return { element, show, redraw: () => { if (ranks.length) map.draw(cells); } };
}
