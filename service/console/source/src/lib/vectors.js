// Cosines and principal components of vectors, as Float32Array of n rows of d numbers.

/** The product of two vectors. */
function dot(a, b) {
  let total = 0;
  for (let j = 0; j < a.length; j++) total += a[j] * b[j];
  return total;
}

const rowsOf = (rows, d) => Array.from({ length: rows.length / d }, (_, i) => rows.subarray(i * d, (i + 1) * d));

/** Brings every row to length 1, in place. Rows of length 0 stay. */
export function normalise(rows, d) {
  for (const row of rowsOf(rows, d)) {
    const length = Math.sqrt(dot(row, row)) || 1;
    row.forEach((x, j) => (row[j] = x / length));
  }
  return rows;
}

/** The product of every row with a vector: its cosine to each, if all have length 1. */
export const against = (rows, d, vector) => Float32Array.from(rowsOf(rows, d), (row) => dot(row, vector));

/** The matrix of n x n cosines of rows of length 1. */
export function cosines(rows, d) {
  const n = rows.length / d;
  const out = new Float32Array(n * n);
  rowsOf(rows, d).forEach((row, i) => out.set(against(rows, d, row), i * n));
  return out;
}

/**
 * The first two principal components: {points: Float32Array of n x 2, share: the share of the variance of each}.
 *
 * By power iteration on the centred rows, which never forms the d x d covariance; the first component is taken out of them before the second
 * is sought. The sign of a component is chosen so that its largest loading is positive, so equal rows give an equal picture.
 */
export function pca(rows, d, iterations = 40) {
  const n = rows.length / d;
  const mean = new Float64Array(d);
  rows.forEach((x, at) => (mean[at % d] += x / n));
  const X = rows.map((x, at) => x - mean[at % d]);
  const centred = rowsOf(X, d);
  const variance = dot(X, X);
  const points = new Float32Array(n * 2);
  const share = [0, 1].map((c) => {
    let v = Float64Array.from({ length: d }, (_, j) => Math.sin(j * 12.9898 + c * 78.233 + 1));
    let along;
    for (let step = 0; step < iterations; step++) {
      if (step) {
        v.fill(0);
        centred.forEach((row, i) => row.forEach((x, j) => (v[j] += along[i] * x)));
      }
      const length = Math.sqrt(dot(v, v)) || 1;
      v = v.map((x) => x / length);
      along = centred.map((row) => dot(row, v));
    }
    const sign = Math.max(...v) < -Math.min(...v) ? -1 : 1;
    along.forEach((x, i) => (points[i * 2 + c] = sign * x));
    centred.forEach((row, i) => row.forEach((x, j) => (row[j] = x - along[i] * v[j])));
    return variance && dot(along, along) / variance;
  });
  return { points, share };
}

/** The Shannon entropy of a distribution in bits; weights need not sum to 1. */
export function entropy(weights) {
  let total = 0;
  for (const w of weights) total += Math.abs(w);
  let bits = 0;
  for (const w of weights) if (w) bits -= (Math.abs(w) / total) * Math.log2(Math.abs(w) / total);
  return bits;
}
