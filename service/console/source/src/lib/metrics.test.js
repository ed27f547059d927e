import { expect, test } from 'vitest';
import { buckets, grown, parse, quantile, sum } from './metrics.js';

const TEXT = `# HELP te_request_count Requests
# TYPE te_request_count counter
te_request_count{method="/v1/embeddings",model="a"} 3.0
te_request_count{method="/metrics",model=""} 7
attnserve_cache_bytes 1.836e+03
d_bucket{le="0.1",model="a \\"b\\""} 2
d_bucket{le="1",model="a \\"b\\""} 6
d_bucket{le="+Inf",model="a \\"b\\""} 6
`;

test('series have labels and values', () => {
  const sample = parse(TEXT);
  expect(sum(sample, 'te_request_count')).toBe(10);
  expect(sum(sample, 'te_request_count', { model: /.+/ })).toBe(3);
  expect(sum(sample, 'attnserve_cache_bytes')).toBe(1836);
  expect(sample.get('d_bucket')[0].labels.model).toBe('a "b"');
});

test('a counter that fell was reset', () => {
  expect(grown(parse('a 5\n'), parse('a 2\n'), 'a')).toBe(2);
  expect(grown(parse('a 5\n'), parse('a 9\n'), 'a')).toBe(4);
});

test('a quantile is inside its bucket', () => {
  const counts = buckets(new Map(), parse(TEXT), 'd');
  expect(counts).toEqual([[0.1, 2], [1, 4], [Infinity, 0]]);
  expect(quantile(0.5, counts)).toBeCloseTo(0.1 + 0.9 * 0.25);
  expect(quantile(0.99, [[1, 0], [Infinity, 5]])).toBe(1);
  expect(quantile(0.5, [[1, 0]])).toBeNull();
});
