// Reads Prometheus' text format, and computes rates and quantiles from two samples of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Text -> Map from a series' name to a list of {labels, value}. */
export function parse(text) {
  const series = new Map();
  for (const line of text.split('\n')) {
    const found = LINE.exec(line); // comments are no match
    if (!found) continue;
    const labels = {};
    if (found[2]) for (const [, name, value] of found[2].matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, (_, c) => (c === 'n' ? '\n' : c));
    const value = found[3] === '+Inf' ? Infinity : Number(found[3]);
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value });
  }
  return series;
}

const matches = (labels, wanted) => Object.entries(wanted).every(([name, value]) => (value instanceof RegExp ? value.test(labels[name] ?? '') : labels[name] === value));

/** The sum of all series of a name whose labels are those wanted. */
export function sum(sample, name, wanted = {}) {
  let total = 0;
  for (const each of sample?.get(name) ?? []) if (matches(each.labels, wanted)) total += each.value;
  return total;
}

/** How much a counter has grown between two samples. A counter that fell was reset: then its new value counts. */
export function grown(before, after, name, wanted = {}) {
  const now = sum(after, name, wanted);
  const then = sum(before, name, wanted);
  return now >= then ? now - then : now;
}

/** Values of a label that a series has. */
export const valuesOf = (sample, name, label) => [...new Set((sample?.get(name) ?? []).map((each) => each.labels[label]))];

/** Failed requests by the values of some labels, the most first: [[...values, in the last minute, since the start]]. */
export function failures({ before, after }, ...names) {
  const rows = new Map();
  for (const { labels } of after.get('te_request_failure') ?? []) {
    const own = Object.fromEntries(names.map((name) => [name, labels[name]]));
    rows.set(JSON.stringify(own), [...Object.values(own), grown(before, after, 'te_request_failure', own), sum(after, 'te_request_failure', own)]);
  }
  return [...rows.values()].filter((row) => row.at(-1)).sort((a, b) => b.at(-2) - a.at(-2) || b.at(-1) - a.at(-1));
}

/** The buckets of a histogram between two samples: [[upper bound, count in this bucket]], in ascending order. */
export function buckets(before, after, name, wanted = {}) {
  const bounds = valuesOf(after, `${name}_bucket`, 'le').map((le) => [le === '+Inf' ? Infinity : Number(le), le]);
  bounds.sort((a, b) => a[0] - b[0]);
  let below = 0;
  return bounds.map(([bound, le]) => {
    const upTo = grown(before, after, `${name}_bucket`, { ...wanted, le });
    const inside = Math.max(upTo - below, 0);
    below = upTo;
    return [bound, inside];
  });
}

/** The quantile q of a histogram between two samples, linear inside a bucket; null without observations. */
export function quantile(q, counts) {
  const total = counts.reduce((all, [, n]) => all + n, 0);
  if (!total) return null;
  let rank = q * total;
  let low = 0;
  for (const [high, n] of counts) {
    if (rank <= n && n) return high === Infinity ? low : low + ((high - low) * rank) / n;
    rank -= n;
    if (high !== Infinity) low = high;
  }
  return low;
}
