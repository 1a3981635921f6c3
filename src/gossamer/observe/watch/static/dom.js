// Elements from names, properties and children. Strings become text nodes, so text of a run is never markup.
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key === "style") Object.assign(element.style, value);
    else if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Replaces the content of an element only if it differs, which keeps selections, scrolling and hovering. If the
// keyboard focus is on a child, it moves to the child with the same id or data; open details stay open.
export function settle(element, ...children) {
  const next = h("div", {}, ...children);
  const unfolded = new Set([...element.querySelectorAll("details[open]")].map(nameOf));
  for (const each of next.querySelectorAll("details")) each.open = unfolded.has(nameOf(each));
  if (next.innerHTML === element.innerHTML) return;
  const at = element.contains(document.activeElement) ? document.activeElement : null;
  element.replaceChildren(...next.childNodes);
  if (at && !at.isConnected) [...element.querySelectorAll("button, a, [tabindex]")].find((each) => keyOf(each) === keyOf(at))?.focus();
}
const nameOf = (details) => details.dataset.name ?? details.textContent;
const keyOf = (element) => element.id || JSON.stringify(element.dataset);

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const empty = (...sentences) => h("p", { className: "empty" }, ...sentences);

export const code = (text) => h("code", {}, text);
