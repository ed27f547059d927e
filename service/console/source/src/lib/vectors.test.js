import { expect, test } from 'vitest';
import { against, cosines, entropy, normalise, pca } from './vectors.js';

test('principal components of points on a line are the line', () => {
  const rows = new Float32Array([0, 0, 0, 3, 4, 0, 6, 8, 0, 9, 12, 0]);
  const { points, share } = pca(rows, 3);
  expect(share[0]).toBeCloseTo(1, 5);
  expect([...points].filter((_, at) => at % 2 === 0).map((x) => Math.round(x * 1000) / 1000)).toEqual([-7.5, -2.5, 2.5, 7.5]);
  expect([...points].filter((_, at) => at % 2).every((y) => Math.abs(y) < 1e-3)).toBe(true);
});

test('components are orthogonal, the first has more variance, and the picture is the same each time', () => {
  const rows = Float32Array.from({ length: 200 * 8 }, (_, at) => Math.sin(at * 7.13) * (at % 8 === 3 ? 5 : at % 8 === 5 ? 2 : 0.3));
  const { points, share } = pca(rows, 8);
  let dot = 0;
  for (let at = 0; at < 400; at += 2) dot += points[at] * points[at + 1];
  expect(Math.abs(dot)).toBeLessThan(0.05);
  expect(share[0]).toBeGreaterThan(share[1]);
  expect(pca(rows, 8).points).toEqual(points);
});

test('equal points have no variance', () => {
  expect([...pca(new Float32Array([1, 2, 1, 2, 1, 2]), 2).points]).toEqual([0, 0, 0, 0, 0, 0]);
});

test('cosines are symmetric, and 1 on the diagonal', () => {
  const rows = normalise(new Float32Array([3, 4, 0, 2, -3, -4]), 2);
  const found = [...cosines(rows, 2)].map((x) => Math.round(x * 100) / 100);
  expect(found).toEqual([1, 0.8, -1, 0.8, 1, -0.8, -1, -0.8, 1]);
  expect([...against(rows, 2, rows.subarray(2, 4))].map((x) => Math.round(x * 100) / 100)).toEqual([0.8, 1, -0.8]);
});

test('entropy is 0 of one token and log2 n of n alike', () => {
  expect(entropy([0, 1, 0])).toBe(0);
  expect(entropy([0.25, 0.25, 0.25, 0.25])).toBeCloseTo(2);
  expect(entropy([2, -2])).toBeCloseTo(1);
});
