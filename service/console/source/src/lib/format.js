// Numbers and times in words.

const BYTES = ['B', 'kB', 'MB', 'GB', 'TB'];
const TIMES = [[86400, 'days'], [3600, 'h'], [60, 'min']];
const LARGE = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

const none = (n) => n == null || Number.isNaN(n);
const three = (n, unit) => `${Number(n.toPrecision(3))} ${unit}`;

export function bytes(n) {
  if (none(n)) return '–';
  const unit = n < 999.5 ? 0 : Math.min(BYTES.length - 1, Math.floor(Math.log10(n * 1.0005) / 3));
  return three(n / 1000 ** unit, BYTES[unit]);
}

export function seconds(s) {
  if (none(s)) return '–';
  if (s >= 99.5) return duration(s);
  return s >= 0.9995 ? three(s, 's') : s >= 0.00095 || !s ? three(s * 1e3, 'ms') : three(s * 1e6, 'µs');
}

export function duration(s) {
  const [size, unit] = TIMES.find(([each]) => s >= 2 * each) ?? [1, 's'];
  return `${Math.round(s / size)} ${unit}`;
}

/** Seconds since 1970 -> such as "27 Nov 2026, 08:30", in the browser's time zone. */
export const date = (s) => new Date(s * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });

export function count(n) {
  if (none(n)) return '–';
  return n < 99_950 ? n.toLocaleString('en', { maximumFractionDigits: n < 10 ? 2 : n < 100 ? 1 : 0 }) : LARGE.format(n);
}

export const percent = (share) => (none(share) ? '–' : `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`);

export const provider = (name) => name.replace('ExecutionProvider', '');

/** Visible white space of a token. */
export const visible = (token) => token.replaceAll('\n', '⏎').replaceAll('\t', '⇥');
