// Numbers and times in words.

const UNITS = ['B', 'kB', 'MB', 'GB', 'TB'];

export function bytes(n) {
  if (n == null) return '–';
  let unit = 0;
  while (n >= 999.5 && unit < UNITS.length - 1) {
    n /= 1000;
    unit++;
  }
  return `${unit && n < 99.5 ? n.toFixed(n < 9.95 ? 2 : 1) : Math.round(n)} ${UNITS[unit]}`;
}

export function seconds(s) {
  if (s == null || Number.isNaN(s)) return '–';
  if (s === 0) return '0 ms';
  if (s < 0.00095) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 99.5) return `${s.toFixed(s < 9.95 ? 2 : 1)} s`;
  return duration(s);
}

export function duration(s) {
  if (s < 100) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

/** Seconds since 1970 -> such as "27 Nov 2026, 08:30", in the browser's time zone. */
export const date = (s) => new Date(s * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });

export function count(n) {
  if (n == null || Number.isNaN(n)) return '–';
  if (n >= 1e9) return `${(n / 1e9).toFixed(1)} G`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)} M`;
  if (n >= 99_950) return `${(n / 1e3).toFixed(0)} k`;
  if (n >= 100) return Math.round(n).toLocaleString('en');
  return n === Math.round(n) ? String(n) : n.toFixed(n < 10 ? 2 : 1);
}

export const percent = (share) => (share == null || Number.isNaN(share) ? '–' : `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`);

export const provider = (name) => name.replace('ExecutionProvider', '');

/** Visible white space of a token. */
export const visible = (token) => token.replaceAll('\n', '⏎').replaceAll('\t', '⇥');
