// Help: the keys, and what the page's words mean.
import { byId, h } from "./dom.js";

const KEYS = [["1 – 5", "the tabs"], ["/", "to the filter"], ["[ ]", "the run before, the next run"], ["t", "light or dark"], ["?", "this help"], ["Esc", "leaves a filter or this help"]];
const WORDS = [
  ["compute", "the training loop's own time: forward, backward, the optimizer"],
  ["waiting", "the training loop stands still until other ranks or the network are done"],
  ["data", "from a step's end to the next forward pass: loading the next batch"],
  ["encode, wire, decode", "the communication thread's time. It may be hidden behind computing, so it is shown apart"],
  ["straggler", "a rank that the others wait for. It waits least itself"],
  ["mean of cells", "a curve has a point per pixel: the mean of its values, and a band from the least to the greatest"],
];
const list = (pairs) => h("dl", {}, pairs.flatMap(([term, text]) => [h("dt", {}, h("b", {}, term)), h("dd", {}, text)]));

export function explain() {
  const dialog = byId("help");
  dialog.replaceChildren(h("h2", {}, "Keys"), list(KEYS), h("h2", {}, "Words"), list(WORDS), h("button", { onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}
