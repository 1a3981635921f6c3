// Overview: metrics over steps, seconds or bytes, of all runs; parts of the step time; the estimated step time.
import { chart, stacked } from "./chart.js";
import { series } from "./colors.js";
import { code, empty, h, settle } from "./dom.js";
import { bytes, count, seconds, share, short } from "./units.js";

const AXES = { steps: ["step", "steps", count], seconds: ["seconds since the start", "seconds", seconds], bytes: ["bytes sent by all ranks", "bytes", bytes] };
const FIRST = 6; // metrics shown at first
const CELLS = 400;
const AT_ONCE = 24; // names per request

const xOf = (axis, curve, started) => (axis === "steps" ? curve.step : axis === "bytes" ? curve.bytes : curve.at.map((at) => at - started));

// Curves of several runs on one x axis: all points of any run, with null for runs without one there.
function aligned(curves) {
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const spread = (curve, values) => { const line = Array(x.length).fill(null); curve.x.forEach((value, index) => { line[place.get(value)] = values[index]; }); return line; };
  return [x, curves.map((curve) => ({ label: curve.label, color: curve.color, values: spread(curve, curve.mean), low: curve.band ? spread(curve, curve.least) : null, high: curve.band ? spread(curve, curve.greatest) : null }))];
}

function recipeOf(run) {
  const told = run.summary.run;
  const rows = [["recipe", told.recipe], ["script", told.script], ["workers", told.workers], ["parameters", told.parameters && count(told.parameters)], ["network", told.network && JSON.stringify(told.network)], ["bandwidth limits", told.limits], ["machine", told.machine], ["versions", told.versions && Object.entries(told.versions).map((each) => each.join(" ")).join(", ")], ["folder", run.folder]];
  return h("dl", { className: "dl" }, rows.filter(([, value]) => value !== undefined && value !== null && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", { className: "mono" }, typeof value === "string" ? value.replace(/^"|"$/g, "") : Array.isArray(value) ? value.join(" ") : String(value))]));
}

export function make({ run, runs, get, refresh }) {
  let axis = "steps";
  let wanted = "";
  let most = FIRST;
  let asked = 0;
  const cards = new Map();
  const filter = h("input", { type: "search", placeholder: "metrics named …", "aria-label": "Filter metrics", oninput: () => { wanted = filter.value.toLowerCase(); most = FIRST; refresh(); } });
  const buttons = Object.keys(AXES).map((name) => h("button", { "aria-pressed": String(name === axis), onclick: () => { axis = name; buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent === name))); cards.forEach((each) => each.drawn.forget()); cards.clear(); metrics.replaceChildren(); refresh(); } }, name));
  const metrics = h("div", { className: "grid" });
  const more = h("div", { className: "row" });
  const parts = chart({ xLabel: "seconds since the start", xFormat: seconds, yLabel: "seconds per step", yFormat: seconds, zero: true });
  const thread = chart({ xLabel: "seconds since the start", xFormat: seconds, yLabel: "seconds per step", yFormat: seconds, zero: true });
  const pace = chart({ xLabel: "seconds since the start", xFormat: seconds, yLabel: "steps per second", zero: true });
  const sampled = h("p", { className: "note" });
  const inAll = h("div", {});
  const compared = h("div", { className: "card wide" });
  const card = (title, text, ...inside) => h("div", { className: "card" }, h("h2", {}, title), h("p", { className: "note" }, text), ...inside);
  const element = h("div", {}, h("div", { className: "row" }, filter, h("span", { className: "note" }, "over"), ...buttons), metrics, more,
    h("div", { className: "grid" }, card("Time of a step by part", "Time of the training loop, as means over ranks.", parts.element), card("Communication thread", "Its time, which may be hidden behind computation.", thread.element), h("div", { className: "card wide" }, h("h2", {}, "Pace"), h("p", { className: "note" }, "Means over ranks."), pace.element)), sampled,
    h("div", { className: "grid" }, h("div", { className: "card" }, h("h2", {}, "Totals"), inAll), h("div", { className: "card" }, h("h2", {}, "This run"), h("div", { className: "of-run" }))), compared);
  compared.hidden = true;

  function cardOf(name) {
    if (!cards.has(name)) {
      const [label, , format] = AXES[axis];
      const drawn = chart({ xLabel: label, xFormat: format, yLabel: "" });
      const words = h("p", { className: "note" }, "\u00a0");
      const made = { drawn, words, element: h("div", { className: "card", data: { metric: name } }, h("h2", {}, name), words, drawn.element) };
      metrics.append(made.element);
      cards.set(name, made);
    }
    return cards.get(name);
  }

  // The server limits the names per request.
  async function curvesOf(each, names) {
    const parts = [];
    for (let first = 0; first < names.length; first += AT_ONCE) parts.push(get(`${each.key}/curves`, { name: names.slice(first, first + AT_ONCE), cells: CELLS, axis }));
    return (await Promise.all(parts)).flat();
  }

  async function showMetrics(shown) {
    const mine = (asked += 1);
    const known = shown.filter((each) => each.summary);
    const names = [...new Set(known.flatMap((each) => each.metrics ?? []))].filter((name) => name.toLowerCase().includes(wanted));
    const now = names.slice(0, most);
    const answers = now.length ? await Promise.all(known.map((each) => curvesOf(each, now))) : [];
    if (mine !== asked) return; // the filter has changed
    for (const [name, each] of cards) if (!now.includes(name)) { each.element.remove(); cards.delete(name); each.drawn.forget(); }
    for (const name of now) {
      const curves = known.map((each, place) => ({ ...answers[place].find((curve) => curve.name === name), label: known.length > 1 ? each.name : name, color: series(place), band: known.length === 1, started: each.summary.run.started ?? 0 }))
        .filter((curve) => curve.step?.length).map((curve) => ({ ...curve, x: xOf(axis, curve, curve.started) }));
      const made = cardOf(name);
      const lacking = curves.reduce((sum, curve) => sum + curve.not_finite, 0);
      const [first] = curves;
      made.words.textContent = [first && (first.ranks < first.logged_by ? `the lowest ${first.ranks === 1 ? "rank" : `${first.ranks} ranks`} of ${first.logged_by} that log it` : `${first.logged_by} rank${first.logged_by === 1 ? "" : "s"}`), lacking ? `${count(lacking)} values were not finite` : null].filter(Boolean).join(" · ");
      made.curves = curves;
    }
    // After all cards exist: the width of a card depends on their number
    for (const name of now) { const { drawn, curves } = cards.get(name); drawn.draw(...aligned(curves)); }
    settle(more, names.length > now.length ? h("span", { className: "note" }, `${now.length} of ${count(names.length)} metrics`) : null);
    if (names.length > now.length) more.append(h("button", { onclick: () => { most += 12; refresh(); } }, "Show more"));
    if (!now.length) settle(more, wanted ? empty("No metric has this name.") : empty("No metric was logged yet. Write ", code("session.log(loss=loss)"), " in the training loop, after the step."));
  }

  async function showTime() {
    const each = run();
    const told = await get(`${each.key}/time`, { cells: CELLS });
    const started = each.summary.run.started ?? told.at[0];
    const x = told.at.map((at) => at - started);
    const estimated = each.summary.run.estimated_seconds_per_step, about = each.summary.run.estimated_for ?? {}, within = each.summary.run.estimated_interval;
    const lines = (names, call = {}) => stacked(names.map((name) => ({ label: call[name] ?? name, color: name, values: told.parts[name] })));
    if (told.steps) {
      parts.draw(x, lines(["compute", "waiting", "data"], { data: "data loading" }));
      thread.draw(x, lines(["encode", "wire", "decode"]));
      pace.draw(x, [{ label: "measured", color: "series-0", values: told.pace }, ...(estimated ? [{ label: "estimated", color: "series-1", values: x.map(() => 1 / estimated), dashed: true }] : [])]);
    } else for (const drawn of [parts, thread, pace]) if (!drawn.element.childElementCount) drawn.element.append(empty("No step is complete yet. The first one ends with ", code("optimizer.step()"), " after ", code("gossamer.attach"), "."));
    sampled.textContent = told.sampled ? "This run has too many steps to show: a sample represents them. On the Workers tab, select a time range to see all of its steps." : "";
    const row = (name, measured, said = "") => h("tr", {}, h("td", { className: "left" }, name), estimated ? h("td", {}, said) : null, h("td", {}, measured));
    const head = estimated ? h("thead", {}, h("tr", {}, ["", "estimated", "measured"].map((name) => h("th", { className: name ? "" : "left" }, name)))) : null;
    settle(inAll, h("table", {}, head, h("tbody", {},
      row("mean step time", told.steps ? seconds(told.seconds_per_step) : "–", seconds(estimated)), row("steps per second", told.steps ? short(1 / told.seconds_per_step) : "–", short(1 / estimated)),
      estimated && told.steps ? row("over estimate", share(told.seconds_per_step / estimated - 1)) : null,
      estimated && within ? row(`${share(within.coverage)} of the time`, told.steps ? (within.low_seconds <= told.seconds_per_step && told.seconds_per_step <= within.high_seconds ? "inside" : "outside") : "–", `${seconds(within.low_seconds)} to ${seconds(within.high_seconds)}`) : null,
      row("sent by all ranks", bytes(told.sent)), row("steps of all ranks", count(told.steps)), row("steps skipped", count(told.skipped)))),
    h("p", { className: "note" }, estimated ? `Estimate of gossamer explain for ${about.workers} workers on ${about.network}, ${about.recipe}.` : [code("gossamer explain --json"), " estimates the step time before a run, and ", code("gossamer run --forecast"), " shows it here."]));
    settle(element.querySelector(".of-run"), recipeOf(each));
  }

  function compare(shown) {
    compared.hidden = shown.length < 2;
    if (compared.hidden) return;
    const cell = (text) => h("td", {}, text);
    settle(compared, h("h2", {}, "Comparison of runs"), h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["run", "recipe"].map((name) => h("th", { className: "left" }, name)), ["workers", "step", "loss", "step time", "waiting", "sent per step", "state"].map((name) => h("th", {}, name)))),
      h("tbody", {}, shown.map((each) => { const told = each.summary; return h("tr", {}, h("td", { className: "name" }, each.name), h("td", { className: "name" }, String(told?.run.recipe ?? "–")), ...(told ? [cell(count(told.run.workers)), cell(count(told.step)), cell(short(told.loss?.value)), cell(seconds(told.pace?.seconds)), cell(told.pace ? share(told.pace.waiting / told.pace.seconds) : "–"), cell(bytes(told.pace?.bytes_sent)), cell(told.ended ?? "active")] : [cell(each.problem)])); })))));
  }

  async function show() {
    if (!run().summary) return;
    compare(runs());
    await Promise.all([showMetrics(runs()), showTime()]);
  }
  return { element, show };
}
