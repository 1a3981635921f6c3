// Hops: rounds of a collective as small pictures, with ranks on a circle and an arrow per message.
import { h } from "./dom.js";
import { bytes } from "./units.js";

const SPACE = "http://www.w3.org/2000/svg";
const MIDDLE = 70;
const LABELED = 16; // maximum number of ranks with numbers
const LINES = 400; // with more lines, arrowheads would hide them

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SPACE, name);
  Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  element.append(...children);
  return element;
}

const place = (rank, world, radius) => {
  const angle = (2 * Math.PI * rank) / world - Math.PI / 2;
  return [MIDDLE + radius * Math.cos(angle), MIDDLE + radius * Math.sin(angle)];
};

// Bent to the right, so that messages in both directions are two lines; it ends before the ranks' dots.
function arrow([source, target], world, does, heads) {
  const [from, to] = [place(source, world, 48), place(target, world, 48)];
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const long = Math.hypot(dx, dy);
  const short = Math.min(8, long / 4) / long;
  const bend = 0.12;
  const points = [from[0] + dx * short, from[1] + dy * short, (from[0] + to[0]) / 2 - dy * bend, (from[1] + to[1]) / 2 + dx * bend, to[0] - dx * short, to[1] - dy * short].map((each) => each.toFixed(1));
  return svg("path", { d: `M${points[0]} ${points[1]}Q${points[2]} ${points[3]} ${points[4]} ${points[5]}`, ...(heads ? { "marker-end": `url(#hop-${does})` } : {}) });
}

function picture({ first, last, does, hops, share }, world, nbytes) {
  const rounds = first === last ? `round ${first + 1}` : `rounds ${first + 1} to ${last + 1}`;
  const told = `${rounds}: ${does}, ${bytes(share * nbytes)} per message`;
  const heads = hops.length <= LINES;
  const ranks = Array.from({ length: world }, (_, rank) => rank);
  const [dots, labels] = [48, 62].map((radius) => ranks.map((rank) => place(rank, world, radius).map((each) => each.toFixed(1))));
  const end = svg("marker", { id: `hop-${does}`, viewBox: "0 0 8 8", refX: "7", refY: "4", markerWidth: "5", markerHeight: "5", orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8Z" }));
  const drawing = svg("svg", { viewBox: `0 0 ${2 * MIDDLE} ${2 * MIDDLE}`, role: "img", "aria-label": `${told}; ${hops.length} messages per round`, class: does }, svg("defs", {}, end),
    ...hops.map((hop) => arrow(hop, world, does, heads)), ...dots.map(([cx, cy]) => svg("circle", { cx, cy, r: world > LABELED ? "2" : "4" })),
    ...(world > LABELED ? [] : labels.map(([x, y], rank) => svg("text", { x, y, "text-anchor": "middle", "dominant-baseline": "central" }, String(rank)))));
  return h("figure", {}, drawing, h("figcaption", {}, told));
}

export function hops({ collective, world, nbytes, pictures }) {
  return h("div", { className: "hops" }, h("h3", {}, `${collective} among ${world} ranks`), h("div", { className: "pictures" }, pictures.map((each) => picture(each, world, nbytes))));
}
