// Head line: key numbers of the run, with units.
import { h, empty } from "./dom.js";
import { bytes, count, day, seconds, share, short } from "./units.js";

const fact = (name, value, kind = "", title = "") => h("div", { title }, h("b", { className: kind }, value), h("span", {}, name));
const STATES = { finished: ["finished", "good"], failed: ["failed", "bad"], interrupted: ["interrupted", "warn"] };

function stateOf(summary, now) {
  if (summary.ended) return STATES[summary.ended] ?? [String(summary.ended), ""];
  const silent = summary.latest === null ? 0 : now - summary.latest;
  if (summary.failures) return ["failing", "bad"];
  if (summary.latest === null) return ["starting", ""];
  return silent > 60 ? [`no news for ${seconds(silent)}`, "warn"] : ["training", "good"];
}

export function headline(run) {
  if (!run.summary) return [h("h1", {}, run.name), empty(run.problem ?? "This run has no data yet.")];
  const { run: told, ranks, pace, loss, step, latest } = run.summary;
  const [state, kind] = stateOf(run.summary, Date.now() / 1000);
  const passed = told.started && latest ? (told.ended ?? latest) - told.started : null;
  const recipe = typeof told.recipe === "string" ? told.recipe : "recipe not known yet";
  return [
    h("h1", {}, recipe, h("small", {}, [Array.isArray(told.script) ? told.script.join(" ") : told.script, `${told.workers ?? ranks.length} workers`, told.started ? `began ${day(told.started)}` : null].filter(Boolean).join(" · "))),
    h("div", { className: "facts" },
      fact("state", state, kind), fact("step", count(step)), fact("loss", loss && loss.value === null ? "not finite" : short(loss?.value), loss && loss.value === null ? "bad" : "", "latest value of the lowest rank that trains and logs it"),
      fact("running for", seconds(passed)), fact("step time", seconds(pace?.seconds), "", "mean over ranks and their latest steps"),
      fact("waiting", pace ? share(pace.waiting / pace.seconds) : "–", "", "share of a step in which the training loop waits"),
      fact("sent per step and rank", bytes(pace?.bytes_sent)),
      fact("stragglers found", String(run.summary.findings), run.summary.findings ? "warn" : "", "ranks that others waited for, once per cause; the Workers tab shows the current one"), fact("failures", String(run.summary.failures), run.summary.failures ? "bad" : "")),
  ];
}
