// Cosines and principal components of vectors, as Float32Array of n rows of d numbers.

/** Brings every row to length 1, in place. Rows of length 0 stay. */
export function normalise(rows, d) {
  for (let at = 0; at < rows.length; at += d) {
    let length = 0;
    for (let j = 0; j < d; j++) length += rows[at + j] ** 2;
    length = Math.sqrt(length) || 1;
    for (let j = 0; j < d; j++) rows[at + j] /= length;
  }
  return rows;
}

/** The matrix of n x n cosines of rows of length 1. */
export function cosines(rows, d) {
  const n = rows.length / d;
  const out = new Float32Array(n * n);
  for (let i = 0; i < n; i++)
    for (let k = i; k < n; k++) {
      let dot = 0;
      for (let j = 0; j < d; j++) dot += rows[i * d + j] * rows[k * d + j];
      out[i * n + k] = out[k * n + i] = dot;
    }
  return out;
}

/** The cosine of row i to every row. */
export function against(rows, d, i) {
  const n = rows.length / d;
  const out = new Float32Array(n);
  for (let k = 0; k < n; k++) for (let j = 0; j < d; j++) out[k] += rows[i * d + j] * rows[k * d + j];
  return out;
}

/**
 * The first two principal components: {points: Float32Array of n x 2, share: the share of the variance of each}.
 *
 * By power iteration on the centred rows, which never forms the d x d covariance. The sign of a component is chosen so that its largest
 * loading is positive, so equal rows give an equal picture.
 */
export function pca(rows, d, iterations = 40) {
  const n = rows.length / d;
  const mean = new Float64Array(d);
  for (let i = 0; i < n; i++) for (let j = 0; j < d; j++) mean[j] += rows[i * d + j] / n;
  const X = new Float32Array(n * d);
  let variance = 0;
  for (let i = 0; i < n; i++)
    for (let j = 0; j < d; j++) {
      const x = rows[i * d + j] - mean[j];
      X[i * d + j] = x;
      variance += x * x;
    }
  const points = new Float32Array(n * 2);
  const share = [0, 0];
  const found = [];
  for (let c = 0; c < 2; c++) {
    let v = Float64Array.from({ length: d }, (_, j) => Math.sin(j * 12.9898 + c * 78.233 + 1));
    const along = new Float64Array(n);
    let power = 0;
    for (let step = 0; step < iterations; step++) {
      for (const u of found) {
        let dot = 0;
        for (let j = 0; j < d; j++) dot += u[j] * v[j];
        for (let j = 0; j < d; j++) v[j] -= dot * u[j];
      }
      let length = Math.hypot(...(d < 5000 ? v : [Math.sqrt(v.reduce((s, x) => s + x * x, 0))]));
      if (length < 1e-30) break;
      for (let j = 0; j < d; j++) v[j] /= length;
      const next = new Float64Array(d);
      power = 0;
      for (let i = 0; i < n; i++) {
        let dot = 0;
        for (let j = 0; j < d; j++) dot += X[i * d + j] * v[j];
        along[i] = dot;
        power += dot * dot;
        for (let j = 0; j < d; j++) next[j] += dot * X[i * d + j];
      }
      if (step < iterations - 1) v = next;
    }
    let largest = 0;
    for (let j = 1; j < d; j++) if (Math.abs(v[j]) > Math.abs(v[largest])) largest = j;
    const sign = v[largest] < 0 ? -1 : 1;
    for (let i = 0; i < n; i++) points[i * 2 + c] = sign * along[i];
    share[c] = variance > 0 ? power / variance : 0;
    found.push(v);
  }
  return { points, share };
}

/** The Shannon entropy of a distribution in bits; weights need not sum to 1. */
export function entropy(weights) {
  let total = 0;
  for (const w of weights) total += Math.abs(w);
  if (!total) return 0;
  let bits = 0;
  for (const w of weights) if (w) bits -= (Math.abs(w) / total) * Math.log2(Math.abs(w) / total);
  return bits;
}

