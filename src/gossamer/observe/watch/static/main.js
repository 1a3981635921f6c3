// The page: its runs, five tabs, and keys. Each tab is a module that makes its elements once and updates them.
import { get, listen } from "./api.js";
import { byId, h, settle } from "./dom.js";
import { forgetCharts, redrawCharts } from "./chart.js";
import { headline } from "./head.js";
import { explain } from "./help.js";
import { note } from "./notes.js";
import * as overview from "./overview.js";
import * as workers from "./workers.js";
import * as network from "./network.js";
import * as compression from "./compression.js";
import * as log from "./log.js";

const TABS = [["overview", "Overview", overview], ["workers", "Workers", workers], ["network", "Network", network], ["compression", "Compression", compression], ["log", "Log and errors", log]];
const RETRY_MS = 3000; // after an error
const FRESH_MS = 1000; // between two updates of frequent changes
const state = { runs: [], chosen: 0, tab: "overview", view: null, due: 0, busy: false, listens: false, again: 0 };

const run = () => state.runs[state.chosen];

function drawTabs() {
  settle(byId("tabs"), TABS.map(([key, name], place) => h("button", { role: "tab", id: `tab-${key}`, "aria-selected": String(state.tab === key), data: { tab: key } }, name,
    key === "log" && run()?.summary?.failures ? h("span", { className: "count" }, run().summary.failures) : null, h("kbd", {}, place + 1))));
}

function drawRuns() {
  settle(byId("runs"), state.runs.length < 2 ? [] : state.runs.map((each, place) => h("button", { "aria-pressed": String(place === state.chosen), title: each.folder, data: { run: place } }, each.name)));
}

function drawHead() {
  drawTabs();
  drawRuns();
  settle(byId("head"), headline(run()));
  document.title = `${run().summary?.step ?? "–"} · ${run().name} · gossamer watch`;
}

async function openTab(key) {
  state.tab = key;
  forgetCharts();
  drawTabs();
  const view = TABS.find(([name]) => name === key)[2].make({ run, runs: () => state.runs, get, refresh, open: openTab });
  state.view = view;
  byId("content").replaceChildren(view.element);
  history.replaceState(null, "", `${location.pathname}${location.search}#${key}`);
  await refresh();
}

// Keep the old content, and show the reason why it is not updated.
function complain(problem) {
  byId("problem").textContent = `This page is not up to date: ${problem.message.replace(/\.$/, "")}. It tries again automatically.`;
  byId("problem").hidden = false;
}

// One update at a time; news during an update cause one more.
async function refresh() {
  if (state.busy) { state.due = 1; return; }
  state.busy = true;
  clearTimeout(state.again);
  const { view, tab } = state; // another tab may be opened during the update
  try {
    await view.show();
    byId("content").dataset.shown = tab;
    byId("problem").hidden = true;
  } catch (problem) {
    complain(problem);
    state.again = setTimeout(refresh, RETRY_MS);
  }
  state.busy = false;
  if (state.due) { state.due = 0; setTimeout(refresh, view === state.view ? FRESH_MS : 0); }
}

function heard(kind, content) {
  const told = state.runs.find((each) => each.key === content.key);
  if (!told) return;
  if (kind === "news") {
    for (const each of content.failures) if (each.caused_by === null && each.kind !== "stopped") note(`Rank ${each.rank ?? "?"} failed: ${each.message}`, "bad");
    for (const each of content.findings) note(`Rank ${each.rank} is a straggler (${each.cause}): ${each.evidence}`, "warn");
    return;
  }
  const isNew = content.problem === undefined && (!told.summary || told.summary.run.started !== content.run.started);
  if (content.problem === undefined) { delete told.problem; told.summary = content; told.metrics = content.metrics; } else told.problem = content.problem;
  if (isNew) start(); else { drawHead(); refresh(); }
}

async function start() {
  try {
    state.runs = await get("runs");
  } catch (problem) {
    complain(problem);
    setTimeout(start, RETRY_MS);
    return;
  }
  byId("problem").hidden = true;
  drawHead();
  if (!state.listens) { state.listens = true; listen(heard, (how) => { byId("connection").dataset.state = how; byId("connection").textContent = SAID[how]; }); }
  await openTab(state.tab);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redrawCharts();
  state.view?.redraw?.();
}
const storedTheme = () => { try { return localStorage.getItem("gossamer-theme"); } catch { return null; } };
const turnTheme = () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("gossamer-theme", next); } catch { /* it is kept until the page is closed */ }
  setTheme(next);
};
const darkness = matchMedia("(prefers-color-scheme: dark)");
darkness.addEventListener("change", () => { if (!storedTheme()) setTheme(darkness.matches ? "dark" : "light"); });
setTheme(storedTheme() ?? (darkness.matches ? "dark" : "light"));

byId("theme").addEventListener("click", turnTheme);
byId("help-button").addEventListener("click", explain);
byId("tabs").addEventListener("click", (event) => { const tab = event.target.closest("[data-tab]"); if (tab) openTab(tab.dataset.tab); });
byId("runs").addEventListener("click", (event) => {
  const button = event.target.closest("[data-run]");
  if (!button) return;
  state.chosen = Number(button.dataset.run);
  drawHead();
  openTab(state.tab);
});
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return document.activeElement?.blur();
  if (event.target.closest("input, select, textarea, dialog")) return;
  if (event.key >= "1" && event.key <= String(TABS.length)) openTab(TABS[Number(event.key) - 1][0]);
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") explain();
  else if (event.key === "/") {
    const filter = byId("content").querySelector("input[type=search]");
    if (filter) { event.preventDefault(); filter.focus(); }
  } else if ((event.key === "[" || event.key === "]") && state.runs.length > 1) {
    state.chosen = (state.chosen + (event.key === "]" ? 1 : state.runs.length - 1)) % state.runs.length;
    drawHead();
    openTab(state.tab);
  }
});

const asked = location.hash.slice(1);
if (TABS.some(([key]) => key === asked)) state.tab = asked;
const SAID = { live: "connected", lost: "connection lost, trying again", refused: "another server is running here: open its link" };
start();
