// Workers: stragglers and their causes, every rank over time, and the current state of each.
import { h, settle, empty } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { bytes, clock, count, rate, seconds, share, short } from "./units.js";

const FIELDS = {
  waiting: ["waiting, share of the time", share], compute: ["compute, seconds per step", seconds], data: ["data loading, seconds per step", seconds], seconds: ["step time, seconds", seconds],
  slowest: ["slowest step, seconds", seconds], wire: ["wire, seconds per step", seconds], encode: ["encode, seconds per step", seconds], bytes_sent: ["sent per second", rate], steps: ["steps per second", short],
};
const KINDS = { training: "good", finished: "good", waiting: "warn", saving: "good", starting: "", left: "", stopped: "", lost: "bad", failed: "bad" };
const HEAT_CELLS = 240;
const LOADS_LONG = 0.05; // of a step; then it is shown for this rank
const FINDINGS = 5;

function finding(each) {
  const name = each.cause === "hang"
    ? `Hang: all other ranks ${each.now ? "wait" : "waited"} for rank ${each.rank}.`
    : `Rank ${each.rank} ${each.now ? "is" : "was"} the straggler: ${each.cause}.`;
  return h("div", { className: each.now ? "finding" : "finding over" }, h("b", {}, name), " ", each.evidence, h("br"),
    h("small", {}, `found at step ${count(each.step)}, ${clock(each.at)}${each.times > 1 ? `; ${each.times} times since ${clock(each.first)}` : ""}`));
}

// Current findings, else the latest one; earlier ones are folded.
function findings(told) {
  const open = told.filter((each, place) => each.now || (place === 0 && !told.some((one) => one.now)));
  const past = told.filter((each) => !open.includes(each));
  return [...open.map(finding), past.length ? h("details", { className: "earlier", data: { name: "earlier" } }, h("summary", {}, `Earlier: ${past.map((each) => `rank ${each.rank}, ${each.cause}`).join("; ")}`), past.map(finding)) : null].filter(Boolean);
}

function cell(rank, vitals, slow) {
  const pace = rank.pace;
  const says = rank.state === "waiting" && rank.waits_for ? `waits for ${rank.waits_for}` : pace ? `waits ${share(pace.waiting / pace.seconds)}, ${pace.data > LOADS_LONG * pace.seconds ? `loads ${seconds(pace.data)}` : `computes ${seconds(pace.compute)}`}` : "no step yet";
  const part = rank.local_steps != null ? `${count(rank.local_steps)} local steps per period` : rank.share != null ? `${share(rank.share)} of a step` : null;
  const own = [part, vitals?.cpu_share !== undefined ? `CPU ${share(vitals.cpu_share)}` : null, vitals?.rss !== undefined ? bytes(vitals.rss) : null].filter(Boolean).join(", ");
  return h("div", { className: `cell${slow ? " straggler" : ""}`, data: { kind: KINDS[rank.state] ?? "" }, title: `${rank.machine ?? "unknown machine"}, process ${rank.pid ?? "unknown"}, attempt ${(rank.attempt ?? 0) + 1}` },
    h("span", { className: "state" }, rank.state ?? "–"), h("b", {}, `rank ${rank.rank}`), h("span", {}, [`step ${count(rank.step)}`, rank.machine].filter(Boolean).join(" · ")), h("span", {}, says), h("span", { className: "of" }, own));
}

const VITALS = { cpu_share: share, busy: share, pressure: share, steal: share, throttled: share, load: short, memory: bytes, rss: bytes, sent: (value) => `${bytes(value)}/s`, received: (value) => `${bytes(value)}/s`, gc_seconds: seconds };

function machines(told) {
  const names = Object.keys(told);
  if (!names.length) return empty("No machine has reported yet: load, memory and network are sampled during training.");
  const columns = [...new Set(names.flatMap((name) => Object.keys(told[name])))].sort();
  return h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { className: "left" }, "machine"), columns.map((name) => h("th", {}, name.replaceAll("_", " "))))),
    h("tbody", {}, names.map((name) => h("tr", {}, h("td", { className: "name" }, name), columns.map((column) => h("td", {}, (VITALS[column] ?? short)(told[name][column] ?? null))))))));
}

const ranksOf = (ranks) => `rank${ranks.length > 1 ? "s" : ""} ${ranks.length > 12 ? `${ranks.slice(0, 12).join(", ")} and ${ranks.length - 12} more` : ranks.join(", ")}`;

