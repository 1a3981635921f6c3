// Help: the keys, and the terms of the page.
import { byId, h } from "./dom.js";

const KEYS = [["1 – 5", "select a tab"], ["/", "focus the filter"], ["[ ]", "previous run, next run"], ["t", "light or dark"], ["?", "this help"], ["Esc", "leave a filter or this help"]];
const WORDS = [
  ["compute", "the training loop's own time: forward, backward, the optimizer"],
  ["waiting", "time in which the training loop waits for other ranks or the network"],
  ["data", "time from the end of a step to the next forward pass: loading the next batch"],
  ["encode, wire, decode", "time of the communication thread. It may be hidden behind computation, so it has its own chart"],
  ["straggler", "the slowest rank, which the others wait for. It waits least itself"],
  ["mean of cells", "a curve has a point per pixel: the mean of its values, and a band from the minimum to the maximum"],
];
const list = (pairs) => h("dl", {}, pairs.flatMap(([term, text]) => [h("dt", {}, h("b", {}, term)), h("dd", {}, text)]));

export function explain() {
  const dialog = byId("help");
  dialog.replaceChildren(h("h2", {}, "Keys"), list(KEYS), h("h2", {}, "Terms"), list(WORDS), h("button", { onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}
