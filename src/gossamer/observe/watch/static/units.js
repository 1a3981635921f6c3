// Numbers as text, in the units of the rest of Gossamer: 1.2 MB, 34 ms, 12 %.
const NONE = "–";

export function short(value) {
  if (value === null || value === undefined) return NONE;
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  if (size >= 100) return value.toFixed(0);
  return value.toPrecision(3);
}

function scaled(value, units) {
  if (value === null || value === undefined) return NONE;
  let place = 0;
  while (Math.abs(value) >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place === 0 || Math.abs(value) >= 99.95 ? value.toFixed(0) : value.toFixed(1)} ${units[place]}`.trim();
}

export const bytes = (count) => scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const rate = (bytesPerSecond) => scaled(bytesPerSecond === null ? null : bytesPerSecond * 8, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
export const count = (number) => (number === null || number === undefined ? NONE : Math.round(number).toLocaleString("en-US"));
export const share = (part) => (part === null || part === undefined || !Number.isFinite(part) ? NONE : `${(100 * part).toFixed(Math.abs(part) < 0.0995 ? 1 : 0)} %`);

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const whole = Math.round(value);
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  if (whole >= 100) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (value >= 1) return `${plain(value)} s`;
  if (value >= 1e-3) return `${plain(value * 1e3)} ms`;
  return value > 0 ? `${plain(value * 1e6)} µs` : "0 s";
}

const plain = (value) => Number(value.toPrecision(3)).toString();

export const clock = (at) => (at ? new Date(at * 1000).toLocaleTimeString("en-GB") : NONE);
export const day = (at) => (at ? new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : NONE);