function differences(told) {
  if (!told.length) return null;
  return h("div", { className: "card wide" }, h("h2", {}, "Differences between ranks"), h("p", { className: "note" }, "Versions, platforms and settings; all others are equal on all ranks."),
    h("div", { className: "scroll" }, h("table", {}, h("tbody", {}, told.map((each) => h("tr", {}, h("td", { className: "name" }, each.name), h("td", { className: "left" }, each.values.map((one) => h("div", {}, `${one.value ?? "not set"}: ${ranksOf(one.ranks)}`)))))))));
}

export function make({ run, get }) {
  let field = "waiting";
  let stretch = null;
  let told = null;
  const span = () => told.end - told.begin;
  const since = (part) => { const passed = told.begin + part * span() - (run().summary.run.started ?? told.begin); return seconds(passed >= 10 ? Math.round(passed) : passed); };
  const map = heatmap({
    rowNames: () => told.ranks.map((rank) => `rank ${rank}`), columnNames: () => [0, 0.25, 0.5, 0.75, 1].map(since), format: (value) => FIELDS[field][1](value),
    told: (row, column, value) => `rank ${told.ranks[row]}, ${since((column + 0.5) / told.cells[row].length)} after the start: ${value === null ? "no step ended" : FIELDS[field][1](value)}`,
    picked: (first, last) => {
      const columns = told.cells[0].length;
      stretch = first === null ? null : { begin: told.begin + (first / columns) * span(), end: told.begin + ((last + 1) / columns) * span() };
      show();
    },
  });
  const choice = h("select", { "aria-label": "Quantity in the heat map", onchange: () => { field = choice.value; show(); } }, Object.entries(FIELDS).map(([name, [words]]) => h("option", { value: name }, words)));
  const back = h("button", { hidden: true, onclick: () => { stretch = null; show(); } }, "Whole run");
  const sampled = h("span", { className: "note" });
  const found = h("div", {});
  const now = h("div", { className: "cells" });
  const nothing = h("div", {});
  const around = h("div", { className: "card wide" });
  const unlike = h("div", { className: "wide" });
  const filter = h("input", { type: "search", placeholder: "rank, state, machine …", "aria-label": "Filter ranks", oninput: () => showRanks() });
  let vitals = { ranks: {}, machines: {} };
  let slow = new Set();
  const element = h("div", {}, found, h("div", { className: "card" }, h("h2", {}, "Every rank over time"), h("p", { className: "note" }, "A straggler waits little while all others wait for it. Drag to select a time range; double-click for the whole run."), h("div", { className: "row" }, choice, back, sampled), nothing, map.element),
    h("div", { className: "grid", style: { marginTop: "14px" } }, h("div", { className: "card wide" }, h("div", { className: "row" }, h("h2", {}, "Now"), filter), now), around, unlike));

  function showRanks() {
    const words = filter.value.toLowerCase();
    const ranks = run().summary.ranks.filter((rank) => `rank ${rank.rank} ${rank.state} ${rank.machine}`.toLowerCase().includes(words));
    now.classList.toggle("dense", ranks.length > 48);
    settle(now, ranks.length ? ranks.map((rank) => cell(rank, vitals.ranks[rank.rank], slow.has(rank.rank))) : empty(words ? "No rank matches." : "No rank has started yet."));
  }

  async function show() {
    const each = run();
    if (!each.summary) return;
    const [heat, people] = await Promise.all([get(`${each.key}/heat`, { field, cells: HEAT_CELLS, ...(stretch ?? {}) }), get(`${each.key}/workers`)]);
    told = heat;
    vitals = people.vitals;
    slow = new Set(people.findings.filter((one) => one.now).map((one) => one.rank));
    settle(found, people.findings.length ? findings(people.findings.slice(0, FINDINGS)) : h("p", { className: "fine" }, "No straggler was found: no rank makes the others wait for long."));
    back.hidden = !stretch;
    sampled.textContent = told.sampled ? "sampled steps; select a time range to see all of its steps" : "";
    map.element.hidden = !told.ranks.length;
    settle(nothing, told.ranks.length ? null : empty("No step is complete yet."));
    if (told.ranks.length) map.draw(told.cells);
    showRanks();
    settle(around, h("h2", {}, "Machines"), machines(vitals.machines));
    settle(unlike, differences(people.differences ?? []));
  }
  return { element, show, redraw: () => { if (told?.ranks.length) map.draw(told.cells); } };
}
