// The server: numbers by fetch, news by server-sent events. The token is in the page's own link.
const token = new URLSearchParams(location.search).get("token") ?? "";

const PATIENCE_MS = 60000; // for one answer

// The server's error message: JSON from the views, plain text from its guard.
function problemIn(text) {
  try { return JSON.parse(text).problem; } catch { return text.length < 300 && !text.startsWith("<") ? text : undefined; }
}

export async function get(path, query = {}) {
  const asked = new URLSearchParams({ token });
  for (const [name, value] of Object.entries(query)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") asked.append(name, each);
  }
  const response = await fetch(`/api/${path}?${asked}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  throw new Error(problemIn(text) ?? `The server answered with status ${response.status}.`);
}

// The browser reconnects automatically, and resumes with Last-Event-ID.
export function listen(heard, said) {
  const source = new EventSource(`/events?${new URLSearchParams({ token })}`);
  for (const kind of ["tick", "news"]) source.addEventListener(kind, (event) => heard(kind, JSON.parse(event.data)));
  source.onopen = () => said("live");
  source.onerror = () => said(source.readyState === EventSource.CLOSED ? "refused" : "lost");
}
