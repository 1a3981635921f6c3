// The server: numbers by fetch, news by server-sent events. The token is in the page's own link.
const token = new URLSearchParams(location.search).get("token") ?? "";

export async function get(path, query = {}) {
  const asked = new URLSearchParams({ token });
  for (const [name, value] of Object.entries(query)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") asked.append(name, each);
  }
  const response = await fetch(`/api/${path}?${asked}`);
  const content = await response.json();
  if (!response.ok) throw new Error(content.problem ?? `The server answers ${response.status}.`);
  return content;
}

// The browser connects again by itself, and says by Last-Event-ID where it was.
export function listen(heard, said) {
  const source = new EventSource(`/events?${new URLSearchParams({ token })}`);
  for (const kind of ["tick", "news"]) source.addEventListener(kind, (event) => heard(kind, JSON.parse(event.data)));
  source.onopen = () => said("live");
  source.onerror = () => said(source.readyState === EventSource.CLOSED ? "refused" : "lost");
}
