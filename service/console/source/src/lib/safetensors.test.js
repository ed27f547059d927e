import { expect, test } from 'vitest';
import { norms, tensors } from './safetensors.js';

test('a state is read, and each head has its norm', () => {
  const header = new TextEncoder().encode(JSON.stringify({ __metadata__: { a: 'b' }, state_0_S: { dtype: 'F32', shape: [1, 2, 1, 2], data_offsets: [0, 16] } }).padEnd(128));
  const buffer = new ArrayBuffer(8 + header.length + 16);
  new DataView(buffer).setBigUint64(0, BigInt(header.length), true);
  new Uint8Array(buffer).set(header, 8);
  new Uint8Array(buffer).set(new Uint8Array(new Float32Array([3, 4, 0, -2]).buffer), 8 + header.length);
  const [found] = tensors(buffer);
  expect(found.name).toBe('state_0_S');
  expect(norms(found)).toEqual([5, 2]);
});
