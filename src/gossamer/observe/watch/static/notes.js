// Notes: recent events, shown in a corner for a while.
import { byId, h } from "./dom.js";

const SHOWN_MS = 12000;
const MOST = 4;

export function note(text, kind) {
  const element = h("div", { className: kind, onclick: () => element.remove() }, text.length > 300 ? `${text.slice(0, 300)} …` : text);
  byId("notes").append(element);
  while (byId("notes").childElementCount > MOST) byId("notes").firstElementChild.remove();
  setTimeout(() => element.remove(), SHOWN_MS);
}
