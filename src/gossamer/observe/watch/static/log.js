// Log and errors: the root failure on top, then every line of every rank by time, filtered by the server.
import { empty, h, settle } from "./dom.js";
import { bytes, clock, count } from "./units.js";

const PAGE = 300;
const KEPT = 3000; // lines in the page; older ones are requested again
const TYPED_MS = 150;

const KINDS = { killed: "was killed", raised: "raised an error", ended: "ended", stopped: "was stopped", uncaught: "raised an uncaught error", echo: "followed" };
const ranksOf = (ranks) => (ranks.length > 12 ? `${ranks.slice(0, 12).join(", ")} and ${ranks.length - 12} more` : ranks.join(", "));

function failure(each, others) {
  return h("section", { className: "failure" }, h("h2", {}, `${each.rank === null ? "The run" : `Rank ${each.rank}`} ${KINDS[each.kind] ?? each.kind ?? "failed"} first, at ${clock(each.at)}`), h("div", {}, each.message),
    each.took.length ? h("p", { className: "note" }, `Consequence: rank${each.took.length > 1 ? "s" : ""} ${ranksOf(each.took)} ended because of it.`) : h("p", { className: "note" }, "No other rank ended because of it, as far as is known."),
    others.length ? h("p", { className: "note" }, `${count(others.length)} further failure${others.length > 1 ? "s" : ""} without a known cause: rank${others.length > 1 ? "s" : ""} ${ranksOf(others.map((other) => other.rank))}.`) : null, each.traceback ? h("pre", {}, each.traceback) : h("p", { className: "note" }, "It has no traceback: a signal or the system ended it."));
}

const line = (each) => h("div", { className: "line", data: { level: each.level ?? "info", id: each.id } }, h("span", {}, clock(each.at)), h("span", {}, each.rank === null ? each.stream ?? "launcher" : `rank ${each.rank}`), h("p", {}, each.text, each.more ? h("em", {}, ` … and ${bytes(each.more)} more`) : null));

function happened(each) {
  if (each.kind === "stacks" && Array.isArray(each.content?.lines)) return h("div", { className: "line" }, h("span", {}, clock(each.at)), h("span", {}, "run"), h("div", {}, h("b", {}, "stacks"), ` ${each.content.why}`, h("details", {}, h("summary", {}, "show"), h("pre", {}, each.content.lines.join("\n")))));
  const content = Object.entries(each.content ?? {}).map(([name, value]) => (name === "message" ? String(value) : `${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`)).join(", ");
  return h("div", { className: "line" }, h("span", {}, clock(each.at)), h("span", {}, each.rank === null ? "run" : `rank ${each.rank}`), h("p", {}, h("b", {}, each.kind), " ", content.slice(0, 400)));
}

export function make({ run, get }) {
  let newest = null;
  let oldest = null;
  let typed = 0;
  let asked = 0;
  const first = h("div", {});
  const lines = h("div", { className: "log", tabIndex: 0, role: "log", "aria-label": "Lines" });
  const rank = h("select", { "aria-label": "Rank", onchange: () => again() });
  const level = h("select", { "aria-label": "Level", onchange: () => again() }, [["info", "all lines"], ["warning", "warnings and errors"], ["error", "errors"]].map(([value, words]) => h("option", { value }, words)));
  const text = h("input", { type: "search", placeholder: "lines that contain …", "aria-label": "Text", oninput: () => { clearTimeout(typed); typed = setTimeout(again, TYPED_MS); } });
  const follow = h("input", { type: "checkbox", checked: true, id: "follow" });
  const earlier = h("button", { onclick: () => before() }, "Earlier lines");
  const events = h("div", { className: "scroll" });
  const element = h("div", {}, first, h("div", { className: "card" }, h("div", { className: "row" }, text, rank, level, h("label", {}, follow, " follow"), h("span", { className: "spring" }), earlier), lines),
    h("div", { className: "card", style: { marginTop: "14px" } }, h("h2", {}, "Events"), h("p", { className: "note" }, "Notices, checkpoints, group changes, skipped steps; newest first."), events));

  const query = () => ({ rank: rank.value, level: level.value, text: text.value, limit: PAGE });
  async function before() {
    if (oldest === null) return;
    const mine = asked;
    const more = await get(`${run().key}/log`, { ...query(), before: oldest });
    if (mine !== asked) return; // the filter has changed
    earlier.disabled = more.length < PAGE;
    if (!more.length) return;
    oldest = Math.min(...more.map((each) => each.id));
    const height = lines.scrollHeight;
    lines.prepend(...more.map(line));
    lines.scrollTop += lines.scrollHeight - height;
  }
  function append(found) {
    if (!found.length) return;
    newest = Math.max(newest ?? 0, ...found.map((each) => each.id));
    oldest ??= Math.min(...found.map((each) => each.id));
    lines.append(...found.map(line));
    if (lines.childElementCount > KEPT) {
      while (lines.childElementCount > KEPT) lines.firstElementChild.remove();
      oldest = Math.min(...[...lines.children].map((each) => Number(each.dataset.id)));
      earlier.disabled = false;
    }
    if (follow.checked) lines.scrollTop = lines.scrollHeight;
  }
  // There may be more new lines than one answer has, and no news after them.
  async function later() {
    const mine = asked;
    let found;
    do {
      found = await get(`${run().key}/log`, { ...query(), after: newest });
      if (mine !== asked) return; // the filter has changed
      append(found);
    } while (found.length === PAGE);
  }
  async function again() {
    const mine = (asked += 1);
    const found = await get(`${run().key}/log`, query());
    if (mine !== asked) return; // the filter has changed
    newest = oldest = null;
    lines.replaceChildren();
    earlier.disabled = found.length < PAGE;
    append(found);
    lines.dataset.asked = text.value;
    if (!found.length) lines.append(empty(text.value || rank.value || level.value !== "info" ? "No line matches." : "No line was printed yet."));
  }
  async function show() {
    const each = run();
    if (!each.summary) return;
    const chosen = rank.value;
    settle(rank, h("option", { value: "" }, "all ranks"), h("option", { value: "-1" }, "launcher"), each.summary.ranks.map((one) => h("option", { value: one.rank }, `rank ${one.rank}`)));
    rank.value = chosen;
    const told = await get(`${each.key}/failures`);
    const [root, ...others] = told.failures;
    settle(first, root ? failure(root, others.filter((other) => other.caused_by === null)) : h("p", { className: "fine" }, "No failure so far."));
    settle(events, told.events.length ? told.events.map(happened) : empty("No event so far."));
    if (newest === null) await again();
    else await later();
  }
  return { element, show };
}
